"""Products, norms, routers and experts in bf16 at one rank's sizes, against the references in fp32 on the device."""

from dataclasses import replace

import pytest
import torch
from ops.shapes import (
    EXPERTS,
    HEAD,
    HIDDEN,
    PRODUCTS,
    SETTLED,
    TOP,
    Settle,
    convolved,
    expert_weights,
    normal,
    settle_case,
)

import inkcap.ops  # noqa: F401  declares the implementations
from inkcap.ops.dispatch import OPS, bind
from inkcap.ops.experts.ref import experts_down, experts_settle, experts_up
from inkcap.ops.linear.ref import logits, project, settle
from inkcap.ops.norm.ref import embed_norm, rms_norm
from inkcap.ops.router.ref import route_sink
from inkcap.ops.sconv.ref import sconv
from inkcap.ops.values import Activated, Normed

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
TOKENS = [1, 2, 8, 64, 300]
ROUNDED = 6e-3  # relative error, of norms, that a few roundings to bf16 make
SINGLE = [tuple((row, 1) for row in range(rows)) for rows in (1, 3)]


@pytest.fixture(autouse=True)
def bound():
    torch.manual_seed(0)
    bind(GPU)
    yield
    bind(torch.device("cpu"))


@pytest.fixture(params=[1 << 30, 1], ids=["", "walked"])
def walked(request, monkeypatch):
    """Convolutions of many tokens, also where there are few."""
    for package in ("sconv", "experts"):
        monkeypatch.setattr(f"inkcap.ops.{package}.triton.WALKED", request.param)


@pytest.fixture(scope="module")
def weights():
    return expert_weights(GPU, experts=32)


def close(got, want, limit=ROUNDED):
    """Compare norms of the difference and the worst element, which catches one wrong row."""
    got, want = got.double(), want.double()
    assert got.shape == want.shape
    assert got.isfinite().all()
    assert (got - want).norm() <= limit * want.norm()
    assert (got - want).abs().max() <= 8 * limit * want.abs().max()


def normed(tokens):
    rows = normal(tokens, HIDDEN, device=GPU)
    return Normed(rows, torch.rand(HIDDEN, device=GPU) + 0.5, 1e-6)


def exact(rows):
    return Normed(rows.rows.float(), rows.weight, rows.eps)


KERNELS = """project settle logits rms_norm embed_norm sconv swiglu swiglu_capped route_sink route_sigmoid
experts_up experts_down experts_settle routed_up routed_down routed_settle"""


def test_every_product_has_a_kernel():
    assert {name: OPS[name].chosen for name in KERNELS.split()} == dict.fromkeys(KERNELS.split(), "triton")


@pytest.mark.parametrize("tokens", TOKENS)
def test_norms(tokens):
    rows = normed(tokens)
    close(rms_norm(rows.rows, rows.weight, 1e-6), rms_norm.reference(rows.rows.float(), rows.weight, 1e-6))
    ids = torch.randint(tokens, (tokens,), device=GPU)
    close(embed_norm(ids, rows.rows, rows.weight, 1e-6), rms_norm.reference(rows.rows.float(), rows.weight, 1e-6)[ids])


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_project(name, tokens):
    rows, weight = normed(tokens), normal(*PRODUCTS[name], device=GPU, scale=HIDDEN**-0.5)
    close(project(rows, weight), project.reference(exact(rows), weight.float()))


@pytest.mark.parametrize("tokens", TOKENS)
def test_logits(tokens):
    hidden, weight = normal(tokens, HIDDEN, device=GPU), normal(*HEAD, device=GPU, scale=HIDDEN**-0.5)
    got, want = logits(hidden, weight, 1 / 24), logits.reference(hidden, weight, 1 / 24)
    assert got.dtype == torch.float32
    close(got, want, 1e-5)


