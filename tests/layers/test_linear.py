"""Linear layers spread over ranks: parts joined over ranks are what one rank computes."""

import pytest
import torch
from ranks import on_ranks
from steps import World

from inkcap.cache.state import LayerState, Plane
from inkcap.layers.linear import Columns, Row
from inkcap.layers.sconv import ShortConv
from inkcap.ops.values import Normed
from inkcap.parallel.share import Share, split

CPU = torch.device("cpu")


def test_columns_of_several_matrices_in_one_product():
    torch.manual_seed(0)
    wholes = {"q": torch.randn(8, 5), "r": torch.randn(12, 5)}
    x = torch.randn(3, 5)

    def work(comm):
        layer = Columns(5, {name: split(len(w), comm, name) for name, w in wholes.items()}, torch.float32, CPU)
        for name, slot in layer.slots().items():
            slot.fill(wholes[name.removesuffix(".weight")])
        return layer(Normed(x, torch.ones(5), 1e-6))

    normed = Normed(x, torch.ones(5), 1e-6).tensor()
    for size in (1, 4):
        q, r = (torch.cat(parts, 1) for parts in zip(*on_ranks(size, work), strict=True))
        torch.testing.assert_close(q, normed @ wholes["q"].t())
        torch.testing.assert_close(r, normed @ wholes["r"].t())


@pytest.mark.parametrize("scaled", [False, True])
def test_rows_are_summed_over_ranks_before_the_convolution(scaled):
    torch.manual_seed(1)
    whole, taps = torch.randn(6, 8), torch.randn(6, 1, 4)
    rows, residual, scale = torch.randn(5, 8), torch.randn(5, 6), torch.tensor([0.4]) if scaled else None

    def work(comm):
        layer = Row(split(8, comm, "inputs"), 6, comm, torch.float32, CPU)
        conv = ShortConv(Share(0, 6, 6), 4, 0, CPU)
        for slots, value in ((layer.slots(), whole), (conv.slots(), taps)):
            slots["weight"].fill(value)
        place = World([LayerState("sconv", 0, (Plane("x", (6,), "float32"),), 4, 4, False)], length=16)
        batch = place.batch([(1, 0, [0] * 5)]).at(0)
        mine = rows[:, layer.inputs.start :][:, : layer.inputs.count]
        return layer.settle(mine, residual, conv, batch, scale)[0]

    product = rows @ whole.t() * (1.0 if scale is None else scale)
    padded = torch.cat([torch.zeros(3, 6), product])
    want = residual + product + sum(padded[i : i + 5] * taps[:, 0, i] for i in range(4))
    for size in (1, 2, 4):
        for got in on_ranks(size, work):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
