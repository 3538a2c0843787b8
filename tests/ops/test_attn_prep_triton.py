"""Conditioning of heads by the kernels, however tokens are cut into steps, under the interpreter."""

import pytest
import torch
import triton
import triton.language as tl
from steps import World

from inkcap.cache.state import LayerState, Plane
from inkcap.ops.attn_prep import triton as kernels
from inkcap.ops.attn_prep.device import encode
from inkcap.ops.attn_prep.ref import attn_prep, attn_prep_clip
from inkcap.ops.attn_prep.triton import attn_prep_clip_triton, attn_prep_triton
from inkcap.ops.values import ClipWeights, CodeScales, GroupView, HeadWeights, LogScaling, Packing

HEADS, KV, SIZE, STATES = 4, 2, 6, 5
# tokens of each of three sequences in each step; sequences start at different times
STEPS = [(2, 0, 1), (1, 1, 1), (9, 3, 1), (1, 1, 0), (1, 1, 1)]


@triton.jit
def encode_kernel(x, code, number, count, N: tl.constexpr):
    at = tl.arange(0, N)
    codes, numbers = encode(tl.load(x + at, mask=at < count, other=0.0))
    tl.store(code + at, codes.to(tl.uint8), mask=at < count)
    tl.store(number + at, numbers, mask=at < count)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Steps of more than 4 tokens in tiles of 4, which sequences share."""
    torch.set_num_threads(1)
    monkeypatch.setattr(kernels, "tile", lambda tokens: (1, 1) if tokens <= 4 else (4, 4))


CODES = CodeScales(torch.tensor([0.5, 2.0]), torch.tensor([0.25, 2.0**-9]))  # the last saturates and is subnormal


def world(dtype, coded=False):
    kv = tuple(Plane(name, (KV, SIZE), "float8_e4m3fn" if coded else dtype) for name in "kv")
    conv = tuple(Plane(name, (width,), dtype) for name, width in (("k", KV * SIZE), ("v", KV * SIZE), ("a", 5)))
    return World(
        [LayerState("full", 0, kv, None, 8, True), LayerState("sconv", 0, conv, 4, 4, False)], length=40, seed=5
    )


def taps(apart):
    """Of k and v, where those of one channel are `apart`: next to each other, or as layers keep them."""
    made = torch.randn(2, 4, KV * SIZE)
    return [*made.transpose(1, 2)] if apart else [*made.transpose(1, 2).contiguous()]


def same_state(one, other):
    for name, arena in one.arenas.items():
        torch.testing.assert_close(arena.float(), other.arenas[name].float(), equal_nan=True, rtol=1e-3, atol=1e-3)


def steps(dtype, width, run, coded=False):
    """Run STEPS in two worlds, one for each function; `run` gets a cut of the inputs and both batches."""
    torch.manual_seed(3)
    kind = getattr(torch, dtype)
    worlds, cursor = (world(dtype, coded), world(dtype, coded)), [0, 0, 0]
    for step in STEPS:
        work = [(3 - i, cursor[i], [0] * step[i]) for i in (1, 2, 0) if step[i]]
        one, other = (each.batch(work).at(0) for each in worlds)
        joined = torch.randn(len(one.ids), width + 4).to(kind)[:, 2 : width + 2]  # a product with more columns
        for got, want in zip(*run(joined, one, other), strict=True):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want)
        same_state(*worlds)
        cursor = [a + b for a, b in zip(cursor, step, strict=True)]


@pytest.mark.parametrize(
    ("dtype", "scaled", "apart", "coded"),  # any two of them together
    [
        ("float32", False, False, False),
        ("float32", True, True, False),
        ("float32", True, True, True),
        ("float16", True, False, False),
        ("float16", False, True, False),
        ("float16", False, True, True),
    ],
)
def test_rms_heads(dtype, scaled, apart, coded):
    torch.manual_seed(0)
    scaling = LogScaling(5, 0.4) if scaled else None
    codes = CODES if coded else None
    weights = HeadWeights(*taps(apart), torch.randn(SIZE), torch.randn(SIZE), 1e-6, codes)

    def run(joined, one, other):
        parts = joined.split([HEADS * SIZE, KV * SIZE, KV * SIZE], 1)
        views = [(b.view("sconv"), b.view("full"), b.packing, scaling) for b in (one, other)]
        return attn_prep_triton(*parts, weights, *views[0]), attn_prep.reference(*parts, weights, *views[1])

    steps(dtype, (HEADS + 2 * KV) * SIZE, run, coded)


@pytest.mark.parametrize(("added", "coded"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("scaling", [None, LogScaling(5, 0.4)], ids=["plain", "scaled"])
def test_clipped_heads(added, coded, scaling):
    torch.manual_seed(0)
    scales = (torch.rand(HEADS, SIZE), torch.rand(HEADS, STATES))
    weights = ClipWeights(*taps(True), 0.6, *scales, 1.1, 0.8, 1e-6, CODES if coded else None)

    def run(joined, one, other):
        parts = joined.split([HEADS * SIZE, KV * SIZE, KV * SIZE, HEADS * STATES], 1)
        more = [torch.randn(len(joined), KV, 4) for _ in range(2)] if added else []
        views = [(b.view("sconv"), b.view("full"), b.packing, scaling) for b in (one, other)]
        return (
            attn_prep_clip_triton(*parts, weights, *views[0], *more),
            attn_prep_clip.reference(*parts, weights, *views[1], *more),
        )

    steps("float32", (HEADS + 2 * KV) * SIZE + HEADS * STATES, run, coded)


def test_every_code():
    """Numbers between all neighbours, on them and beyond them become the codes that PyTorch gives."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (codes[1:] + codes[:-1]) / 2
    x = torch.cat([codes, between, between * (1 + 2**-20), between * (1 - 2**-20), torch.tensor([449.0, 1e30])])
    x = torch.cat([x, -x, torch.tensor([torch.nan])])
    code, number = torch.empty(len(x), dtype=torch.uint8), torch.empty(len(x))
    encode_kernel[(1,)](x, code, number, len(x), 1024)
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(code, want.view(torch.uint8))
    torch.testing.assert_close(number, want.float(), rtol=0, atol=0, equal_nan=True)


