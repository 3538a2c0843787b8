"""Conditioning of heads, however the tokens are cut into steps, against float64 over each whole sequence."""

import math

import pytest
import torch
from steps import World

from inkcap.cache.state import LayerState, Plane
from inkcap.ops.attn_prep.ref import attn_prep, attn_prep_clip
from inkcap.ops.values import ClipWeights, HeadWeights, LogScaling

pytestmark = pytest.mark.usefixtures("ops")

HEADS, KV, SIZE, STATES = 4, 2, 6, 3
SCALING = LogScaling(floor=5, alpha=0.4)
STEPS = [(0, 7), (7, 8), (8, 9), (9, 20), (20, 21)]


def world(group="full", window=None):
    kv = (Plane("k", (KV, SIZE), "float32"), Plane("v", (KV, SIZE), "float32"))
    conv = tuple(Plane(name, (width,), "float32") for name, width in (("k", KV * SIZE), ("v", KV * SIZE), ("a", 5)))
    return World(
        [LayerState(group, 0, kv, window, 8, True), LayerState("sconv", 0, conv, 4, 4, False)], length=64, seed=5
    )


def convolve(x, taps):
    padded = torch.cat([torch.zeros(3, x.shape[1]).double(), x.double()])
    return x.double() + sum(padded[i : i + len(x)] * taps[:, i].double() for i in range(4))


def rms(x, weight=1.0):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def clipped(x, limit):
    return x * (limit / (x.norm(dim=-1, keepdim=True) + 1e-6)).clamp(max=1.0)


def tau(n):
    return torch.tensor([1 + 0.4 * math.log(max(1.0, (p + 1) / 5)) for p in range(n)]).double()[:, None, None]


@pytest.mark.parametrize("scaling", [None, SCALING])
def test_rms_heads(scaling):
    place = world()
    joined = torch.randn(21, (HEADS + 2 * KV) * SIZE)  # q, k and v are views of one product
    weights = HeadWeights(
        torch.randn(KV * SIZE, 4), torch.randn(KV * SIZE, 4), torch.randn(SIZE), torch.randn(SIZE), 1e-6
    )
    q, k, v = joined.split([HEADS * SIZE, KV * SIZE, KV * SIZE], 1)
    want_q = rms(q.double().unflatten(1, (-1, SIZE)), weights.q_norm.double()) * (tau(21) if scaling else 1.0)
    want_k = rms(convolve(k, weights.k_taps).unflatten(1, (-1, SIZE)), weights.k_norm.double())
    want_v = convolve(v, weights.v_taps).unflatten(1, (-1, SIZE))
    for start, stop in STEPS:
        batch = place.batch([(3, start, [0] * (stop - start))]).at(0)
        conv, kv, cut = batch.view("sconv"), batch.view("full"), slice(start, stop)
        got = attn_prep(q[cut], k[cut], v[cut], weights, conv, kv, batch.packing, scaling)
        for g, w in zip(got, (want_q, want_k, want_v), strict=True):
            torch.testing.assert_close(g.double(), w[cut], rtol=1e-5, atol=1e-5)
        for plane, value in zip(kv.planes, got[1:], strict=True):
            assert torch.equal(plane[kv.slots // 8, kv.slots % 8], value)
    assert place.planes[0]["sconv"][2].isnan().all()  # that of another stream


@pytest.mark.parametrize("scaling", [None, SCALING])
def test_clipped_heads(scaling):
    place = world()
    joined = 2 * torch.randn(21, (HEADS + 2 * KV) * SIZE + HEADS * STATES)
    weights = ClipWeights(
        torch.randn(KV * SIZE, 4), torch.randn(KV * SIZE, 4), 0.6, torch.rand(HEADS, SIZE), torch.rand(HEADS, STATES),
        2.0, 1.5, 1e-6,
    )  # fmt: skip
    added = [torch.randn(21, KV, 4) for _ in range(2)]
    q, k, v, r = joined.split([HEADS * SIZE, KV * SIZE, KV * SIZE, HEADS * STATES], 1)
    factor = tau(21) if scaling else 1.0

    def dynamic(x, taps, more):
        padded = torch.cat([torch.zeros(3, KV * SIZE).double(), x.double()])
        wide = more.double().repeat_interleave(SIZE, 1)
        moved = sum(padded[i : i + 21] * (taps[:, i].double() + wide[:, :, i]) for i in range(4))
        return ((x.double() + moved) * 0.6).unflatten(1, (-1, SIZE))

    want = (
        clipped(q.double().unflatten(1, (-1, SIZE)) * weights.q_scale.double(), 2.0) * factor,
        clipped(dynamic(k, weights.k_taps, added[0]), 2.0),
        rms(dynamic(v, weights.v_taps, added[1])),
        clipped(r.double().unflatten(1, (-1, STATES)) * weights.r_scale.double(), 1.5) * factor,
    )
    for start, stop in STEPS:
        batch = place.batch([(1, start, [0] * (stop - start))]).at(0)
        kv, cut = batch.view("full"), slice(start, stop)
        got = attn_prep_clip(
            q[cut], k[cut], v[cut], r[cut], weights, batch.view("sconv"), kv, batch.packing, scaling,
            added[0][cut].flip(2), added[1][cut].flip(2),
        )  # fmt: skip
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g.double(), w[cut], rtol=1e-5, atol=1e-5)
        for plane, value in zip(kv.planes, got[1:3], strict=True):
            assert torch.equal(plane[kv.slots // 8, kv.slots % 8], value)
