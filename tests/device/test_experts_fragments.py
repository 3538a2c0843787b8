"""One token's routed experts in fragments, in bf16 at the sizes of published models, against the references in fp32."""

from dataclasses import replace

import pytest
import torch
from device.test_products import SINGLE, close
from ops.shapes import coded, convolved, normal

import inkcap.ops  # noqa: F401  declares the implementations
from inkcap.ops.dispatch import bind
from inkcap.ops.experts import fragments
from inkcap.ops.experts.ref import routed_down, routed_settle, routed_up
from inkcap.ops.values import Caps, Normed, Routed

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
EXPERTS = 16


@pytest.fixture(autouse=True)
def bound():
    torch.manual_seed(0)
    bind(GPU)
    yield
    bind(torch.device("cpu"))


def route_of(top):
    choice = torch.rand(1, EXPERTS, device=GPU).topk(top, 1).indices
    return Routed(choice, torch.rand(1, top, device=GPU), torch.empty(1, 0, device=GPU))


CAPS = Caps(gate=2.0, up=3.0)


@pytest.mark.parametrize(
    ("bits", "channels", "units", "top", "caps"),
    [
        (4, 2304, 1152, 8, CAPS),
        (4, 4608, 576, 8, None),
        (4, 6144, 384, 6, CAPS),
        (4, 128, 64, 1, None),
        (8, 2304, 1152, 8, CAPS),
        (8, 4608, 576, 8, CAPS),
        (8, 128, 64, 3, None),
    ],
)
def test_both_halves(bits, channels, units, top, caps):
    w13 = coded(bits, EXPERTS, 2 * units, channels, GPU, torch.bfloat16)
    w2 = coded(bits, EXPERTS, channels, units, GPU, torch.bfloat16)
    rows = Normed(normal(1, channels, device=GPU), torch.rand(channels, device=GPU) + 0.5, 1e-6)
    rows.tensor()
    assert fragments.suits(rows.tensor(), w13, top)
    route = route_of(top)
    exact = rows.replaced(rows.tensor().float())
    act = routed_up(rows, route, w13, caps)
    close(act, routed_up.reference(exact, route, replace(w13, dtype=torch.float32), caps))
    want = routed_down.reference(act.float(), route, replace(w2, dtype=torch.float32))
    close(routed_down(act, route, w2), want)


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_settle(bits, begins):
    channels, units = 2304, 1152
    w2 = coded(bits, EXPERTS, channels, units, GPU, torch.bfloat16)
    taps = normal(4, channels, device=GPU, dtype=torch.float32, scale=0.2).t()
    for view, packing, plane in convolved(channels, SINGLE[:1] * 6, torch.bfloat16, GPU):
        act, route = normal(1, 8, units, device=GPU), route_of(8)
        residual = None if begins else normal(1, channels, device=GPU, dtype=torch.float32)
        copy = plane.float()
        want, _ = routed_settle.reference(
            act.float(), route, replace(w2, dtype=torch.float32), residual, taps,
            replace(view, planes=(copy[:, :, :0], copy), memo={}), packing, plane=1, conv_scale=0.4,
        )  # fmt: skip
        got, _ = routed_settle(
            act, route, w2, residual, taps, view, packing, plane=1, conv_scale=0.4, dtype=torch.float32
        )
        close(got, want)
        close(plane.nan_to_num(), copy.nan_to_num())
