"""Kernels of experts whose weights are codes, under the interpreter, against the references on decoded weights."""

import pytest
import torch
from ops import test_experts
from ops.shapes import coded, convolved

from inkcap.ops.experts import triton as kernels
from inkcap.ops.experts.ref import experts_down, experts_settle, experts_up, routed_down, routed_settle, routed_up
from inkcap.ops.experts.triton import (
    experts_down_triton,
    experts_settle_triton,
    experts_up_triton,
    routed_down_triton,
    routed_settle_triton,
    routed_up_triton,
)
from inkcap.ops.values import Activated, Caps, Normed

CPU = torch.device("cpu")
EXPERTS, TOP = 5, 3
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
# columns that chunks divide, and some that they do not
SIZES = [(4, 96, 48), (8, 128, 32), (4, 176, 80), (8, 352, 64)]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Large tiles: an interpreted program costs the same whatever its size."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    monkeypatch.setattr(kernels, "UP_CODED", (64, 32, 1))
    monkeypatch.setattr(kernels, "UP_SHORT", (64, 32, 1))
    monkeypatch.setattr(kernels, "DOWN_CODED", (64, 1))
    monkeypatch.setattr(kernels, "DOWN_JOINED", (64, 1))


def check_halves(bits, channels, units, tokens, dtype):
    rows, route = (
        Normed(torch.randn(tokens, channels).to(dtype), torch.rand(channels), 1e-6),
        test_experts.routed(tokens, EXPERTS, TOP, 2),
    )
    w13 = coded(bits, EXPERTS, 2 * units, channels, dtype=dtype)
    w2 = coded(bits, EXPERTS, channels, units, dtype=dtype)
    shared_w13 = (torch.randn(2, 2 * units, channels) / channels**0.5).to(dtype)
    shared_w2 = (torch.randn(channels, 2, units) / units**0.5).to(dtype)
    got = experts_up_triton(rows, route, w13, shared_w13)
    want = experts_up.reference(rows, route, w13, shared_w13)
    close = CLOSE if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(got.routed, want.routed, **close)
    torch.testing.assert_close(got.shared, want.shared, **close)
    got, want = experts_down_triton(want, w2, shared_w2), experts_down.reference(want, w2, shared_w2)
    torch.testing.assert_close(got, want, **close)


@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize(("bits", "channels", "units"), SIZES)
def test_both_halves(bits, channels, units, tokens):
    check_halves(bits, channels, units, tokens, torch.float32)


@pytest.mark.parametrize("tokens", [1, 9, 17])
def test_both_halves_in_half_precision(tokens):
    check_halves(4, 64, 32, tokens, torch.float16)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("bits", [4, 8])
def test_routed_experts_alone(bits, tokens):
    rows, route = Normed(torch.randn(tokens, 64), torch.rand(64), 1e-6), test_experts.routed(tokens, EXPERTS, TOP, 0)
    w13, w2 = coded(bits, EXPERTS, 64, 64), coded(bits, EXPERTS, 64, 32)
    caps = Caps(gate=2.0, up=3.0)
    act = routed_up.reference(rows, route, w13, caps)
    torch.testing.assert_close(routed_up_triton(rows, route, w13, caps), act, **CLOSE)
    torch.testing.assert_close(routed_down_triton(act, route, w2), routed_down.reference(act, route, w2), **CLOSE)


@pytest.mark.parametrize("bits", [4, 8])
def test_wide_tiles_have_tokens_as_the_first_operand(monkeypatch, bits):
    monkeypatch.setattr(kernels, "width_of", lambda uses, experts: 128)
    check_halves(bits, 64, 32, 17, torch.float32)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("shared", [0, 2])
def test_settle_of_single_tokens_convolves_inside(tokens, shared):
    channels, units, steps = 20, 32, [tuple((row, 1) for row in range(tokens))] * 5
    w2, shared_w2 = coded(4 if shared else 8, EXPERTS, channels, units), torch.randn(channels, shared, units)
    taps = torch.randn(4, channels).t()
    for view, packing, plane in convolved(channels, steps, torch.float32, CPU):
        route = test_experts.routed(tokens, EXPERTS, TOP, shared)
        act = Activated(torch.randn(tokens, TOP, units), torch.randn(tokens, shared, units), route)
        where = (torch.randn(tokens, channels), taps, view, packing)
        kept = plane.clone()
        if shared:
            want, _ = experts_settle.reference(act, w2, shared_w2, *where, plane=1)
        else:
            want, _ = routed_settle.reference(act.routed, route, w2, *where, plane=1, conv_scale=0.5)
        after = plane.clone()
        plane.copy_(kept)
        if shared:
            got, _ = experts_settle_triton(act, w2, shared_w2, *where, plane=1)
        else:
            got, _ = routed_settle_triton(act.routed, route, w2, *where, plane=1, conv_scale=0.5)
        torch.testing.assert_close(got, want, **CLOSE)
        torch.testing.assert_close(plane, after, equal_nan=True, **CLOSE)


@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_and_scale_is_exact(bits):
    """One expert whose rows hold every code under every scale there is, times rows of ones and zeros: no rounding."""
    block = 16 if bits == 4 else 32
    scales = torch.arange(127 if bits == 4 else 255, dtype=torch.uint8)  # those that are numbers
    if bits == 8:
        scales = scales[100:140]  # whose products with codes are fp32 numbers times a power of two
    w = coded(bits, 1, 256, block)
    codes = torch.arange(256, dtype=torch.uint8)
    if bits == 8:
        codes[[127, 255]] = 0  # NaN
    w.codes.view(torch.uint8)[0] = codes[:, None]
    for scale in scales[::13].tolist():
        w.scales.view(torch.uint8)[0] = scale
        if w.factor is not None:
            w.factor.fill_(1.0)
        for tokens in (1, 2, 17):
            route = test_experts.routed(tokens, 1, 1, 0)
            route.weights.fill_(1.0)
            act = torch.zeros(tokens, 1, block)
            act[..., 3] = 1.0
            got = routed_down_triton(act, route, w)
            assert torch.equal(got, w[0][:, 3].expand(tokens, 256))
