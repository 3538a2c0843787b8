"""Routers as layers: what they choose and how much of it, written out; every rank holds all of it."""

import pytest
import torch

from inkcap.layers.router import SigmoidRouter, SinkRouter
from inkcap.ops.values import Normed

CPU = torch.device("cpu")
EXPERTS, SHARED, CHANNELS, TOP_K = 7, 2, 5, 3


def filled(router):
    """The router with noise in it."""
    draw = torch.Generator().manual_seed(2)
    for slot in router.slots().values():
        slot.fill(torch.randn(slot.whole, generator=draw))
    return router


def rows():
    return Normed(torch.randn(9, CHANNELS, generator=torch.Generator().manual_seed(3)), torch.ones(CHANNELS), 1e-6)


def scores(router):
    """Of every expert, float64."""
    return rows().tensor().double() @ router.weight.double().t()


def test_shared_experts_compete_in_the_weights():
    router = filled(SinkRouter(CHANNELS, EXPERTS, SHARED, TOP_K, 2.5, torch.float32, CPU))
    route = router(rows())
    assert route.gammas.shape == (9, SHARED)
    for token, logits in enumerate(scores(router)):
        chosen = (logits[:EXPERTS].sigmoid() + router.bias.double()).argsort(descending=True)[:TOP_K]
        assert route.choice[token].tolist() == chosen.tolist()
        shares = torch.cat([logits[chosen], logits[EXPERTS:]]).sigmoid()
        want = shares / shares.sum() * 2.5 * router.global_scale.double()
        got = torch.cat([route.weights[token], route.gammas[token]])
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_weights_are_normalised_over_the_chosen():
    router = filled(SigmoidRouter(CHANNELS, EXPERTS, TOP_K, 2.5, torch.float32, CPU))
    route = router(rows())
    assert route.gammas.shape == (9, 0)
    for token, logits in enumerate(scores(router)):
        chosen = (logits.sigmoid() + router.bias.double()).argsort(descending=True)[:TOP_K]
        assert route.choice[token].tolist() == chosen.tolist()
        want = logits[chosen].sigmoid() / logits[chosen].sigmoid().sum() * 2.5
        torch.testing.assert_close(route.weights[token].double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decisions_are_fp32_and_slots_whole(dtype):
    sink = SinkRouter(CHANNELS, EXPERTS, SHARED, TOP_K, 1.0, dtype, CPU)
    sigmoid = SigmoidRouter(CHANNELS, EXPERTS, TOP_K, 1.0, dtype, CPU)
    whole = {"weight": (EXPERTS + SHARED, CHANNELS), "bias": (EXPERTS,), "global_scale": (1,)}
    for router, shapes in ((sink, whole), (sigmoid, {"weight": (EXPERTS, CHANNELS), "bias": (EXPERTS,)})):
        assert {name: slot.whole for name, slot in router.slots().items()} == shapes
        assert all(slot.dim is None for slot in router.slots().values())
        assert router.bias.dtype == filled(router)(rows()).weights.dtype == torch.float32
