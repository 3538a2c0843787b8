"""Experts whose weights are codes, in bf16 activations at one rank's sizes, against the references in fp32."""

from dataclasses import replace

import pytest
import torch
from device.test_products import SINGLE, close, exact, normed
from ops.shapes import EXPERTS, HIDDEN, SHARED, TOP, UNITS, coded, convolved, normal

import inkcap.ops  # noqa: F401  declares the implementations
from inkcap.ops.dispatch import bind
from inkcap.ops.experts.ref import experts_down, experts_settle, experts_up, routed_down, routed_up
from inkcap.ops.values import Activated, Caps, Normed, Routed

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
BITS = [4, 8]
TOKENS = [1, 2, 8, 64, 300, 900, 3000]


@pytest.fixture(autouse=True)
def bound():
    torch.manual_seed(0)
    bind(GPU)
    yield
    bind(torch.device("cpu"))


@pytest.fixture(scope="module", params=BITS)
def weights(request):
    """(w13, shared w13, w2, shared w2)"""
    near = HIDDEN**-0.5
    return (
        coded(request.param, EXPERTS, 2 * UNITS, HIDDEN, GPU, torch.bfloat16),
        normal(SHARED, 2 * UNITS, HIDDEN, device=GPU, scale=near),
        coded(request.param, EXPERTS, HIDDEN, UNITS, GPU, torch.bfloat16),
        normal(HIDDEN, SHARED, UNITS, device=GPU, scale=UNITS**-0.5),
    )


def route_of(tokens):
    choice = torch.rand(tokens, EXPERTS, device=GPU).topk(TOP, 1).indices
    return Routed(choice, torch.rand(tokens, TOP, device=GPU), torch.rand(tokens, SHARED, device=GPU))


def wide(w):
    """The same codes, decoded to fp32."""
    return replace(w, dtype=torch.float32)


@pytest.mark.parametrize("tokens", TOKENS)
def test_both_halves(weights, tokens):
    w13, shared_w13, w2, shared_w2 = weights
    rows, route = normed(tokens), route_of(tokens)
    act = experts_up(rows, route, w13, shared_w13)
    want = experts_up.reference(exact(rows), route, wide(w13), shared_w13.float())
    close(act.routed, want.routed)
    close(act.shared, want.shared)
    want = experts_down.reference(Activated(act.routed.float(), act.shared.float(), route), wide(w2), shared_w2.float())
    close(experts_down(act, w2, shared_w2), want)


@pytest.mark.parametrize("size", [1.0, 1e6])
def test_one_large_token(weights, size):
    """Rows are normed behind the product, so their size must not matter to it."""
    w13, shared_w13, _, _ = weights
    rows, route = normed(1), route_of(1)
    large = Normed((rows.rows.float() * size).bfloat16(), rows.weight, 1e-6)
    close(
        experts_up(large, route, w13, shared_w13).routed,
        experts_up.reference(exact(large), route, wide(w13), shared_w13.float()).routed,
    )


@pytest.mark.parametrize("tokens", [1, 8, 16, 300])
def test_routed_experts_alone(weights, tokens):
    w13, _, w2, _ = weights
    rows, route, caps = normed(tokens), route_of(tokens), Caps(gate=2.0, up=3.0)
    act = routed_up(rows, route, w13, caps)
    close(act, routed_up.reference(exact(rows), route, wide(w13), caps))
    close(routed_down(act, route, w2), routed_down.reference(act.float(), route, wide(w2)))


@pytest.mark.parametrize("steps", [SINGLE[:1] * 5, SINGLE[1:] * 5, [((1, 6), (2, 1)), ((2, 1), (1, 1)), ((1, 40),)]])
def test_settle_behind_experts(weights, steps):
    w13, shared_w13, w2, shared_w2 = weights
    taps = normal(4, HIDDEN, device=GPU, dtype=torch.float32, scale=0.2).t()
    for view, packing, plane in convolved(HIDDEN, steps, torch.bfloat16, GPU):
        tokens = len(packing.positions)
        rows, residual, route = normed(tokens), normal(tokens, HIDDEN, device=GPU), route_of(tokens)
        act = experts_up(rows, route, w13, shared_w13)
        copy = plane.float()
        want, _ = experts_settle.reference(
            Activated(act.routed.float(), act.shared.float(), route), wide(w2), shared_w2.float(), residual.float(),
            taps, replace(view, planes=(copy[:, :, :0], copy), memo={}), packing, plane=1,
        )  # fmt: skip
        got, _ = experts_settle(act, w2, shared_w2, residual, taps, view, packing, plane=1)
        close(got, want)
        close(plane.nan_to_num(), copy.nan_to_num())