def as_exact(arguments, plane):
    """The arguments of `settle` in fp32, over a copy of the state."""
    copy = plane.float()
    view = replace(arguments["view"], planes=(copy[:, :, :0], copy), memo={})
    tensors = {k: v.float() for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    return {**arguments, **tensors, "view": view}, copy


@pytest.mark.parametrize("steps", [SINGLE[:1] * 5, SINGLE[1:] * 5, [((1, 6), (2, 1)), ((2, 1), (1, 1)), ((1, 40),)]])
@pytest.mark.parametrize("name", SETTLED)
def test_settle(name, steps, walked):
    channels, inputs = SETTLED[name]
    for scaled in (False, True):
        for arguments, plane in settle_case(
            Settle(inputs, channels, scaled, False, steps=tuple(steps)), torch.bfloat16, GPU
        ):
            arguments["taps"] = arguments["taps"] / 4
            reference, after = as_exact(arguments, plane)
            want, _ = settle.reference(**reference)
            got, _ = settle(**arguments)
            close(got, want)
            close(plane.nan_to_num(), after.nan_to_num())


@pytest.mark.parametrize("counts", [[7], [1, 300, 2, 64]])
def test_sconv(counts, walked):
    steps = [tuple((row, n) for row, n in enumerate(counts[:4]) if n <= 40) or ((0, 7),), ((0, 5), (1, 9))]
    taps = normal(4, HIDDEN, device=GPU, dtype=torch.float32, scale=0.5).t()
    for view, packing, plane in convolved(HIDDEN, steps, torch.bfloat16, GPU):
        x, residual = (normal(len(packing.positions), HIDDEN, device=GPU) for _ in range(2))
        copy = plane.float()
        want = sconv.reference(
            x.float(), taps, replace(view, planes=(copy[:, :, :0], copy), memo={}), packing, plane=1,
            residual=residual.float(),
        )  # fmt: skip
        close(sconv(x, taps, view, packing, plane=1, residual=residual), want)
        assert torch.equal(plane.float().nan_to_num(7.0), copy.nan_to_num(7.0))


@pytest.mark.parametrize("tokens", TOKENS)
def test_route_sink(tokens):
    weights, rows = expert_weights(GPU, experts=EXPERTS), normed(tokens)
    for _ in range(3):  # the arrival counter starts over
        got = route_sink(rows, weights.router, weights.bias, weights.scale, top_k=TOP, route_scale=8.0)
    logit = exact(rows).tensor() @ weights.router.float().t()
    score = logit[:, :EXPERTS].sigmoid() + weights.bias
    assert (got.choice.sort(1).values.diff(dim=1) > 0).all()
    least = score.topk(TOP, 1).values[:, -1:]
    assert (score.gather(1, got.choice) >= least - 4e-3).all()  # near ties may fall either way
    picked = torch.cat([logit.gather(1, got.choice), logit[:, EXPERTS:]], 1).sigmoid()
    close(torch.cat([got.weights, got.gammas], 1), 8.0 * picked / picked.sum(1, keepdim=True))


@pytest.mark.parametrize("tokens", TOKENS)
def test_both_halves_of_experts(weights, tokens):
    rows = normed(tokens)
    route = route_sink(rows, weights.router, weights.bias, weights.scale, top_k=TOP, route_scale=8.0)
    act = experts_up(rows, route, weights.w13, weights.shared_w13)
    wide = weights.exact()
    want = experts_up.reference(exact(rows), route, wide.w13, wide.shared_w13)
    close(act.routed, want.routed)
    close(act.shared, want.shared)
    act = Activated(act.routed, act.shared, route)
    want = experts_down.reference(Activated(act.routed.float(), act.shared.float(), route), wide.w2, wide.shared_w2)
    close(experts_down(act, weights.w2, weights.shared_w2), want)


@pytest.mark.parametrize("steps", [SINGLE[:1] * 5, SINGLE[1:] * 5, [((1, 6), (2, 1)), ((2, 1), (1, 1)), ((1, 40),)]])
def test_settle_behind_experts(weights, steps, walked):
    wide = weights.exact()
    taps = normal(4, HIDDEN, device=GPU, dtype=torch.float32, scale=0.2).t()
    for view, packing, plane in convolved(HIDDEN, steps, torch.bfloat16, GPU):
        tokens = len(packing.positions)
        rows, residual = normed(tokens), normal(tokens, HIDDEN, device=GPU)
        route = route_sink(rows, weights.router, weights.bias, weights.scale, top_k=TOP, route_scale=8.0)
        act = experts_up(rows, route, weights.w13, weights.shared_w13)
        copy = plane.float()
        want, _ = experts_settle.reference(
            Activated(act.routed.float(), act.shared.float(), route), wide.w2, wide.shared_w2, residual.float(), taps,
            replace(view, planes=(copy[:, :, :0], copy), memo={}), packing, plane=1,
        )  # fmt: skip
        got, _ = experts_settle(act, weights.w2, weights.shared_w2, residual, taps, view, packing, plane=1)
        close(got, want)
        close(plane.nan_to_num(), copy.nan_to_num())


def test_a_graph_of_a_step_gives_what_eager_gives(weights, monkeypatch):
    """Everything between two attentions, captured: kernels that start early read nothing too early."""
    monkeypatch.undo()  # poisoning would put kernels between those that are to overlap
    wo = normal(*SETTLED["wo"], device=GPU, scale=1024**-0.5)
    qkvr = normal(*PRODUCTS["qkvr local"], device=GPU, scale=HIDDEN**-0.5)
    taps = normal(4, HIDDEN, device=GPU, dtype=torch.float32, scale=0.2).t()
    norm = torch.rand(HIDDEN, device=GPU) + 0.5
    for steps in (SINGLE[:1], SINGLE[1:]):
        ((view, packing, _),) = convolved(HIDDEN, steps, torch.bfloat16, GPU)
        tokens = len(packing.positions)
        heads, hidden = normal(tokens, 1024, device=GPU), normal(tokens, HIDDEN, device=GPU)

        def step(heads=heads, hidden=hidden, view=view, packing=packing):
            out = hidden
            for _ in range(6):
                out, _ = settle(heads, wo, out, taps, view, packing, plane=1)
                rows = Normed(out, norm, 1e-6)
                route = route_sink(rows, weights.router, weights.bias, weights.scale, top_k=TOP, route_scale=8.0)
                act = experts_up(rows, route, weights.w13, weights.shared_w13)
                out, _ = experts_settle(act, weights.w2, weights.shared_w2, out, taps, view, packing, plane=1)
                heads = project(Normed(out, norm, 1e-6), qkvr)[:, :1024].contiguous()
            return out

        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            want = step().clone()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                got = step()
            for _ in range(20):
                got.zero_()
                graph.replay()
                stream.synchronize()
                assert torch.equal(got, want)
