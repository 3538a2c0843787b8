"""The short convolution, however the tokens are cut into steps, against float64 over each whole sequence."""

import pytest
import torch
from steps import World

from inkcap.cache.state import LayerState, Plane
from inkcap.ops.sconv.ref import sconv

pytestmark = pytest.mark.usefixtures("ops")

# tokens of each of three sequences in each step: prompts in pieces, single tokens, nothing
STEPS = [(1, 5, 0), (1, 1, 2), (7, 1, 1), (1, 1, 1), (1, 1, 1), (0, 9, 3), (2, 0, 1), (1, 1, 1)]


def world(width, channels, dtype):
    planes = (Plane("other", (4,), dtype), Plane("x", (channels,), dtype))
    return World([LayerState("sconv", 0, planes, width, 4, False)], length=64, seed=3)


def expected(x, taps, scale):
    """x [n, C], taps [n, C, W] to [n, C], in float64."""
    out = x.double().clone()
    width = taps.shape[2]
    for t in range(len(x)):
        for i in range(width):
            if t - width + 1 + i >= 0:
                out[t] += x[t - width + 1 + i].double() * taps[t, :, i].double()
    return out * scale


def run(width, channels, dtype, make_taps, scale=1.0, residual=False):
    """Outputs and expectations of all sequences; make_taps(n) gives per-token taps [n, C, W] and sconv's arguments."""
    place, counts = world(width, channels, dtype), [sum(step[i] for step in STEPS) for i in range(3)]
    inputs = [torch.randn(n, channels).to(getattr(torch, dtype)) for n in counts]
    base = [torch.randn(n, channels).to(getattr(torch, dtype)) for n in counts]
    taps = [make_taps(n) for n in counts]
    got, cursor = [[], [], []], [0, 0, 0]
    for step in STEPS:
        who = [i for i in (2, 0, 1) if step[i]]
        batch = place.batch([(i + 1, cursor[i], [0] * step[i]) for i in who]).at(0)
        cut = {i: slice(cursor[i], cursor[i] + step[i]) for i in who}
        arguments = taps[0][1](who, cut, taps)
        if residual:
            arguments["residual"] = torch.cat([base[i][cut[i]] for i in who])
        x = torch.cat([inputs[i][cut[i]] for i in who])
        kept = x.clone()
        out = sconv(x, arguments.pop("taps"), batch.view("sconv"), batch.packing, plane=1, scale=scale, **arguments)
        assert torch.equal(x, kept)
        assert out.dtype == x.dtype
        for i, part in zip(who, out.split([step[i] for i in who]), strict=True):
            got[i].append(part)
            cursor[i] += step[i]
    wants = [expected(x, tap, scale) for x, (tap, _) in zip(inputs, taps, strict=True)]
    if residual:
        wants = [want.to(getattr(torch, dtype)).double() + b.double() for want, b in zip(wants, base, strict=True)]
    return [torch.cat(parts).double() for parts in got], wants


def static(width, channels):
    columns = torch.randn(channels, width)
    return lambda n: (columns.expand(n, -1, -1), lambda who, cut, taps: {"taps": columns})


@pytest.mark.parametrize(("width", "channels"), [(4, 6), (4, 1), (2, 5), (3, 33)])
@pytest.mark.parametrize("residual", [False, True])
def test_static_taps(width, channels, residual):
    got, want = run(width, channels, "float32", static(width, channels), scale=0.7, residual=residual)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)


def test_bf16_is_rounded_once():
    got, want = run(4, 40, "bfloat16", static(4, 40))
    for g, w in zip(got, want, strict=True):
        assert (g == w.float().bfloat16().double()).float().mean() > 0.999  # but for ties at the last fp32 bit


def test_taps_per_token_and_head():
    def make(n):
        own = torch.randn(n, 3, 4)
        return own.repeat_interleave(2, 1), lambda who, cut, taps: {
            "taps": torch.cat([taps[i][0][cut[i]][:, ::2] for i in who])
        }

    for g, w in zip(*run(4, 6, "float32", make), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)


def test_taps_added_per_token_and_head():
    columns = torch.randn(6, 4)

    def make(n):
        added = torch.randn(n, 2, 4)
        return columns + added.repeat_interleave(3, 1), lambda who, cut, taps: {
            "taps": columns,
            "added": torch.cat([(taps[i][0][cut[i]] - columns)[:, ::3] for i in who]).flip(2),
        }

    for g, w in zip(*run(4, 6, "float32", make, scale=0.5), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)


def test_tokens_without_a_slot_are_not_stored_and_others_planes_stay():
    place = world(4, 6, "float32")
    batch = place.batch([(2, 0, [0] * 14)]).at(0)
    view = batch.view("sconv")
    assert (view.slots < 0).sum() == 8  # blocks 0 and 1 of the chunk are not needed to go on
    before = place.arenas["sconv"].clone()
    x = torch.randn(14, 6)
    sconv(x, torch.randn(6, 4), view, batch.packing, plane=1)
    kept = view.slots[8:]
    assert torch.equal(view.planes[1][kept // 4, kept % 4], x[8:])
    view.planes[1][kept // 4, kept % 4] = float("nan")
    assert torch.equal(place.arenas["sconv"].isnan(), before.isnan())
