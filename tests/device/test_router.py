"""Routers at sizes of published models in bf16, against the references: equal scores, NaN, one token and several."""

import pytest
import torch
from ops.shapes import normal

import inkcap.ops  # noqa: F401  declares the implementations
from inkcap.ops.letters import BOXES
from inkcap.ops.quantize.ref import Rounding
from inkcap.ops.router import rounded
from inkcap.ops.router.ref import route_sigmoid, route_sigmoid_rounded, route_sink
from inkcap.ops.values import Normed

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
# channels, experts, shared ones, chosen ones
SIZES = {"small": (4608, 384, 0, 8), "mini": (2304, 128, 0, 8), "tp8": (6144, 256, 2, 6), "odd": (520, 37, 3, 5)}
EACH = pytest.mark.parametrize("size", SIZES)
WAYS = pytest.mark.parametrize("way", ["triton", "fixed"])


@pytest.fixture(autouse=True)
def empty():
    """Programs leave no letter behind."""
    torch.manual_seed(0)
    yield
    assert all((box == key[-1]).all() for key, box in BOXES.items())


def both(way, x, weight, bias, top, *, normed=False):
    """What the kernels and the reference on the CPU, in fp32, choose and weigh for rows x.

    Only one token's letters come of a row that is not rounded when it is normed.
    """
    here, scale = Normed(x, torch.ones(x.shape[1], device=GPU), 0.0), torch.full((1,), 1.25, device=GPU)
    if normed:
        here.normed = x
    shared = len(weight) - len(bias)
    op, extra = (route_sink, (scale,)) if shared else (route_sigmoid, ())
    got = op.implementations[way][0](here, weight, bias, *extra, top_k=top, route_scale=2.0)
    there = Normed(x.cpu().float(), torch.ones(x.shape[1]), 0.0)
    if normed or way == "fixed" or len(x) > 1:
        there.normed = here.tensor().cpu().float()
    cpu = (weight.cpu().float(), bias.cpu(), *(each.cpu() for each in extra))
    return got, op.reference(there, *cpu, top_k=top, route_scale=2.0)


def agree(got, want):
    assert torch.equal(got.choice.cpu(), want.choice)
    torch.testing.assert_close(got.weights.cpu(), want.weights, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got.gammas.cpu(), want.gammas, rtol=1e-4, atol=1e-6)


@EACH
@WAYS
@pytest.mark.parametrize("tokens", [1, 2, 9, 70])
def test_choices(way, size, tokens):
    """Scores lie so far apart that no rounding changes their order."""
    channels, experts, shared, top = SIZES[size]
    for _ in range(20 if tokens == 1 else 1):
        weight = normal(experts + shared, channels, device=GPU, dtype=torch.bfloat16) / channels**0.5
        x = normal(tokens, channels, device=GPU, dtype=torch.bfloat16)
        bias = torch.randperm(experts, device=GPU).float()
        agree(*both(way, x, weight, bias, top, normed=tokens == 1 and not shared))


@EACH
@WAYS
@pytest.mark.parametrize("tokens", [1, 3])
def test_equal_scores_go_to_the_lowest_index(way, size, tokens):
    """Experts in one lane, in one row of lanes, and in different ones."""
    channels, experts, shared, top = SIZES[size]
    weight = torch.zeros(experts + shared, channels, device=GPU, dtype=torch.bfloat16)
    x = normal(tokens, channels, device=GPU, dtype=torch.bfloat16)
    for equal in ([], [33, 1, 0], [5, 36, 4, 35, 3, 34], [36, 31, 30, 2], list(range(20, 37))):
        bias = torch.zeros(experts, device=GPU)
        bias[equal] = 1.0
        bias[7] = 2.0
        agree(*both(way, x, weight, bias, top))


@EACH
@WAYS
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_token_of_nan_chooses_experts_that_exist(way, size, tokens):
    channels, experts, shared, top = SIZES[size]
    weight = normal(experts + shared, channels, device=GPU, dtype=torch.bfloat16)
    for bits in (0x7FC0, -1):  # a NaN below zero too
        x = torch.full((tokens, channels), bits, device=GPU, dtype=torch.int16).view(torch.bfloat16)
        got, want = both(way, x, weight, torch.zeros(experts, device=GPU), top)
        assert ((got.choice >= 0) & (got.choice < experts)).all()
        if way == "triton" and tokens == 1:
            assert torch.equal(got.choice.cpu(), want.choice)  # NaN is the largest score: the first experts


@EACH
def test_many_launches_in_a_graph(size):
    """Each finds the box empty, whatever the one before did; the row changes between replays."""
    channels, experts, shared, top = SIZES[size]
    x = normal(1, channels, device=GPU, dtype=torch.bfloat16)
    weights = [normal(experts + shared, channels, device=GPU, dtype=torch.bfloat16) / channels**0.5 for _ in range(3)]
    bias = torch.randperm(experts, device=GPU).float()
    norm, scale = torch.ones(channels, device=GPU), torch.ones(1, device=GPU)
    run = (route_sink if shared else route_sigmoid).implementations["triton"][0]
    graph, found = torch.cuda.CUDAGraph(), []
    for weight in weights:  # boxes are not made in a graph
        both("triton", x, weight, bias, top)
    with torch.cuda.graph(graph):
        for weight in 10 * weights:
            rows, extra = Normed(x, norm, 0.0), (scale,) if shared else ()
            found.append(run(rows, weight, bias, *extra, top_k=top, route_scale=2.0))
    for _ in range(50):
        x.normal_()
        graph.replay()
    torch.cuda.synchronize()
    for weight, got in zip(10 * weights, found, strict=True):
        _, want = both("triton", x, weight, bias, top)
        assert torch.equal(got.choice.cpu(), want.choice)


@pytest.mark.parametrize("size", [name for name, (_, _, shared, _) in SIZES.items() if not shared])
@pytest.mark.parametrize("how", [Rounding(16), Rounding(32)], ids=["rows", "powers"])
def test_rounded(size, how):
    channels, experts, _, top = SIZES[size]
    for _ in range(10):
        weight = normal(experts, channels, device=GPU, dtype=torch.bfloat16) / channels**0.5
        x = normal(1, channels, device=GPU, dtype=torch.bfloat16)
        bias = torch.randperm(experts, device=GPU).float()
        rows, plain = Normed(x, torch.ones(channels, device=GPU), 0.0), Normed(x.cpu(), torch.ones(channels), 0.0)
        rows.normed, plain.normed = rows.rows, plain.rows
        route, own = rounded.route_sigmoid_rounded_triton(rows, weight, bias, how, top_k=top, route_scale=2.0)
        want, same = route_sigmoid_rounded.reference(plain, weight.cpu(), bias.cpu(), how, top_k=top, route_scale=2.0)
        agree(route, want)
        assert torch.equal(own.cpu(), same)
