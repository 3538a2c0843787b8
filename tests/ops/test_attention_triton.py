"""Attention by the kernels, however tokens are cut into steps, against the reference; under the interpreter."""

import pytest
import torch
from steps import World

from inkcap.cache.state import LayerState, Plane
from inkcap.ops import paged
from inkcap.ops.attention import splits
from inkcap.ops.attention.ref import attention
from inkcap.ops.attention.triton import attention_triton
from inkcap.ops.values import GroupView, LogScaling, Packing, Scores

GEOMETRIES = {  # heads, kv heads, size, states, window, extent, scaling, block
    "full": (4, 2, 16, 16, None, 11, LogScaling(7, 0.3), 8),
    "full_one_kv_head": (6, 1, 5, 2, None, 40, None, 16),
    "full_pages_of_tiles": (4, 2, 16, 16, None, 11, None, 16),
    "full_pages_of_words": (4, 2, 32, 16, None, 11, None, 16),
    "full_three_heads": (6, 2, 16, 5, None, 11, None, 8),
    "window": (4, 2, 8, 3, 20, 20, None, 32),
    "window_of_one": (2, 1, 4, 2, 1, 1, None, 8),
    "window_past_the_extent": (3, 3, 16, 5, 20, 4, LogScaling(1, 0.2), 16),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of 16 keys and rows, so that short sequences have several; few programs, which are slow here."""
    torch.set_num_threads(1)
    monkeypatch.setattr(splits, "KEYS", 16)
    monkeypatch.setattr(splits, "ROWS", 16)
    monkeypatch.setattr(splits, "FEW", 3)
    monkeypatch.setattr(splits, "PROGRAMS", 24)


def compare(geometry, steps, dtype=torch.float32, seam=False, tolerance=2e-5, coded=False):
    """Run steps of (tokens of each of three sequences); planes hold NaN wherever nothing is stored."""
    heads, kv, size, states, window, extent, scaling, block = GEOMETRIES[geometry]
    torch.manual_seed(len(geometry))
    name = "float8_e4m3fn" if coded else str(dtype).removeprefix("torch.")
    v_scale = 2.0 ** torch.arange(-kv, 0) if coded else None
    scores = Scores(1 / size, window, torch.randn(states, extent).to(dtype), scaling)
    planes = (Plane("k", (kv, size), name), Plane("v", (kv, size), name))
    place = World([LayerState("kv", 0, planes, window, block, True)], length=96, seed=9)
    cursor = [0, 0, 0]
    for step in steps:
        who = [i for i in (1, 2, 0) if step[i]]
        batch = place.batch([(3 - i, cursor[i], [0] * step[i]) for i in who]).at(0)
        view, n = batch.view("kv"), len(batch.ids)
        q, k, v = ((2 * torch.randn(n, each, size)).to(dtype) for each in (heads, kv, kv))
        r = torch.randn(n, heads * states + 3).to(dtype)[:, 3:].unflatten(1, (heads, states))
        sinks = torch.randn(n, heads + 3)[:, 1:-2] if seam else None  # columns of a product
        gate = torch.randn(n, heads * size + 1).to(dtype)[:, 1:] if seam else None
        if coded:
            k, v = ((4 * x).to(torch.float8_e4m3fn).to(dtype) for x in (k, v))
        got = attention_triton(q, k, v, r, scores, view, batch.packing, sinks, gate, v_scale)
        want = attention.reference(q, k, v, r, scores, view, batch.packing, sinks, gate, v_scale)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        paged.store(view, 0, k)
        paged.store(view, 1, v)
        cursor = [a + b for a, b in zip(cursor, step, strict=True)]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_steps(geometry):
    """Chunks, drafts, single tokens and mixtures of them; some with sinks and a gate."""
    compare(geometry, [(33, 1, 0), (1, 2, 3), (1, 1, 1)], seam=geometry in ("full", "window_past_the_extent"))


@pytest.mark.parametrize(
    "geometry",
    ["full", "full_three_heads", "full_pages_of_tiles", "window", "full_one_kv_head", "window_past_the_extent"],
)
def test_chunks_beside_single_tokens(geometry, monkeypatch):
    """Long chunks take the kernel that walks all keys, the others are split over keys."""
    monkeypatch.setattr(splits, "whole", lambda *args: False)
    compare(geometry, [(37, 0, 0), (58, 3, 1)], seam=geometry == "full")


@pytest.mark.parametrize("geometry", ["full", "window"])
def test_splits_with_several_tiles(geometry, monkeypatch):
    """Few programs, so that each has several tiles."""
    monkeypatch.setattr(splits, "PROGRAMS", 8)
    compare(geometry, [(49, 20, 0), (30, 1, 1), (1, 1, 0)])


@pytest.mark.parametrize("geometry", ["full", "full_pages_of_words", "full_one_kv_head", "window"])
def test_codes(geometry):
    """Pages of codes: alone, in words of two, of an odd size, behind edges."""
    compare(geometry, [(33, 1, 0), (1, 1, 1)], seam=geometry == "full", coded=True)


@pytest.mark.parametrize("geometry", ["full", "window"])
def test_codes_beside_many_queries(geometry, monkeypatch):
    monkeypatch.setattr(splits, "whole", lambda *args: False)
    compare(geometry, [(20, 0, 0), (5, 3, 0)], coded=True)


def test_half_precision():
    compare("full", [(20, 1, 0), (1, 1, 3)], torch.float16, tolerance=4e-3)


@pytest.mark.parametrize("geometry", ["full", "window"])
def test_bounds_instead_of_lengths(geometry):
    """As in a captured graph: spans hold bounds, padding rows are at position 0, and unused blocks hold NaN."""
    heads, kv, size, states, window, extent, scaling, block = GEOMETRIES[geometry]
    torch.manual_seed(1)
    scores = Scores(1 / size, window, torch.randn(states, extent), scaling)
    planes = (Plane("k", (kv, size), "float32"), Plane("v", (kv, size), "float32"))
    place = World([LayerState("kv", 0, planes, window, block, True)], length=96, seed=2)
    lengths = {1: 37, 2: 1, 3: 16}  # row -> tokens before this step
    for row, length in lengths.items():
        view = place.batch([(row, 0, [0] * length)]).at(0).view("kv")
        for plane in (0, 1):
            paged.store(view, plane, torch.randn(length, kv, size))
    batch = place.batch([(row, length, [0]) for row, length in lengths.items()]).at(0)
    view, p = batch.view("kv"), batch.packing
    q, k, v, r = (torch.randn(5, n, width) for n, width in ((heads, size), (kv, size), (kv, size), (heads, states)))
    want = attention.reference(*(x[:3] for x in (q, k, v, r)), scores, view, p)
    none = torch.zeros(2, dtype=torch.int32)
    packing = Packing(
        starts=torch.arange(6, dtype=torch.int32),
        rows=torch.cat([p.rows, none]),
        first=torch.cat([p.first, none]),
        row_of=torch.cat([p.row_of, none]),
        positions=torch.cat([p.positions, none.long()]),
        spans=tuple((i, i + 1, 0, 95) for i in range(5)),
    )
    slots = torch.cat([view.slots, torch.tensor([-1, -1])])
    got = attention_triton(q, k, v, r, scores, GroupView(block, view.table, slots, view.planes), packing)
    torch.testing.assert_close(got[:3], want, rtol=2e-5, atol=2e-5)
    assert got.isfinite().all()


@pytest.mark.parametrize("coded", [False, True])
def test_splits_cover_their_tiles(monkeypatch, coded):
    """No plan has programs that could never have work; over codes all of them fit at once, if two a sequence do."""
    monkeypatch.setattr(splits, "PROGRAMS", 264)
    for reach in (1, 2, 64, 65, 512, 1024, 1025, 4096, 131072, 1 << 20):
        for sequences in (1, 2, 8, 64, 512):
            for widest in (1, 4):
                plan = splits.plan(sequences * widest, sequences, widest, reach, 8, 1, 1024, None, coded)
                assert not (coded and plan.far) or plan.total <= max(splits.CODED // plan.tiles, 2)
                assert plan.near >= 1
                assert plan.far <= max(0, -(-(reach - 1024) // splits.KEYS))
                assert plan.queries >= 1
                assert plan.rows >= 8 * plan.queries
                assert (plan.far > 0) <= (reach > 1024)
