"""Codes, scales and rounded rows on a GPU, at real sizes: the bits that the references give on a CPU."""

import pytest
import torch
from ops.test_quantize_triton import same

import inkcap.ops  # noqa: F401  declares the implementations
from inkcap.ops.dispatch import OPS, bind
from inkcap.ops.quantize.ref import (
    E4M3_TINY,
    Rounding,
    mxfp8_encode,
    nvfp4_encode,
    nvfp4_encode_four_over_six,
    round_rows,
)
from inkcap.ops.router.ref import route_sigmoid, route_sigmoid_rounded
from inkcap.ops.values import Normed

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
SIZES = [(1, 2304), (1, 6144), (1, 8, 1152), (8, 8, 1152), (3, 4608), (64, 6, 384), (600, 2304)]
SHORT = [(5, 3, 96), (7, 544), (600, 96)]
CASES = [(shape, torch.bfloat16) for shape in SIZES] + [
    (shape, dtype) for shape in SHORT for dtype in (torch.bfloat16, torch.float16, torch.float32)
]


@pytest.fixture(autouse=True)
def bound(monkeypatch):
    """What torch.empty makes is full of ones until written."""
    plain = torch.empty

    def empty(*args, **kwargs):
        out = plain(*args, **kwargs)
        out.view(-1).view(torch.uint8).fill_(0xFF)
        return out

    monkeypatch.setattr(torch, "empty", empty)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    bind(GPU)
    yield
    bind(torch.device("cpu"))


def on_cpu(op, *args):
    """What the references alone give."""
    bind(torch.device("cpu"), dict.fromkeys(OPS, "ref"))
    made = op.reference(*args)
    bind(GPU)
    return made


def agree(x, factor, limit):
    """Everything that can be made of x [..., K] on a CPU, made of it on the GPU."""
    amax, one, own = x.abs().amax(-1), torch.tensor(factor), x.to(GPU)

    def check(op, *args):
        args = [a.to(GPU) if isinstance(a, torch.Tensor) else a for a in args], args
        made, wanted = op(own, *args[0]), on_cpu(op, x, *args[1])
        same([part.cpu() for part in made], wanted)

    check(nvfp4_encode_four_over_six, amax, limit)
    check(nvfp4_encode, one)
    check(nvfp4_encode, one, E4M3_TINY)
    check(mxfp8_encode)
    ways = [
        (Rounding(16, limit=limit), Rounding(16, limit=limit)),
        (Rounding(16, one.to(GPU)), Rounding(16, one)),
        (Rounding(32), Rounding(32)),
    ]
    for there, here in ways:
        same([round_rows(own, there).cpu()], [on_cpu(round_rows, x, here)])
    there, here = ways[0]
    same([round_rows(own, there, (3 * amax).to(GPU)).cpu()], [on_cpu(round_rows, x, here, 3 * amax)])


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_rows(shape, dtype):
    x = torch.randn(shape) * torch.rand(*shape[:-1], 1).sub(0.5).mul(12).exp()
    x[0, ..., 16:48] = 0.0
    x[-1, ..., :32] *= 1e-6
    agree(x.to(dtype), 0.01, 256.0)


@pytest.mark.parametrize("size", [1e-37, 1e-30, 1e30, 1e36, 3e38])
def test_rows_at_the_ends_of_the_range(size):
    x = (torch.rand(400, 544) - 0.5) * 2 * size * torch.rand(400, 1).pow(8)
    agree(x, 1.0, 256.0)
    agree(x.bfloat16(), 1.0, 1000 / 6)


def test_every_bfloat16():
    every = torch.arange(0, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    mixed = every[torch.randperm(len(every))]
    for x in (every, every.flip(0), mixed, -mixed):
        agree(x.view(-1, 96), 1.0, 256.0)


def test_values_that_are_not_finite_stay_visible():
    for value in (float("nan"), float("inf")):
        x = torch.ones(3, 96, dtype=torch.bfloat16)
        x[1, 40] = value
        for how in (Rounding(16), Rounding(32)):
            same([round_rows(x.to(GPU), how).cpu()], [on_cpu(round_rows, x, how)])


def test_a_factor_for_each_matrix_and_parts_of_rows():
    x, factor = torch.randn(6, 70, 1152, dtype=torch.bfloat16), torch.rand(6) / 100
    same([part.cpu() for part in nvfp4_encode(x.to(GPU), factor.to(GPU))], on_cpu(nvfp4_encode, x, factor))
    amax, how = x.abs().amax(-1), Rounding(16)
    parts = [round_rows(part.to(GPU), how, amax.to(GPU)) for part in x.chunk(4, 2)]
    same([torch.cat(parts, 2).cpu()], [on_cpu(round_rows, x, how)])


def test_a_row_is_the_same_in_any_company():
    x = torch.randn(300, 2304, dtype=torch.bfloat16, device=GPU)
    for how in (Rounding(16), Rounding(32)):
        whole = round_rows(x, how)
        for rows in (slice(0, 1), slice(7, 15), slice(100, 300)):
            same([round_rows(x[rows], how).cpu()], [whole[rows].cpu()])


@pytest.mark.parametrize("tokens", [1, 8, 300])
@pytest.mark.parametrize(("experts", "length"), [(128, 2304), (384, 4608), (256, 6144)])
def test_routing_leaves_rounded_rows(tokens, experts, length):
    weight = (torch.randn(experts, length) / length**0.5).bfloat16().to(GPU)
    bias, x = torch.randn(experts, device=GPU) / 8, torch.randn(tokens, length).bfloat16()
    one = torch.tensor(0.01)
    rows = Normed(x.to(GPU), torch.ones(length, device=GPU), 1e-6)
    rows.normed = rows.rows
    want = route_sigmoid(rows, weight, bias, top_k=8, route_scale=8.0)
    for there, here in (
        (Rounding(16), Rounding(16)),
        (Rounding(16, one.to(GPU)), Rounding(16, one)),
        (Rounding(32), Rounding(32)),
    ):
        plain = on_cpu(round_rows, x, here)
        for _ in range(20):
            route, own = route_sigmoid_rounded(rows, weight, bias, there, top_k=8, route_scale=8.0)
            assert torch.equal(route.choice, want.choice)
            torch.testing.assert_close(route.weights, want.weights, rtol=1e-5, atol=0)
            same([own.cpu()], [plain])
