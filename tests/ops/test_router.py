"""Routers against float64, written out per token."""

import math

import pytest
import torch

from inkcap.ops.router.ref import route_sigmoid, route_sink
from inkcap.ops.values import Normed

pytestmark = pytest.mark.usefixtures("ops")


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def rows(tokens, channels):
    return Normed(torch.randn(tokens, channels), torch.rand(channels) + 0.5, 1e-6)


@pytest.mark.parametrize(("tokens", "experts", "shared", "top_k"), [(1, 3, 1, 1), (17, 13, 2, 4), (5, 6, 3, 6)])
def test_route_sink(tokens, experts, shared, top_k):
    x, weight = rows(tokens, 9), torch.randn(experts + shared, 9)
    bias, scale = torch.randn(experts), torch.tensor([1.25])
    got = route_sink(x, weight, bias, scale, top_k=top_k, route_scale=8.0)
    logits = x.tensor().double() @ weight.double().t()
    for t in range(tokens):
        scores = [sigmoid(logits[t, e]) + bias[e].item() for e in range(experts)]
        chosen = sorted(range(experts), key=lambda e: -scores[e])[:top_k]  # the sort is stable: ties go to low indices
        assert got.choice[t].tolist() == chosen
        parts = [sigmoid(logits[t, e]) for e in [*chosen, *range(experts, experts + shared)]]
        want = [part / sum(parts) * 8.0 * 1.25 for part in parts]
        assert torch.cat([got.weights[t], got.gammas[t]]).tolist() == pytest.approx(want, rel=1e-5)


def test_route_sink_gives_equal_scores_to_the_lowest_index():
    x = Normed(torch.ones(2, 4), torch.ones(4), 0.0)
    got = route_sink(x, torch.zeros(40, 4), torch.zeros(38), torch.ones(1), top_k=3, route_scale=1.0)
    assert got.choice.tolist() == [[0, 1, 2]] * 2
    bias = torch.zeros(38)
    bias[[30, 7, 19]] = 1.0
    got = route_sink(x, torch.zeros(40, 4), bias, torch.ones(1), top_k=4, route_scale=1.0)
    assert got.choice.tolist() == [[7, 19, 30, 0]] * 2


def test_route_sink_bears_logits_whose_sigmoid_underflows():
    x = Normed(torch.ones(1, 1), torch.ones(1), 0.0)
    weight = torch.tensor([[-200.0], [-201.0], [-202.0]])
    got = route_sink(x, weight, torch.zeros(2), torch.ones(1), top_k=2, route_scale=1.0)
    parts = [1.0, math.exp(-1), math.exp(-2)]
    assert [*got.weights[0].tolist(), *got.gammas[0].tolist()] == pytest.approx([p / sum(parts) for p in parts])


def test_logits_are_not_rounded_to_bf16():
    x = Normed(torch.randn(64, 32).bfloat16(), torch.ones(32), 1e-6)
    weight = (0.2 * torch.randn(66, 32)).bfloat16()  # small: sigmoids of large logits are equal in fp32
    got = route_sink(x, weight, torch.zeros(64), torch.ones(1), top_k=8, route_scale=1.0)
    logits = x.tensor().double() @ weight.double().t()
    assert torch.equal(got.choice, logits[:, :64].topk(8).indices)
    assert got.weights.dtype == torch.float32


def test_route_sigmoid():
    x, weight, bias = rows(11, 7), torch.randn(9, 7), torch.randn(9)
    got = route_sigmoid(x, weight, bias, top_k=3, route_scale=2.0)
    logits = x.tensor().double() @ weight.double().t()
    for t in range(11):
        scores = [sigmoid(logits[t, e]) + bias[e].item() for e in range(9)]
        chosen = sorted(range(9), key=lambda e: -scores[e])[:3]
        parts = [sigmoid(logits[t, e]) for e in chosen]
        assert got.choice[t].tolist() == chosen
        assert got.weights[t].tolist() == pytest.approx([2.0 * part / sum(parts) for part in parts], rel=1e-5)
    assert got.gammas.shape == (11, 0)
