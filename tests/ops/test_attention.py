"""Paged attention, however the tokens are cut into steps, against float64 written out per query and head."""

import math

import pytest
import torch
from steps import World

from inkcap.cache.state import LayerState, Plane
from inkcap.ops import paged
from inkcap.ops.attention import cpu
from inkcap.ops.attention.ref import attention
from inkcap.ops.values import LogScaling, Scores

pytestmark = pytest.mark.usefixtures("ops")

# tokens of each of three sequences in each step
STEPS = [(5, 1, 0), (1, 1, 3), (1, 2, 1), (17, 1, 1), (1, 1, 1), (1, 0, 1), (9, 4, 2), (1, 1, 1)]
GEOMETRIES = {  # heads, kv heads, size, states, window, extent, scaling
    "full": (4, 2, 8, 3, None, 11, LogScaling(7, 0.3)),
    "full_one_kv_head": (6, 1, 5, 2, None, 40, None),
    "window": (4, 4, 8, 3, 6, 6, None),
    "window_of_one": (2, 1, 4, 2, 1, 1, None),
    "window_past_the_extent": (3, 3, 16, 5, 20, 4, LogScaling(1, 0.2)),
}


def expected(q, k, v, r, scores, sinks, gate):
    """One whole sequence: q [n, heads, D] to [n, heads * D]."""
    out = torch.zeros(q.shape).double()
    group = q.shape[1] // k.shape[1]
    for p in range(len(q)):
        tau = 1.0
        if scores.scaling is not None:
            tau = 1 + scores.scaling.alpha * math.log(max(1.0, (p + 1) / scores.scaling.floor))
        for h in range(q.shape[1]):
            z, values = [], []
            for s in range(p + 1):
                if scores.window is not None and p - s >= scores.window:
                    continue
                logit = (q[p, h].double() @ k[s, h // group].double()).item() * scores.scale
                if p - s < scores.bias.shape[1]:
                    logit += tau * (r[p, h].double() @ scores.bias[:, p - s].double()).item()
                z.append(logit)
                values.append(v[s, h // group].double())
            if sinks is not None:
                z.append(sinks[p, h].item())
                values.append(torch.zeros(q.shape[2]).double())
            out[p, h] = torch.tensor(z).double().softmax(0) @ torch.stack(values)
    out = out.flatten(1)
    return out if gate is None else out * gate.double().sigmoid()


def run(geometry, dtype="float32", seam=False):
    """Outputs and expectations of three sequences run in STEPS."""
    heads, kv, size, states, window, extent, scaling = GEOMETRIES[geometry]
    torch.manual_seed(len(geometry))
    kind = getattr(torch, dtype)
    scores = Scores(1 / size, window, torch.randn(states, extent).to(kind), scaling)
    planes = (Plane("k", (kv, size), dtype), Plane("v", (kv, size), dtype))
    place = World([LayerState("kv", 0, planes, window, 8, True)], length=64, seed=9)
    counts = [sum(step[i] for step in STEPS) for i in range(3)]
    q, k, v, r = (
        [(2 * torch.randn(n, count, width)).to(kind) for n in counts]
        for count, width in ((heads, size), (kv, size), (kv, size), (heads, states))
    )
    sinks = [torch.randn(n, heads) if seam else None for n in counts]
    gates = [torch.randn(n, heads * size).to(kind) if seam else None for n in counts]
    got, cursor = [[], [], []], [0, 0, 0]
    for step in STEPS:
        who = [i for i in (1, 2, 0) if step[i]]
        batch = place.batch([(3 - i, cursor[i], [0] * step[i]) for i in who]).at(0)
        view = batch.view("kv")

        def joined(parts, who=who, step=step):
            if parts[0] is None:
                return None
            return torch.cat([parts[i][cursor[i] : cursor[i] + step[i]] for i in who])

        paged.store(view, 0, joined(k))
        paged.store(view, 1, joined(v))
        out = attention(
            joined(q), joined(k), joined(v), joined(r), scores, view, batch.packing, joined(sinks), joined(gates)
        )
        for i, part in zip(who, out.split([step[i] for i in who]), strict=True):
            got[i].append(part)
            cursor[i] += step[i]
    want = [expected(*each) for each in zip(q, k, v, r, [scores] * 3, sinks, gates, strict=True)]
    return [torch.cat(parts) for parts in got], want


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("seam", [False, True], ids=["plain", "sinks_and_gate"])
def test_attention(geometry, seam):
    for got, want in zip(*run(geometry, seam=seam), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)


def test_bf16_stays_near_fp32():
    for got, want in zip(*run("full", "bfloat16"), strict=True):
        assert got.dtype == torch.bfloat16
        error = (got.double() - want).abs()
        assert error.max() < 0.15
        assert error.mean() < 0.01


def test_tiles_of_queries(monkeypatch):
    """A chunk longer than a tile: the edges of tiles fall at every place of the window."""
    monkeypatch.setattr(cpu, "TILE", 3)
    for geometry in ("full", "window"):
        for got, want in zip(*run(geometry), strict=True):
            torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)
