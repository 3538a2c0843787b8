"""Experts against float64, written out per token and expert."""

import pytest
import torch
import torch.nn.functional as F
from steps import World

from inkcap.cache.state import LayerState, Plane
from inkcap.ops.experts.ref import experts_down, experts_settle, experts_up, routed_down, routed_settle, routed_up
from inkcap.ops.values import Activated, Caps, Normed, Routed

pytestmark = pytest.mark.usefixtures("ops")

CASES = [(1, 5, 2, 2), (9, 7, 3, 1), (33, 4, 4, 2), (2, 40, 6, 2)]  # tokens, experts, top k, shared
CHANNELS, UNITS = 6, 5


def routed(tokens, experts, top_k, shared):
    """A choice that leaves some experts out; expert 0 is everyone's when all are chosen."""
    choice = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    return Routed(choice, torch.rand(tokens, top_k), torch.rand(tokens, shared))


def gated(x, w13):
    """One token through one expert's first half, in float64."""
    gate, up = (w13.double() @ x.double()).view(-1, 2).unbind(1)
    return gate * torch.sigmoid(gate) * up


@pytest.mark.parametrize(("channels", "units"), [(CHANNELS, UNITS), (8, 4)])  # odd rows, and rows of 16 bytes
@pytest.mark.parametrize("case", CASES)
def test_both_halves(case, channels, units):
    tokens, experts, _, shared = case
    rows, route = Normed(torch.randn(tokens, channels), torch.rand(channels), 1e-6), routed(*case)
    w13, w2 = torch.randn(experts, 2 * units, channels), torch.randn(experts, channels, units)
    shared_w13, shared_w2 = torch.randn(shared, 2 * units, channels), torch.randn(channels, shared, units)
    act = experts_up(rows, route, w13, shared_w13)
    got = experts_down(act, w2, shared_w2)
    for t, x in enumerate(rows.tensor()):
        want = torch.zeros(channels).double()
        for place, expert in enumerate(route.choice[t].tolist()):
            half = gated(x, w13[expert])
            torch.testing.assert_close(act.routed[t, place].double(), half, rtol=1e-5, atol=1e-5)
            want += route.weights[t, place].double() * (w2[expert].double() @ half)
        for s in range(shared):
            half = gated(x, shared_w13[s]) * route.gammas[t, s].double()
            torch.testing.assert_close(act.shared[t, s].double(), half, rtol=1e-5, atol=1e-5)
            want += shared_w2[:, s].double() @ half
        torch.testing.assert_close(got[t].double(), want, rtol=1e-5, atol=1e-4)


def test_down_takes_activations_that_another_op_made():
    route = routed(7, 6, 2, 1)
    act = Activated(torch.randn(7, 2, UNITS), torch.randn(7, 1, UNITS), route)
    w2, shared_w2 = torch.randn(6, CHANNELS, UNITS), torch.randn(CHANNELS, 1, UNITS)
    got = experts_down(act, w2, shared_w2)
    want = torch.einsum("tk,tki,tkci->tc", route.weights, act.routed, w2[route.choice]) + F.linear(
        act.shared[:, 0], shared_w2[:, 0]
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_sum_over_experts_is_rounded_once():
    route = routed(50, 6, 3, 2)
    act = Activated(torch.randn(50, 3, 16).bfloat16(), torch.randn(50, 2, 16).bfloat16(), route)
    w2, shared_w2 = torch.randn(6, 64, 16).bfloat16(), torch.randn(64, 2, 16).bfloat16()
    got = experts_down(act, w2, shared_w2)
    assert got.dtype == torch.bfloat16
    products = torch.einsum("tki,tkci->tkc", act.routed.double(), w2.double()[route.choice]).bfloat16().double()
    shared = torch.einsum("tsi,csi->tc", act.shared.double(), shared_w2.double()).bfloat16().double()
    want = (torch.einsum("tk,tkc->tc", route.weights.double(), products) + shared).bfloat16()
    assert (got == want).float().mean() > 0.98  # but for ties of the products' rounding


def test_settle_behind_experts():
    route = routed(4, 3, 2, 1)
    act = Activated(torch.randn(4, 2, UNITS), torch.randn(4, 1, UNITS), route)
    w2, shared_w2 = torch.randn(3, CHANNELS, UNITS), torch.randn(CHANNELS, 1, UNITS)
    taps, residual = torch.randn(CHANNELS, 4), torch.randn(4, CHANNELS)
    for shared in (True, False):
        place = World([LayerState("sconv", 0, (Plane("x", (CHANNELS,), "float32"),), 4, 4, False)], length=16)
        batch = place.batch([(1, 0, [0] * 4)]).at(0)
        where = (residual, taps, batch.view("sconv"), batch.packing)
        if shared:
            product = experts_down(act, w2, shared_w2).double()
            got, _ = experts_settle(act, w2, shared_w2, *where, plane=0)
        else:
            product = routed_down(act.routed, route, w2).double()
            got, _ = routed_settle(act.routed, route, w2, *where, plane=0)
        padded = torch.cat([torch.zeros(3, CHANNELS).double(), product])
        want = residual + product + sum(padded[i : i + 4] * taps[:, i] for i in range(4))
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=1e-5)


def test_routed_experts_alone():
    rows, route = Normed(torch.randn(8, CHANNELS), torch.rand(CHANNELS), 1e-6), routed(8, 5, 2, 0)
    w13, w2 = torch.randn(5, 2 * UNITS, CHANNELS), torch.randn(5, CHANNELS, UNITS)
    act = routed_up(rows, route, w13, Caps(gate=2.0, up=3.0))
    got = routed_down(act, route, w2)
    for t, x in enumerate(rows.tensor().double()):
        want = torch.zeros(CHANNELS).double()
        for place, expert in enumerate(route.choice[t].tolist()):
            gate, up = (w13[expert].double() @ x).view(-1, 2).unbind(1)
            half = 2 * torch.tanh(gate / 2) * torch.sigmoid(gate) * 3 * torch.tanh(up / 3)
            torch.testing.assert_close(act[t, place].double(), half, rtol=1e-5, atol=1e-5)
            want += route.weights[t, place].double() * (w2[expert].double() @ half)
        torch.testing.assert_close(got[t].double(), want, rtol=1e-5, atol=1e-4)
