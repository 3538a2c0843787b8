"""Packed matrices of experts: their slots on one rank and on two, and what they become."""

import pytest
import torch
from packed import packed

from inkcap.base.errors import ConfigInvalid
from inkcap.base.formats import WeightFormat
from inkcap.layers import formats
from inkcap.layers.formats import Grid, matrices, rounded
from inkcap.ops.quantize.coded import Coded
from inkcap.parallel.comm import Comm
from inkcap.parallel.share import Share, split

CPU = torch.device("cpu")
EXPERTS, ROWS, COLUMNS = 3, 10, 128


def parts(stored):
    """The tensors of a checkpoint by slot name, and the exact values they mean."""
    draw = torch.Generator().manual_seed(4)
    tensors, exact = packed(torch.randn(EXPERTS, ROWS, COLUMNS, generator=draw), stored)
    return {"w" + ending: tensor for ending, tensor in tensors.items()}, exact


def grids(dim, ranks):
    """The grid of each rank when rows (1) or columns (2) are split."""
    for rank in range(ranks):
        comm = Comm.alone() if ranks == 1 else Comm(rank, ranks, object())
        rows, columns = Share(0, ROWS, ROWS), Share(0, COLUMNS, COLUMNS)
        if dim == 1:
            rows = split(ROWS, comm, "rows")
        else:
            columns = split(COLUMNS, comm, "columns")
        yield Grid(EXPERTS, rows, columns)


@pytest.mark.parametrize("stored", WeightFormat)
@pytest.mark.parametrize(("dim", "ranks"), [(1, 1), (1, 2), (2, 2), (2, 4)])
def test_ranks_hold_the_parts_of_one_whole(stored, dim, ranks):
    tensors, exact = parts(stored)
    made = []
    for grid in grids(dim, ranks):
        held = matrices(stored, grid, torch.float32, CPU)
        slots = held.slots("w")
        assert slots.keys() == tensors.keys()
        for name, slot in slots.items():
            slot.fill(tensors[name])
        held.unpack()
        made.append(held.weights)
    assert torch.equal(torch.cat(made, dim), exact)


@pytest.mark.parametrize("stored", [kind for kind in WeightFormat if kind is not WeightFormat.DENSE])
def test_kept_codes_stand_for_the_same_matrices(stored, monkeypatch):
    monkeypatch.setattr(formats, "keeps_codes", lambda device: True)
    tensors, exact = parts(stored)
    held = matrices(stored, next(iter(grids(1, 1))), torch.float32, CPU)
    for name, slot in held.slots("w").items():
        slot.fill(tensors[name])
    held.unpack()
    assert isinstance(held.weights, Coded)
    assert held.weights.shape == exact.shape
    assert torch.equal(torch.stack([held.weights[expert] for expert in range(len(held.weights))]), exact)


def test_blocks_of_columns_stay_whole():
    grid = next(iter(grids(2, 2)))
    odd = Grid(EXPERTS, grid.rows, Share(0, 24, 48))
    assert matrices(WeightFormat.DENSE, odd, torch.float32, CPU).weights is not None
    with pytest.raises(ConfigInvalid, match="24 of an expert's 48 columns, which scales of 16"):
        matrices(WeightFormat.NVFP4, odd, torch.float32, CPU)
    with pytest.raises(ConfigInvalid, match="scales of 32 columns"):
        matrices(WeightFormat.MXFP8, odd, torch.float32, CPU)


def test_rows_are_rounded_under_a_static_factor():
    """What is larger than input_amax saturates."""
    stored = WeightFormat.NVFP4_SCALE2
    held = matrices(stored, next(iter(grids(1, 1))), torch.float32, CPU)
    for name, slot in held.slots("w").items():
        slot.fill(parts(stored)[0][name])
    held.unpack()
    x = torch.zeros(2, 32)
    x[0, :4] = torch.tensor([24.0, 12.0, 8.0, -4.0])
    x[1, 0] = 1e6
    got = rounded(x, held.rounding, Comm.alone())
    assert torch.allclose(got[0, :4], x[0, :4], rtol=1e-6)
    assert got[1, 0] == pytest.approx(24.0)
