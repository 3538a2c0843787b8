"""Attention and what comes before it in bf16 at real sizes and lengths, against float64 over the whole sequence.

Caches are wider than 2^31 elements, blocks are handed out at random, and everything no sequence owns is NaN.
"""

import random

import pytest
import torch

from inkcap.ops.attention import row as single
from inkcap.ops.attention.ref import attention
from inkcap.ops.attention.triton import attention_triton
from inkcap.ops.attn_prep.ref import attn_prep
from inkcap.ops.attn_prep.triton import attn_prep_triton
from inkcap.ops.values import CodeScales, GroupView, HeadWeights, LogScaling, Packing, Scores

pytestmark = pytest.mark.gpu

D, STATES, BLOCK = 128, 16, 64
GEOMETRIES = {  # heads, kv heads, window, extent, scaling
    "full": (8, 1, None, 1024, LogScaling(131072, 0.1)),
    "window": (8, 2, 512, 512, None),
    "six": (6, 1, None, 1024, None),
    "three": (24, 8, 1024, 1024, None),
}


class Cache:
    """Blocks of one group, of which one layer's planes k and v are used: in bf16, or `coded` in E4M3."""

    def __init__(self, kv: int, blocks: int, rows: int, layers: int = 4, seed: int = 0, coded: bool = False) -> None:
        torch.manual_seed(seed)
        size = BLOCK * kv * D
        self.coded = coded
        self.codes = None
        self.poison = 255 if coded else float("nan")
        dtype = torch.uint8 if coded else torch.bfloat16
        arena = torch.full((blocks, 2 * layers * size), self.poison, dtype=dtype, device="cuda")
        self.kept = tuple(
            arena[:, i * size : (i + 1) * size].unflatten(1, (BLOCK, kv, D)) for i in (layers, layers + 1)
        )
        self.planes = self.kept
        if coded:
            self.planes = tuple(plane.view(torch.float8_e4m3fn) for plane in self.kept)
            self.codes = CodeScales(*(2.0 ** torch.arange(-kv - n, -n, device="cuda") for n in (0, 1)))
        self.free = (torch.randperm(blocks - 1) + 1).tolist()
        self.table = torch.zeros(rows, 1 + (1 << 20) // BLOCK, dtype=torch.int32, device="cuda")
        self.owned: dict[int, list[int]] = {}

    def fill(self, row: int, length: int, low: int, room: int) -> None:
        """Give `row` random state of positions low .. length, NaN elsewhere, and blocks for `room` more."""
        begin, end = low // BLOCK, -(-(length + room) // BLOCK)
        mine = [self.free.pop() for _ in range(end - begin)]
        self.owned[row] = mine
        ids = torch.tensor(mine, device="cuda")
        self.table[row] = 0
        self.table[row, begin:end] = ids.to(torch.int32)
        for plane in self.kept:
            for at in range(0, len(mine), 1024):
                part = ids[at : at + 1024]
                drawn = torch.randn(len(part), *plane.shape[1:], device="cuda", dtype=torch.bfloat16)
                plane[part] = drawn.to(torch.float8_e4m3fn).view(torch.uint8) if self.coded else drawn
            if mine:
                if length // BLOCK < end:
                    plane[mine[length // BLOCK - begin], length % BLOCK :] = self.poison
                for extra in mine[length // BLOCK + 1 - begin :]:
                    plane[extra] = self.poison
                plane[mine[0], : low % BLOCK] = self.poison

    def drop(self) -> None:
        """Take everything back."""
        for mine in self.owned.values():
            for plane in self.kept:
                plane[torch.tensor(mine, device="cuda", dtype=torch.int64)] = self.poison
            self.free += mine
        self.owned = {}

    def read(self, plane: int, row: int, start: int, stop: int) -> torch.Tensor:
        at = torch.arange(start, stop, device="cuda")
        found = self.kept[plane][self.table[row, at // BLOCK].long(), at % BLOCK]
        return found.view(torch.float8_e4m3fn).to(torch.float16) if self.coded else found


def packed(firsts: list[int], counts: list[int], rows: list[int], bound: int = 0) -> Packing:
    """Sequences of `counts` tokens from positions `firsts` on; `bound`, if not 0, is all the host knows of lengths."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    spans = tuple(
        (starts[i], starts[i + 1], rows[i], max(bound - counts[i], 0) if bound else firsts[i]) for i in range(len(rows))
    )
    tensor = lambda values, dtype: torch.tensor(values, dtype=dtype, device="cuda")  # noqa: E731
    return Packing(
        starts=tensor(starts, torch.int32),
        rows=tensor(rows, torch.int32),
        first=tensor(firsts, torch.int32),
        row_of=tensor([row for row, count in zip(rows, counts, strict=True) for _ in range(count)], torch.int32),
        positions=tensor([f + j for f, n in zip(firsts, counts, strict=True) for j in range(n)], torch.int64),
        spans=spans,
    )


def exact(q, r, keys, values, positions, low, scores, step=65536):
    """Queries [n, heads, D] at `positions` over keys [N, kv, D] from position `low` on: [n, heads * D] in float64."""
    n, heads, _ = q.shape
    group = heads // keys.shape[1]
    bias = (r.double() @ scores.bias.double()).to(r.dtype).double()  # [n, heads, extent]
    if scores.scaling is not None:
        bias = bias * scores.scaling.factor(positions).double()[:, None, None]
    top = torch.full((n, heads), -torch.inf, dtype=torch.float64, device="cuda")
    total, acc = torch.zeros_like(top), torch.zeros(n, heads, D, dtype=torch.float64, device="cuda")
    for begin in range(0, len(keys), step):
        k = keys[begin : begin + step].double().repeat_interleave(group, 1)
        v = values[begin : begin + step].double().repeat_interleave(group, 1)
        z = torch.einsum("nhd,khd->nhk", q.double(), k) * scores.scale
        distance = positions[:, None] - torch.arange(low + begin, low + begin + len(k), device="cuda")
        near = (distance >= 0) & (distance < bias.shape[2])
        picked = bias.gather(2, distance.clamp(0, bias.shape[2] - 1)[:, None, :].expand(-1, heads, -1))
        z += picked * near[:, None, :]
        hidden = distance < 0 if scores.window is None else (distance < 0) | (distance >= scores.window)
        z.masked_fill_(hidden[:, None, :], -torch.inf)
        higher = torch.maximum(top, z.amax(2))
        p = (z - higher.clamp(min=-1e300)[..., None]).exp()
        shrink = (top - higher.clamp(min=-1e300)).exp()
        total = total * shrink + p.sum(2)
        acc = acc * shrink[..., None] + torch.einsum("nhk,khd->nhd", p, v)
        top = higher
    return (acc / total[..., None]).flatten(1)


def scene(cache, geometry, firsts, counts, rows, bound=0):
    """Inputs of attention for a step over a filled cache."""
    heads, kv, window, extent, scaling = GEOMETRIES[geometry]
    n = sum(counts)
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    scores = Scores(1 / D, window, 0.3 * make(STATES, extent), scaling)
    r = make(n, 1664)[:, 1664 - heads * STATES :].unflatten(1, (heads, STATES))
    packing = packed(firsts, counts, rows, bound)
    view = GroupView(BLOCK, cache.table, torch.full((n,), -1, device="cuda"), cache.planes)
    q, k, v = 4 * make(n, heads, D), make(n, kv, D), make(n, kv, D)
    if cache.coded:
        q, k, v = q.half(), k.to(torch.float8_e4m3fn).half(), v.to(torch.float8_e4m3fn).half()
    return q, k, v, r, scores, view, packing, None, None, cache.codes and cache.codes.v


def check(cache, got, inputs, firsts, counts, rows, sampled=16):
    """Relative error of some queries of each sequence."""
    q, k, v, r, scores, _, _, _, _, v_scale = inputs
    at, worst = 0, 0.0
    assert got.isfinite().all()
    for first, count, row in zip(firsts, counts, rows, strict=True):
        picked = sorted({0, count - 1, *(random.randrange(count) for _ in range(sampled - 2))})
        low = 0 if scores.window is None else max(0, first - scores.window + 1)
        keys = torch.cat([cache.read(0, row, low, first), k[at : at + count]])
        values = torch.cat([cache.read(1, row, low, first), v[at : at + count]])
        index = torch.tensor(picked, device="cuda") + at
        positions = torch.tensor(picked, device="cuda") + first
        want = exact(q[index], r[index], keys, values, positions, low, scores)
        if v_scale is not None:
            want = (want.view(len(want), k.shape[1], -1) * v_scale[:, None]).flatten(1)
        error = ((got[index].double() - want).norm() / want.norm()).item()
        assert error < 6e-3, f"{error:.1e} at first={first}, count={count}"
        worst = max(worst, error)
        at += count
    return worst


def head_weights(kv):
    taps, norms = torch.randn(2, 4, kv * D, device="cuda"), torch.rand(2, D, device="cuda")
    return HeadWeights(taps[0].t(), taps[1].t(), norms[0], norms[1], 1e-6)


def low_of(geometry, first):
    window = GEOMETRIES[geometry][2]
    return 0 if window is None else max(0, first - window + 1)


@pytest.fixture(scope="module", params=[False, True], ids=["bf16", "fp8"])
def wide(request):
    """5.2 GB, or half of it: 40000 blocks of 65536 elements, so that offsets pass 2^31."""
    return Cache(1, 40000, 12, coded=request.param)


@pytest.mark.parametrize("first", [1023, 65535, 262144, (1 << 20) - 64])
def test_long(wide, first):
    """One sequence with one query, four, a tool result of 60."""
    random.seed(first)
    wide.fill(1, first, 0, 64)
    for count in (1, 4, 60):
        inputs = scene(wide, "full", [first], [count], [1])
        got = attention_triton(*inputs)
        print(f"first {first} queries {count}: error {check(wide, got, inputs, [first], [count], [1], 4):.1e}")
    wide.drop()


@pytest.mark.parametrize("count", [1, 3])
def test_mixed_lengths(wide, count):
    """From 1 to a million tokens in one batch."""
    firsts = [0, 1, 63, 64, 127, 1022, 1023, 1088, 5000, (1 << 20) - 8]
    rows = list(range(1, 11))
    for row, first in zip(rows, firsts, strict=True):
        wide.fill(row, first, 0, 8)
    counts = [count] * 10
    inputs = scene(wide, "full", firsts, counts, rows)
    print(f"mixed x {count}: error {check(wide, attention_triton(*inputs), inputs, firsts, counts, rows):.1e}")
    wide.drop()


@pytest.mark.parametrize(("first", "count"), [(0, 4133), (65536 - 7, 2048), (262144 + 5, 1500)])
def test_prefill(wide, first, count):
    wide.fill(1, first, 0, count)
    inputs = scene(wide, "full", [first], [count], [1])
    got = attention_triton(*inputs)
    print(f"chunk of {count} at {first}: error {check(wide, got, inputs, [first], [count], [1]):.1e}")
    wide.drop()


@pytest.mark.parametrize("coded", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("geometry", ["full", "window", "six", "three"])
def test_random_batches(geometry, coded):
    """Sequences of all sizes of steps together, edges of blocks, windows and extents included."""
    random.seed(1)
    _, kv, _, extent, _ = GEOMETRIES[geometry]
    cache = Cache(kv, 700, 9, layers=2, coded=coded)
    edges = [0, 1, 63, 64, 65, extent - 2, extent - 1, extent, extent + 63, extent + 64, 2 * extent]
    worst = 0.0
    for _ in range(150 if geometry in ("full", "window") else 40):
        n = random.randint(5, 8)
        rows = random.sample(range(1, 9), n)
        firsts = [random.choice([random.choice(edges), random.randrange(3000)]) for _ in rows]
        largest = random.choice([1, 1, 8, 100, 600])
        counts = [random.choice([1, random.randint(1, largest)]) for _ in rows]
        if largest > 1:
            counts[random.randrange(n)] = largest
        for row, first, count in zip(rows, firsts, counts, strict=True):
            cache.fill(row, first, low_of(geometry, first), count)
        bound = random.choice([0, 8000]) if largest == 1 else 0
        inputs = scene(cache, geometry, firsts, counts, rows, bound)
        worst = max(worst, check(cache, attention_triton(*inputs), inputs, firsts, counts, rows, 4))
        cache.drop()
    print(f"random batches, {geometry}: worst error {worst:.1e}")


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_few_keys(geometry):
    """Single tokens over few keys: edges of warps, programs and windows, whether lengths are known or bounded."""
    random.seed(2)
    kv, window = GEOMETRIES[geometry][1:3]
    rows = list(range(1, 1 + min(4, single.PAIRS // kv)))
    cache = Cache(kv, 200, 6, layers=2)
    edges = [0, 1, 15, 16, 17, 63, 64, 127, 128, 129, 510, 511, 512, 513, 1022, 1023, 1024, 1025, 1087, 2047]
    worst = 0.0
    for n in range(20):
        firsts = [edges[n], *(random.choice([random.choice(edges), random.randrange(2048)]) for _ in rows[1:])]
        for row, first in zip(rows, firsts, strict=True):
            cache.fill(row, first, low_of(geometry, first), 1)
        bound = random.choice([0, 2049]) if window is None else random.choice([0, 100_000])
        inputs = list(scene(cache, geometry, firsts, [1] * len(rows), rows, bound))
        assert single.suits(inputs[0], inputs[1], inputs[3], inputs[4], inputs[6], False)
        worst = max(worst, check(cache, attention_triton(*inputs), inputs, firsts, [1] * len(rows), rows, 2))
        q, heads = inputs[0], GEOMETRIES[geometry][0]
        inputs[7:9] = torch.randn(len(q), heads, device="cuda"), torch.randn(len(q), heads * D, device="cuda").to(q)
        want = attention.reference(*inputs) if not bound else None
        if want is not None:
            torch.testing.assert_close(attention_triton(*inputs).float(), want.float(), rtol=2e-2, atol=2e-2)
        cache.drop()
    print(f"few keys, {geometry}: worst error {worst:.1e}")


@pytest.mark.parametrize("coded", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("geometry", ["full", "window"])
def test_prompts(geometry, coded):
    """In tiles, with a single token beside them. For a sanitizer, under which the longer ones take a minute each."""
    random.seed(1)
    cache = Cache(GEOMETRIES[geometry][1], 80, 4, layers=2, coded=coded)
    firsts, counts, rows = [1090, 0, 65], [130, 70, 1], [1, 2, 3]
    for row, first, count in zip(rows, firsts, counts, strict=True):
        cache.fill(row, first, low_of(geometry, first), count)
    inputs = scene(cache, geometry, firsts, counts, rows)
    check(cache, attention_triton(*inputs), inputs, firsts, counts, rows, 4)


@pytest.mark.parametrize("coded", [False, True], ids=["bf16", "fp8"])
def test_sinks_and_gate(coded):
    cache = Cache(2, 200, 4, layers=2, coded=coded)
    firsts, counts, rows = [600, 0, 77], [1, 1, 1], [1, 2, 3]
    for counts in ([1, 1, 1], [20, 2, 1]):
        for row, first, count in zip(rows, firsts, counts, strict=True):
            cache.fill(row, first, low_of("window", first), count)
        inputs = scene(cache, "window", firsts, counts, rows)
        n = sum(counts)
        sinks = torch.randn(n, 13, device="cuda")[:, 3:11]  # columns of a product
        gate = torch.randn(n, 8 * D, device="cuda", dtype=torch.bfloat16)
        got = attention_triton(*inputs[:7], sinks, gate, inputs[9])
        want = attention.reference(*inputs[:7], sinks, gate, inputs[9])
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        cache.drop()


@pytest.mark.parametrize("coded", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("geometry", ["full", "window"])
def test_captured(geometry, coded):
    """Preparation and attention in a graph for rows up to 20000 tokens, replayed while rows grow; padding included."""
    heads, kv, window, extent, scaling = GEOMETRIES[geometry]
    cache = Cache(kv, 1200, 6, layers=2, coded=coded)
    conv = torch.randn(400, 3, 4 * kv * D, device="cuda", dtype=torch.bfloat16)
    conv[0] = float("nan")
    conv_planes = tuple(conv[:, i].unflatten(1, (4, kv * D)) for i in (0, 1))
    rows, firsts = [1, 2, 3, 0, 0], [1020, 19000, 3, 0, 0]
    for row, first in zip(rows[:3], firsts, strict=False):
        cache.fill(row, first, low_of(geometry, first), 16)
    conv_table = torch.zeros(6, 5200, dtype=torch.int32, device="cuda")
    for row, first in zip(rows[:3], firsts, strict=False):
        index = torch.arange(max(first // 4 - 1, 0), first // 4 + 6, device="cuda")
        conv_table[row, index] = (row * 50 + torch.arange(len(index), device="cuda")).to(torch.int32)
    weights = HeadWeights(
        *(torch.randn(kv * D, 4, device="cuda") for _ in range(2)),
        *(torch.rand(D, device="cuda") for _ in range(2)),
        1e-6,
        cache.codes,
    )
    packing = packed(firsts, [1] * 5, rows, 20000)
    product = torch.randn(5, (heads + 2 * kv) * D + heads * STATES, device="cuda", dtype=torch.bfloat16)
    slots, conv_slots = (torch.zeros(5, dtype=torch.int64, device="cuda") for _ in range(2))
    scores = Scores(1 / D, window, 0.3 * torch.randn(STATES, extent, device="cuda").bfloat16(), scaling)
    kv_view = GroupView(BLOCK, cache.table, slots, cache.planes)
    conv_view = GroupView(4, conv_table, conv_slots, conv_planes)

    def forward(prepare, attend, conv_view, kv_view, packing, product):
        q, k, v, r = product.split([heads * D, kv * D, kv * D, heads * STATES], 1)
        q, k, v = prepare(q, k, v, weights, conv_view, kv_view, packing, scaling)
        v_scale = None if weights.codes is None else weights.codes.v
        return q, attend(q, k, v, r.unflatten(1, (heads, STATES)), scores, kv_view, packing, None, None, v_scale)

    def advance():
        at = packing.positions[:3]
        of = packing.row_of[:3].long()
        for out, view in ((slots, kv_view), (conv_slots, conv_view)):
            out[:3] = view.table[of, at // view.block].long() * view.block + at % view.block
            out[3:] = -1

    advance()
    arguments = (attn_prep_triton, attention_triton, conv_view, kv_view, packing, product)
    saved = [plane.clone() for plane in (*cache.planes, *conv_planes)]
    forward(*arguments)
    for plane, before in zip((*cache.planes, *conv_planes), saved, strict=True):
        plane.copy_(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, out = forward(*arguments)
    for step in range(8):
        product.normal_()
        advance()
        copies = [tuple(plane.clone() for plane in view.planes) for view in (conv_view, kv_view)]
        now = packed([f + step for f in firsts[:3]], [1] * 3, rows[:3])
        want_q, want = forward(
            attn_prep.reference,
            attention.reference,
            GroupView(4, conv_table, conv_slots[:3], copies[0]),
            GroupView(BLOCK, cache.table, slots[:3], copies[1]),
            now,
            product[:3],
        )
        graph.replay()
        torch.testing.assert_close(q[:3], want_q, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(out[:3], want, rtol=3e-2, atol=3e-2)
        for view, copy in zip((conv_view, kv_view), copies, strict=True):
            for one, other in zip(view.planes, copy, strict=True):
                one, other = one.float(), other.float()  # codes may differ by one where the sums before them do
                torch.testing.assert_close(one, other, rtol=0.13 if coded else 2e-2, atol=2e-2, equal_nan=True)
        packing.positions[:3] += 1
        packing.first[:3] += 1


@pytest.mark.parametrize("counts", [[1, 1, 1], [3, 1, 200]])
@pytest.mark.parametrize("coded", [False, True], ids=["bf16", "fp8"])
def test_prep(counts, coded):
    """Conditioning of a packed step against the reference, block edges included."""
    kv = 2
    rows, firsts = [1, 2, 3], [63, 5, 0]
    n = sum(counts)
    torch.manual_seed(4)
    conv = torch.randn(300, 2, 4 * kv * D, device="cuda", dtype=torch.bfloat16)
    conv[0] = float("nan")
    planes = tuple(conv[:, i].unflatten(1, (4, kv * D)) for i in (0, 1))
    table = (1 + torch.arange(4 * 70, device="cuda").view(4, 70)).to(torch.int32)
    cache = Cache(kv, 200, 6, layers=2, coded=coded)
    for row, first, count in zip(rows, firsts, counts, strict=True):
        cache.fill(row, first, 0, count)
    packing = packed(firsts, counts, rows)
    of, at = packing.row_of.long(), packing.positions
    views = []
    for block, pages, state in ((4, table, planes), (BLOCK, cache.table, cache.planes)):
        slots = pages[of, at // block].long() * block + at % block
        slots[n // 2] = -1
        views.append((block, pages, slots, state))
    weights = HeadWeights(
        *(torch.randn(kv * D, 4, device="cuda") for _ in range(2)),
        *(torch.rand(D, device="cuda") for _ in range(2)),
        1e-6,
        cache.codes,
    )
    parts = torch.randn(n, 12 * D, device="cuda", dtype=torch.bfloat16).split([8 * D, kv * D, kv * D], 1)
    copies = [GroupView(b, t, s, tuple(p.clone() for p in state)) for b, t, s, state in views]
    scaling = LogScaling(40, 0.1)
    want = attn_prep.reference(*parts, weights, *copies, packing, scaling)
    mine = [GroupView(*view) for view in views]
    got = attn_prep_triton(*parts, weights, *mine, packing, scaling)
    step = 0.13 if coded else 2e-2  # a code may be the next one where the sums before it differ in their last bit
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=step, atol=2e-2)
        assert not coded or (one != other).float().mean() < 0.01
    for view, copy in zip(mine, copies, strict=True):
        for one, other in zip(view.planes, copy.planes, strict=True):
            torch.testing.assert_close(one.float(), other.float(), rtol=step, atol=2e-2, equal_nan=True)
