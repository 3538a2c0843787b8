"""Gated activations against float64."""

import math

import pytest
import torch

from inkcap.ops.act.ref import swiglu, swiglu_capped
from inkcap.ops.values import Caps

pytestmark = pytest.mark.usefixtures("ops")


@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (2, 5, 6), (0, 4)])
@pytest.mark.parametrize("scaled", [False, True])
def test_swiglu_reads_gate_and_up_side_by_side(shape, scaled):
    x = 3 * torch.randn(shape)
    scale = torch.randn(shape[:-1]) if scaled else None
    got = swiglu(x, scale)
    assert got.shape == (*shape[:-1], shape[-1] // 2)
    for place in range(got.numel()):
        gate, up = x.flatten()[2 * place].item(), x.flatten()[2 * place + 1].item()
        want = gate / (1 + math.exp(-gate)) * up
        if scale is not None:
            want *= scale.flatten()[place // got.shape[-1]].item()
        assert got.flatten()[place].item() == pytest.approx(want, rel=1e-5, abs=1e-7)


def test_bf16_is_rounded_once_with_the_scale_inside():
    x, scale = (3 * torch.randn(50, 64)).bfloat16(), torch.randn(50)
    want = swiglu(x.float(), scale).bfloat16()
    assert torch.equal(swiglu(x, scale), want)
    assert not torch.equal(swiglu(x).float() * scale[:, None], want.float())


def test_capped_gate_is_capped_outside_its_sigmoid():
    x = 10 * torch.randn(4, 12)
    got = swiglu_capped(x, Caps(gate=3.0, up=5.0))
    for place in range(got.numel()):
        gate, up = x.flatten()[2 * place].item(), x.flatten()[2 * place + 1].item()
        want = 3 * math.tanh(gate / 3) / (1 + math.exp(-gate)) * 5 * math.tanh(up / 5)
        assert got.flatten()[place].item() == pytest.approx(want, rel=1e-5, abs=1e-6)
