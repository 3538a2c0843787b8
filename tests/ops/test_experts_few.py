"""Products of experts for a few tokens, interpreted: weights of every kind, with and without lists of tiles."""

import pytest
import torch
from ops import test_experts
from ops.shapes import coded

from inkcap.ops.experts.few import Cut, grouped_few
from inkcap.ops.experts.group import tiles
from inkcap.ops.experts.many import Also
from inkcap.ops.experts.ref import experts_down, experts_up
from inkcap.ops.experts.strips import in_strips
from inkcap.ops.values import Normed

EXPERTS, TOP, SHARED = 5, 3, 2
CUT = Cut(64, 2, 8, 16, 2, 1)  # large tiles: an interpreted program costs the same whatever its size
KINDS = [
    (4, 176, 80, torch.float32),
    (4, 128, 64, torch.float16),
    (8, 352, 64, torch.float32),
    (16, 176, 80, torch.float32),
]
WAYS = ["strips", "unlisted", 8, 16]
CASES = [  # any two of kind, way and number of tokens together
    (*kind, way, (3, 12)[(i + j) % 2]) for i, kind in enumerate(KINDS) for j, way in enumerate(WAYS)
]
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.float16: {"rtol": 1e-2, "atol": 1e-2}}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    torch.set_num_threads(1)


def weights(bits, rows, columns, dtype):
    if bits < 16:
        return coded(bits, EXPERTS, rows, columns, dtype=dtype)
    return (torch.randn(EXPERTS, rows, columns) / columns**0.5).to(dtype)


@pytest.mark.parametrize(("bits", "channels", "units", "dtype", "way", "tokens"), CASES)
def test_both_halves(bits, channels, units, dtype, way, tokens):
    rows = Normed(torch.randn(tokens, channels).to(dtype), torch.rand(channels), 1e-6)
    route = test_experts.routed(tokens, EXPERTS, TOP, SHARED)
    uses = route if isinstance(way, str) else tiles(route, EXPERTS, way)
    w13, w2 = weights(bits, 2 * units, channels, dtype), weights(bits, channels, units, dtype)
    shared_w13 = (torch.randn(SHARED, 2 * units, channels) / channels**0.5).to(dtype)
    shared_w2 = (torch.randn(channels, SHARED, units) / units**0.5).to(dtype)
    want = experts_up.reference(rows, route, w13, shared_w13)
    poison = float("nan")
    act, shared_act = torch.full((tokens, TOP, units), poison).to(dtype), torch.full_like(want.shared, poison)
    x = rows.tensor()
    also = Also(x, SHARED, shared_w13, route.gammas, shared_act, tokens)
    grouped_few(x, w13, uses, TOP, act, paired=True, also=also, cut=CUT)
    torch.testing.assert_close(act, want.routed, **CLOSE[dtype])
    torch.testing.assert_close(shared_act, want.shared, **CLOSE[dtype])
    products = torch.full((tokens * TOP, channels), poison).to(dtype)
    shared = torch.full((tokens * SHARED, channels), poison).to(dtype)
    also = Also(want.shared, 1, shared_w2.transpose(0, 1), route.gammas, shared, tokens)
    if way == "strips" and bits == 16:
        in_strips(want.routed, w2, route, products, also)
    else:
        grouped_few(want.routed, w2, uses, 1, products, paired=False, also=also, cut=CUT)
    got = (products.view(tokens, TOP, channels).float() * route.weights[..., None]).sum(1)
    got += shared.view(tokens, SHARED, channels).float().sum(1)
    torch.testing.assert_close(got, experts_down.reference(want, w2, shared_w2).float(), **CLOSE[dtype])
