"""Copies of cache blocks."""

import pytest
import torch

from inkcap.ops.blocks.ref import copy_blocks

pytestmark = pytest.mark.usefixtures("ops")


def test_blocks_are_copied_whole_and_others_stay():
    arena = torch.randn(9, 3, 5)
    before = arena.clone()
    copy_blocks(arena, torch.tensor([4, 4, 8]), torch.tensor([1, 6, 2]))
    for block in range(9):
        assert torch.equal(arena[block], before[{1: 4, 6: 4, 2: 8}.get(block, block)])


def test_sources_are_read_before_targets_are_written():
    arena = torch.arange(4.0)[:, None].repeat(1, 3)
    copy_blocks(arena, torch.tensor([1, 2, 3, 0]), torch.tensor([0, 1, 2, 3]))
    assert arena[:, 0].tolist() == [1.0, 2.0, 3.0, 0.0]


def test_no_moves():
    arena = torch.randn(3, 2)
    before = arena.clone()
    none = torch.empty(0, dtype=torch.int64)
    copy_blocks(arena, none, none)
    assert torch.equal(arena, before)
