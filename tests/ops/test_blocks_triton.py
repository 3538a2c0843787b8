"""Copies of cache blocks by the kernel, under the interpreter."""

import pytest
import torch

from inkcap.ops.blocks import triton as kernels
from inkcap.ops.blocks.ref import copy_blocks


@pytest.mark.parametrize(("kind", "shape"), [(torch.uint8, (9, 32)), (torch.uint8, (9, 7)), (torch.float16, (9, 3, 5))])
def test_blocks(monkeypatch, kind, shape):
    """Several programs a block; sources that are targets, too; words of every size."""
    monkeypatch.setattr(kernels, "WORDS", 4)
    torch.manual_seed(0)
    arena = torch.randint(0, 200, shape).to(kind)
    want, source, target = arena.clone(), torch.tensor([4, 4, 8, 2]), torch.tensor([1, 8, 2, 4])
    copy_blocks.reference(want, source, target)
    kernels.copy_blocks_triton(arena, source, target)
    assert torch.equal(arena, want)


def test_blocks_that_stand_apart():
    torch.manual_seed(0)
    whole = torch.randint(0, 200, (5, 48)).to(torch.uint8)
    want, source, target = whole.clone(), torch.tensor([3, 0]), torch.tensor([0, 1])
    copy_blocks.reference(want[:, 16:32], source, target)
    kernels.copy_blocks_triton(whole[:, 16:32], source, target)
    assert torch.equal(whole, want)


def test_no_moves():
    none = torch.empty(0, dtype=torch.int64)
    kernels.copy_blocks_triton(torch.zeros(3, 8), none, none)
