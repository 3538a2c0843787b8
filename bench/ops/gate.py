"""No time of a kernel whose tests fail: runs the device tests of a file before a benchmark prints anything."""

import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2] / "tests"


def require(*files: str) -> None:
    """Run tests/device/FILE for each name; ends the process with a message when one fails."""
    os.environ["TRITON_INTERPRET"] = "0"
    status = pytest.main(
        ["-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", *(str(TESTS / "device" / f) for f in files)]
    )
    if status != 0:
        sys.exit(f"not timed: {' '.join(files)} failed")
