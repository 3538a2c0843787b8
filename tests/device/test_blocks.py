"""Copies of cache blocks at the size of an arena's."""

import pytest
import torch

from inkcap.ops.blocks.ref import copy_blocks
from inkcap.ops.blocks.triton import copy_blocks_triton

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [131072, 1310720 + 16])
def test_blocks_beyond_2_31_bytes(size):
    blocks = 5_000_000_000 // size
    arena = torch.empty(blocks, size, dtype=torch.uint8, device="cuda").random_(0, 256)
    order = torch.randperm(blocks, device="cuda")
    source, target = order[:20], torch.cat([order[20:35], order[:5]])  # the first five are read and written
    want = arena.clone()
    copy_blocks.reference(want, source, target)
    copy_blocks_triton(arena, source, target)
    assert torch.equal(arena, want)
