"""The dense MLP: parts joined over ranks are what one rank computes, and that is what the formula says."""

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from steps import World

from inkcap.base.errors import ConfigInvalid
from inkcap.cache.state import LayerState, Plane
from inkcap.layers.mlp import GatedMlp
from inkcap.layers.sconv import ShortConv
from inkcap.ops.values import Normed
from inkcap.parallel.share import Share

CPU = torch.device("cpu")
CHANNELS, UNITS, TOKENS = 6, 8, 5


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_compute_the_formula(size):
    torch.manual_seed(4)
    tensors = {
        "w13.weight": torch.randn(2 * UNITS, CHANNELS),
        "w2.weight": torch.randn(CHANNELS, UNITS),
        "global_scale": torch.tensor([0.3]),
    }
    taps, x, residual = torch.randn(CHANNELS, 1, 4), torch.randn(TOKENS, CHANNELS), torch.randn(TOKENS, CHANNELS)

    def work(comm):
        layer, conv = GatedMlp(CHANNELS, UNITS, comm, torch.float32, CPU), ShortConv(Share(0, 6, 6), 4, 0, CPU)
        for name, slot in layer.slots().items():
            slot.fill(tensors[name])
        conv.slots()["weight"].fill(taps)
        state = LayerState("sconv", 0, (Plane("x", (CHANNELS,), "float32"),), 4, 4, False)
        batch = World([state], length=16).batch([(1, 0, [0] * TOKENS)]).at(0)
        act = layer(Normed(x, torch.ones(CHANNELS), 1e-6))
        return act, layer.settle(act, residual, conv, batch)[0]

    rows = Normed(x, torch.ones(CHANNELS), 1e-6).tensor()
    gate, up = (rows @ tensors["w13.weight"].t()).unflatten(1, (-1, 2)).unbind(2)
    act = F.silu(gate) * up
    product = act @ tensors["w2.weight"].t() * 0.3
    padded = torch.cat([torch.zeros(3, CHANNELS), product])
    want = residual + product + sum(padded[i : i + TOKENS] * taps[:, 0, i] for i in range(4))
    results = on_ranks(size, work)
    torch.testing.assert_close(torch.cat([part for part, _ in results], 1), act, rtol=1e-5, atol=1e-5)
    for _, got in results:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_ranks_that_cannot_share_the_width():
    with pytest.raises(ConfigInvalid, match="width of the dense MLP is 8, which 3 ranks"):
        on_ranks(3, lambda comm: GatedMlp(CHANNELS, UNITS, comm, torch.float32, CPU))
