"""Deterministic mode on a GPU: a token has the same bits whatever else is in its step, op by op and in whole models."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from device import test_engine, test_engine2
from device.test_engine import GPU, requests
from ops import tokenwise
from ops.shapes import coded, convolved, normal
from toy import run

import inkcap.ops  # noqa: F401  declares the implementations
from inkcap.ops.dispatch import OPS, bind
from inkcap.ops.experts.ref import routed_down, routed_settle, routed_up
from inkcap.ops.experts.triton import as_alone
from inkcap.ops.linear.few import in_parts, sum_parts
from inkcap.ops.linear.fixed import FEW, in_tiles
from inkcap.ops.values import Caps, Normed, Routed

pytestmark = pytest.mark.gpu
CUTS = [0, 1, 6, 22, 39, 103, 168, 300]  # of 300 tokens: as many programs' shapes as there are


@pytest.fixture(autouse=True)
def unbound():
    torch.manual_seed(0)
    yield
    bind(torch.device("cpu"))


CODED = [name for name in tokenwise.NAMES if name.startswith(("experts", "routed"))]


@pytest.mark.parametrize(
    ("name", "bits"), [(name, 16) for name in tokenwise.NAMES] + [(name, bits) for name in CODED for bits in (4, 8)]
)
def test_tokens_of_one_op(name, bits):
    bind(GPU, deterministic=True)
    for channels, units, experts in ((6144, 384, 64), (2304, 1152, 32)):
        case = tokenwise.cases(
            GPU, torch.bfloat16, CUTS[-1], channels=channels, units=units, experts=experts, bits=bits, rows=1664
        )[name]
        whole = case(OPS[name], slice(None))
        parts = [case(OPS[name], slice(first, stop)) for first, stop in pairwise(CUTS)]
        for place, tensor in enumerate(whole):
            assert tensor.isfinite().all()
            assert torch.equal(torch.cat([part[place] for part in parts]), tensor)


@pytest.mark.parametrize(
    ("bits", "channels", "units", "top", "fragments"),
    [
        (4, 2304, 1152, 8, True),
        (8, 2304, 1152, 8, True),
        (4, 4608, 576, 8, True),
        (8, 4608, 576, 6, True),
        (4, 128, 64, 3, False),
    ],
)
def test_experts_in_codes(bits, channels, units, top, fragments):
    """Each token alone, by kernels of its own where rows have four pieces, and among as many as there are ways."""
    bind(GPU, deterministic=True)
    experts, tokens = 128, CUTS[-1]
    w13 = coded(bits, experts, 2 * units, channels, GPU, torch.bfloat16)
    w2 = coded(bits, experts, channels, units, GPU, torch.bfloat16)
    x, norm = normal(tokens, channels, device=GPU), torch.rand(channels, device=GPU) + 0.5
    choice = torch.rand(tokens, experts, device=GPU).topk(top, 1).indices
    chances, none = torch.rand(tokens, top, device=GPU), torch.empty(tokens, 0, device=GPU)
    assert as_alone(x[:1], w13, top, paired=True) == fragments

    def made(here):
        rows, route = Normed(x[here], norm, 1e-5), Routed(choice[here], chances[here], none[here])
        act = routed_up(rows, route, w13, Caps(2.0, 3.0))
        return act, routed_down(act, route, w2)

    alone = [torch.cat(each) for each in zip(*(made(slice(t, t + 1)) for t in range(tokens)), strict=True)]
    for count in (2, 8, 16, 64, tokens):
        for got, want in zip(made(slice(count)), alone, strict=True):
            assert torch.equal(got, want[:count])

    taps = normal(4, channels, device=GPU, dtype=torch.float32, scale=0.2).t()
    settled = []
    for steps in ([((1, 6),)], [((1, 1),)] * 6, [((2, 1), (1, 1), (3, 1))] * 6):
        own = []
        for view, packing, _ in convolved(channels, steps, torch.bfloat16, GPU):
            here = packing.positions
            route = Routed(choice[here], chances[here], none[here])
            out, _ = routed_settle(
                alone[0][here], route, w2, x[here].float(), taps, view, packing, plane=1, conv_scale=0.4,
                dtype=torch.float32,
            )  # fmt: skip
            own.append(out[packing.row_of == 1])
        settled.append(torch.cat(own))
    assert torch.equal(settled[0], settled[1])
    assert torch.equal(settled[0], settled[2])


@pytest.mark.parametrize(("rows", "length"), [(1664, 6144), (2304, 1152), (258, 2304)])
def test_products_in_parts_and_in_tiles(rows, length):
    """All tiles, since how large a matrix is decides which of them a model takes."""
    x, w = (torch.randn(n, length, dtype=torch.bfloat16, device=GPU) for n in (CUTS[-1], rows))
    whole = in_tiles(x, w, torch.float32)
    torch.testing.assert_close(whole, x.float() @ w.float().t(), rtol=1e-3, atol=1e-3 * length**0.5)
    for count in (1, 16, 17, 64, 65):
        assert torch.equal(in_tiles(x[:count], w, torch.float32), whole[:count])
        if count <= FEW:
            assert torch.equal(sum_parts(in_parts(x[:count], w), torch.float32), whole[:count])


@pytest.mark.parametrize("module", [test_engine, test_engine2], ids=["plain", "loop"])
def test_whole_models(module):
    """Alone and eager; captured, in company, in other chunks; the second time behind prefix hits."""
    wanted = requests(module.LENGTHS)
    make = partial(module.worker, GPU, torch.bfloat16, deterministic=True)
    alone = run(make(graphs=False, rows=1), wanted, 0)
    for how in ({"graphs": False, "rows": 4, "chunk": 37}, {"rows": 3}, {"rows": 9, "chunk": 64}):
        made = make(**how)
        assert run(made, wanted, 1) == alone
        assert run(made, wanted, 1) == alone
