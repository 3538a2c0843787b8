"""Reference numerics over gloo: two ranks compute what one does, though each sees half of a row that it rounds."""

import pytest

from inkcap.models.inkling import demo as first
from inkcap.models.inkling2 import demo as second
from inkcap.models.quantize import Settings, quantize

WORDS = {"vocabulary": 90, "padded_vocabulary": 96, "expert_width": 64}


@pytest.fixture(scope="module")
def differences(run_ranks, tmp_path_factory):
    """Per rank and generation: largest difference of logits between ranks and one rank, and between the numerics."""
    root = tmp_path_factory.mktemp("numerics")
    first.write(root / "1", shape=first.DemoShape(**WORDS, layers=4))
    second.write(root / "2", shape=second.DemoShape(**WORDS))
    for name, settings in (("1", Settings(format="nvfp4")), ("2", Settings(format="mixed", four_over_six=True))):
        quantize(root / name, root / f"{name}q", settings, progress=False)
    return run_ranks("rank_numerics.py", 2, root / "1q", root / "2q")


@pytest.mark.parametrize("generation", [0, 1])
def test_two_ranks_compute_what_one_does(differences, generation):
    for rank in differences:
        assert rank[generation]["ranks"] < 1e-5
        assert rank[generation]["exact"] > 1e-3
