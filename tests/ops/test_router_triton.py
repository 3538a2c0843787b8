"""The kernels of the routers: the references' tests, run with them under the interpreter."""

import pytest
import torch
from ops import test_router

from inkcap.ops.letters import BOXES
from inkcap.ops.norm.ref import rms_norm
from inkcap.ops.router.ref import route_sigmoid
from inkcap.ops.router.triton import route_sigmoid_fixed, route_sigmoid_triton, route_sink_fixed, route_sink_triton
from inkcap.ops.values import Normed


@pytest.fixture(autouse=True)
def ops(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(test_router, "route_sink", route_sink_triton)
    monkeypatch.setattr(test_router, "route_sigmoid", route_sigmoid_triton)
    yield
    assert all((box == key[-1]).all() for key, box in BOXES.items())


@pytest.mark.parametrize(("tokens", "experts", "shared", "top_k"), [(1, 3, 1, 1), (7, 13, 2, 4), (1, 6, 3, 6)])
def test_route_sink(tokens, experts, shared, top_k):
    test_router.test_route_sink(tokens, experts, shared, top_k)


def test_many_tokens_go_to_the_library(monkeypatch):
    monkeypatch.setattr("inkcap.ops.router.triton.FEW", 1)
    test_router.test_route_sink(5, 13, 2, 4)


def test_one_row_leaves_itself_normed():
    x, weight = Normed(torch.randn(1, 100).half(), torch.rand(100) + 0.5, 1e-2), torch.randn(7, 100).half()
    route_sigmoid_triton(x, weight, torch.zeros(7), top_k=2, route_scale=1.0)
    assert torch.equal(x.normed, rms_norm.reference(x.rows, x.weight, 1e-2))


def test_rows_in_parts():
    x, weight = Normed(torch.randn(3, 600), torch.ones(600), 1e-6), torch.randn(70, 600) / 24
    got = route_sigmoid_triton(x, weight, torch.zeros(70), top_k=2, route_scale=1.0)
    assert torch.equal(got.choice, (x.tensor() @ weight.t()).topk(2).indices)


@pytest.mark.parametrize("shared", [0, 2])
def test_one_token_of_deterministic_mode_is_one_of_several(shared):
    x, weight = Normed(torch.randn(3, 600), torch.ones(600), 1e-6), torch.randn(70, 600) / 24
    bias = torch.randn(70 - shared) / 10

    def route(rows):
        if shared:
            return route_sink_fixed(rows, weight, bias, torch.ones(1), top_k=4, route_scale=2.0)
        return route_sigmoid_fixed(rows, weight, bias, top_k=4, route_scale=2.0)

    whole = route(x)
    for t in range(3):
        one = route(Normed(x.rows[t : t + 1], x.weight, x.eps))
        for got, want in ((one.choice, whole.choice), (one.weights, whole.weights), (one.gammas, whole.gammas)):
            assert torch.equal(got[0], want[t])


def test_route_sink_gives_equal_scores_to_the_lowest_index():
    test_router.test_route_sink_gives_equal_scores_to_the_lowest_index()


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of the interpreter's exp, which gives infinity
def test_route_sink_bears_logits_whose_sigmoid_underflows():
    test_router.test_route_sink_bears_logits_whose_sigmoid_underflows()


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize(("experts", "top_k"), [(130, 8), (33, 33)])
def test_equal_scores_within_and_across_lanes(tokens, experts, top_k):
    x, weight = Normed(torch.randn(tokens, 8), torch.ones(8), 0.0), torch.zeros(experts, 8)
    for kinds in (1, 3):
        bias = torch.randint(-1, kinds - 1, (experts,)).float()
        want = route_sigmoid.reference(x, weight, bias, top_k=top_k, route_scale=2.0)
        got = route_sigmoid_triton(x, weight, bias, top_k=top_k, route_scale=2.0)
        assert torch.equal(got.choice, want.choice)
        torch.testing.assert_close(got.weights, want.weights)


def test_route_sigmoid():
    test_router.test_route_sigmoid()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("tokens", [1, 2])
def test_a_token_of_nan_chooses_experts_that_exist(tokens):
    x = Normed(torch.full((tokens, 4), float("nan")), torch.ones(4), 1e-6)
    got = route_sink_triton(x, torch.randn(11, 4), torch.zeros(9), torch.ones(1), top_k=3, route_scale=1.0)
    assert ((got.choice >= 0) & (got.choice < 9)).all()


def test_rows_that_are_normed_already_are_taken_as_they_are():
    x = Normed(torch.randn(1, 8), torch.ones(8), 1e-6)
    x.normed = torch.randn(1, 8)
    weight = torch.randn(10, 8)
    got = route_sigmoid_triton(x, weight, torch.zeros(10), top_k=2, route_scale=1.0)
    assert got.choice.tolist() == (x.normed @ weight.t()).topk(2).indices.tolist()