def test_padding_is_harmless():
    """Tokens as a captured graph pads them: row 0, position 0, no slot; nothing is read or kept for them."""
    torch.manual_seed(0)
    place = world("float32")
    place.batch([(1, 0, [0] * 9)])
    for arena in place.arenas.values():
        arena.copy_(torch.randn(arena.shape))
    batch = place.batch([(1, 9, [0])]).at(0)
    weights = HeadWeights(*taps(True), torch.randn(SIZE), torch.randn(SIZE), 1e-6)
    x = torch.randn(3, (HEADS + 2 * KV) * SIZE)
    parts = x.split([HEADS * SIZE, KV * SIZE, KV * SIZE], 1)

    def padded(view):
        slots = torch.cat([view.slots, torch.tensor([-1, -1])])
        planes = tuple(plane.clone() for plane in view.planes)
        for plane in planes:
            plane[0] = float("nan")
        return GroupView(view.block, view.table, slots, planes)

    p = batch.packing
    packing = Packing(
        starts=torch.tensor([0, 1, 2, 3], dtype=torch.int32),
        rows=torch.tensor([1, 0, 0], dtype=torch.int32),
        first=torch.tensor([9, 0, 0], dtype=torch.int32),
        row_of=torch.tensor([1, 0, 0], dtype=torch.int32),
        positions=torch.tensor([9, 0, 0]),
        spans=((0, 1, 1, 100), (1, 2, 0, 100), (2, 3, 0, 100)),
    )
    conv, kv = padded(batch.view("sconv")), padded(batch.view("full"))
    got = attn_prep_triton(*parts, weights, conv, kv, packing, None)
    want = attn_prep.reference(
        *(each[:1] for each in parts), weights, batch.view("sconv"), batch.view("full"), p, None
    )  # fmt: skip
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one[:1], other)
    for view, name in ((conv, "sconv"), (kv, "full")):
        for one, other in zip(view.planes, batch.view(name).planes, strict=True):
            assert one[0].isnan().all()
            torch.testing.assert_close(one[1:], other[1:])
