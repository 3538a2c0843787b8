"""Planes of the arena neither overlap nor leave their block."""

import pytest
import torch

from inkcap.base.step import BlockMove
from inkcap.cache.arena import Arena
from inkcap.cache.plan import groups_of, layout_of
from inkcap.cache.state import ALIGNMENT, LayerState, Plane, plane_bytes

STATES = [
    LayerState("full", 0, (Plane("k", (2, 8), "bfloat16"), Plane("v", (2, 8), "bfloat16")), None, 8, True),
    LayerState("sconv", 0, (Plane("k", (3,), "float32"), Plane("odd", (5,), "uint8")), 4, 4, False),
    LayerState("sconv", 2, (Plane("k", (7,), "bfloat16"), Plane("code", (3,), "float8_e4m3fn")), 4, 4, False),
    LayerState("full", 2, (Plane("scalar", (), "float32"), Plane("k", (1, 3), "float32")), None, 8, True),
]
SIZE = 5000


@pytest.fixture
def arena() -> Arena:
    return Arena(STATES, SIZE, torch.device("cpu"))


def test_planes_have_the_declared_shape_and_dtype(arena):
    assert [set(visit) for visit in arena.planes] == [{"full", "sconv"}, set(), {"full", "sconv"}]
    for state in STATES:
        for plane, view in zip(state.planes, arena.planes[state.visit][state.group], strict=True):
            assert view.shape == (len(arena.storage[state.group]), state.block, *plane.shape)
            assert str(view.dtype) == f"torch.{plane.dtype}"
            assert view.data_ptr() % ALIGNMENT == view.stride(0) * view.itemsize % ALIGNMENT == 0


@pytest.mark.parametrize("group", ["full", "sconv"])
def test_what_is_written_to_one_plane_is_read_back_after_all_others_of_the_group_are_written(arena, group):
    """Every byte gets a value of its own as far as its dtype allows."""
    mine = [plane for visit in arena.planes for plane in visit.get(group, ())]
    for number, plane in enumerate(mine):
        values = torch.randint(
            0, 256, (plane.numel() * plane.itemsize,), generator=torch.Generator().manual_seed(number)
        )
        plane.copy_(values.to(torch.uint8).view(plane.dtype).view(plane.shape))
    for number, plane in enumerate(mine):
        values = torch.randint(
            0, 256, (plane.numel() * plane.itemsize,), generator=torch.Generator().manual_seed(number)
        )
        assert torch.equal(plane.contiguous().view(torch.uint8).flatten(), values.to(torch.uint8))


def test_groups_share_the_memory_as_their_layout_says(arena):
    """A block of one group changes no block of another that lies in another slab."""
    layout = layout_of(groups_of(STATES), SIZE)
    assert len(arena.memory) >= layout.size_bytes
    full, sconv = layout.groups
    arena.memory.zero_()
    for block in layout.cuts(full)[1]:
        arena.storage["full"][block] = 255
    for block in (0, *layout.cuts(sconv)[0], *layout.cuts(sconv)[2]):
        assert not arena.storage["sconv"][block].any()
    assert any(arena.storage["sconv"][block].any() for block in layout.cuts(sconv)[1])


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


def test_blocks_are_as_large_as_planned(arena):
    for group in groups_of(STATES):
        assert group.block_bytes == arena.storage[group.name].shape[1]
    assert plane_bytes(Plane("k", (128, 8), "bfloat16"), 64) == 64 * 128 * 8 * 2  # real layers pay nothing


@pytest.mark.parametrize(("group", "pairs"), [("sconv", [(1, 5), (5, 6), (8, 1)]), ("full", [(3, 1)])])
def test_moves_copy_whole_blocks_and_read_before_they_write(arena, group, pairs):
    storage = arena.storage[group]
    storage.copy_(torch.arange(len(storage), dtype=torch.uint8)[:, None].expand_as(storage))
    expected = list(range(len(storage)))
    for source, target in pairs:
        expected[target] = source
    arena.copy([BlockMove(group, source, target) for source, target in pairs])
    assert storage.unique_consecutive(dim=1).flatten().tolist() == expected
    arena.copy([])


def test_a_visit_may_not_declare_a_group_twice():
    with pytest.raises(AssertionError, match="visit 0 declares full twice"):
        Arena([STATES[0], STATES[0]], SIZE, torch.device("cpu"))


def test_an_unknown_dtype_is_named():
    with pytest.raises(KeyError, match="int9"):
        plane_bytes(Plane("k", (), "int9"), 4)
