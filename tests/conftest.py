"""For all tests: modules beside this file can be imported, memory from torch.empty is NaN until written, and Triton
kernels run in the interpreter unless the environment says otherwise."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are declared; scripts/test-gpu sets it to 0
sys.path.insert(0, str(Path(__file__).parent))


def poisoned(make):
    """`make`, with floating-point results full of NaN."""

    def empty(*args, **kwargs):
        out = make(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    return empty


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Uninitialised memory that is read shows as NaN. Tests that never import torch do not pay for it."""
    if torch := sys.modules.get("torch"):
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch.Tensor, "new_empty"),
        ):
            monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
