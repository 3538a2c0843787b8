"""Planes of the arena neither overlap nor leave their block."""

import pytest
import torch

from inkcap.base.step import BlockMove
from inkcap.cache.arena import ALIGNMENT, Arena, plane_bytes
from inkcap.cache.plan import groups_of
from inkcap.cache.state import LayerState, Plane

STATES = [
    LayerState("full", 0, (Plane("k", (2, 8), "bfloat16"), Plane("v", (2, 8), "bfloat16")), None, 8, True),
    LayerState("sconv", 0, (Plane("k", (3,), "float32"), Plane("odd", (5,), "uint8")), 4, 4, False),
    LayerState("sconv", 2, (Plane("k", (7,), "bfloat16"), Plane("code", (3,), "float8_e4m3fn")), 4, 4, False),
    LayerState("full", 2, (Plane("scalar", (), "float32"), Plane("k", (1, 3), "float32")), None, 8, True),
]
BLOCKS = {"full": 5, "sconv": 9}


@pytest.fixture
def arena() -> Arena:
    return Arena(STATES, BLOCKS, torch.device("cpu"))


def planes(arena: Arena) -> list[torch.Tensor]:
    return [plane for visit in arena.planes for views in visit.values() for plane in views]


def test_planes_have_the_declared_shape_and_dtype(arena):
    assert [set(visit) for visit in arena.planes] == [{"full", "sconv"}, set(), {"full", "sconv"}]
    for state in STATES:
        for plane, view in zip(state.planes, arena.planes[state.visit][state.group], strict=True):
            assert view.shape == (BLOCKS[state.group], state.block, *plane.shape)
            assert str(view.dtype) == f"torch.{plane.dtype}"
            assert view.data_ptr() % ALIGNMENT == view.stride(0) * view.itemsize % ALIGNMENT == 0


def test_what_is_written_to_one_plane_is_read_back_after_all_others_are_written(arena):
    """Every byte gets a value of its own as far as its dtype allows."""
    for number, plane in enumerate(planes(arena)):
        values = torch.randint(
            0, 256, (plane.numel() * plane.itemsize,), generator=torch.Generator().manual_seed(number)
        )
        plane.copy_(values.to(torch.uint8).view(plane.dtype).view(plane.shape))
    for number, plane in enumerate(planes(arena)):
        values = torch.randint(
            0, 256, (plane.numel() * plane.itemsize,), generator=torch.Generator().manual_seed(number)
        )
        assert torch.equal(plane.contiguous().view(torch.uint8).flatten(), values.to(torch.uint8))


def test_no_byte_is_in_two_planes_and_a_block_is_one_stretch(arena):
    for group, storage in arena.storage.items():
        assert storage.is_contiguous()
        storage.zero_()
        for visit in arena.planes:
            for plane in visit.get(group, ()):
                before = storage.clone()
                plane[2].view(torch.uint8).fill_(255)
                changed = (storage != before).any(1)
                assert changed.nonzero().flatten().tolist() == [2]
                assert (storage != before).sum() == plane[2].numel() * plane.itemsize


def test_blocks_are_as_large_as_planned_up_to_alignment(arena):
    for group in groups_of(STATES):
        members = [state for state in STATES if state.group == group.name]
        count = sum(len(state.planes) for state in members)
        size = arena.storage[group.name].shape[1]
        assert group.block_bytes <= size < group.block_bytes + count * ALIGNMENT
    assert plane_bytes(Plane("k", (128, 8), "bfloat16"), 64) == 64 * 128 * 8 * 2  # real layers pay nothing


def test_moves_copy_whole_blocks_and_read_before_they_write(arena):
    for storage in arena.storage.values():
        storage.copy_(torch.arange(len(storage), dtype=torch.uint8)[:, None].expand_as(storage))
    arena.copy([BlockMove("sconv", 1, 5), BlockMove("sconv", 5, 6), BlockMove("full", 3, 1), BlockMove("sconv", 8, 1)])
    assert arena.storage["sconv"].unique_consecutive(dim=1).flatten().tolist() == [0, 8, 2, 3, 4, 1, 5, 7, 8]
    assert arena.storage["full"].unique_consecutive(dim=1).flatten().tolist() == [0, 3, 2, 3, 4]
    arena.copy([])


def test_a_visit_may_not_declare_a_group_twice():
    with pytest.raises(AssertionError, match="visit 0 declares full twice"):
        Arena([STATES[0], STATES[0]], BLOCKS, torch.device("cpu"))


def test_an_unknown_dtype_is_named():
    with pytest.raises(AssertionError, match="'int9' is not a dtype"):
        plane_bytes(Plane("k", (), "int9"), 4)
