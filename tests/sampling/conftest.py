"""A compiler over the published vocabulary, which takes seconds to make: one for all tests of a process."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from inkcap.base.matching import Compiler
from inkcap.base.vocabulary import read_rank_file


@pytest.fixture(scope="session")
def compiler():
    spec = find_spec("tml_renderers")
    return Compiler(read_rank_file(Path(spec.origin).parent / "data" / "o200k_base.tiktoken"))
