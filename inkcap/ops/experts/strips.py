"""Products of experts for a few tokens with short rows of weights, such as those of second halves.

A program has one expert and works through a strip of its rows, tile by tile, each over all columns, so that one tile's
weights are on the way while another is multiplied. Codes are decoded as in few.py.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.experts.coded_many import stored
from inkcap.ops.experts.codes import unit
from inkcap.ops.experts.few import FEW, NARROW, decoded, taken_apart
from inkcap.ops.experts.many import Also
from inkcap.ops.quantize.coded import Coded, Weights
from inkcap.ops.values import Routed

MOST = 512  # columns of a row


@triton.jit
def kept(y, out, use, live, n, rows):
    """Store a tile [rows n, uses] of products as rows of y [.., rows]."""
    to = y + use.to(tl.int64)[None, :] * rows + n[:, None]
    tl.store(to, out.to(y.dtype.element_ty), mask=live[None, :] & (n < rows)[:, None])


@triton.jit
def dense_strip(
    x, w, y, use, live, start, rows, stride, K: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """TILES tiles of rows of w, `stride` apart, from `start` on, times the rows `use` of x."""
    k = tl.arange(0, BK)[None, :]
    xp = (x + use.to(tl.int64) * K)[:, None]
    for t in tl.range(0, TILES, num_stages=STAGES):
        n = start + t * BN + tl.arange(0, BN)
        wp = (w + tl.minimum(n, rows - 1).to(tl.int64) * stride)[:, None]
        acc = tl.zeros([BN, WIDTH], tl.float32)
        for done in tl.static_range(0, K, BK):
            b = tl.load(wp + done + k, mask=done + k < K, other=0.0)
            a = tl.load(xp + done + k, mask=live[:, None] & (done + k < K), other=0.0)
            acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee")
        kept(y, acc, use, live, n, rows)


@triton.jit
def coded_strip(
    x, words, scales, y, use, live, first, start, rows, times, BITS: tl.constexpr, K: tl.constexpr,
    WIDTH: tl.constexpr, BN: tl.constexpr, WORDS: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same with codes; `first` is the expert's first row, `times` multiplies the sums."""
    PER: tl.constexpr = 32 // BITS  # codes of a word
    SCALED: tl.constexpr = 2 if BITS == 4 else 8  # words under one scale
    word, block = tl.arange(0, WORDS)[None, None, :], tl.arange(0, WORDS // SCALED)[None, None, :]
    k = tl.arange(0, WORDS * PER)[None, None, :]
    xp = (x + use.to(tl.int64) * K)[None, :, None]
    for t in tl.range(0, TILES, num_stages=STAGES):
        n = start + t * BN + tl.arange(0, BN)
        row = first + tl.minimum(n, rows - 1)
        wp = words + row[None, :, None] * (K // PER)
        sp = scales + row[None, :, None] * (K // PER // SCALED)
        acc = tl.zeros([BN, WIDTH], tl.float32)
        for done in tl.static_range(0, K // PER, WORDS):
            code = tl.load(wp + done + word, mask=done + word < K // PER, other=0)
            scale = tl.load(sp + done // SCALED + block, mask=done // SCALED + block < K // PER // SCALED, other=0)
            a = tl.load(xp + done * PER + k, mask=live[None, :, None] & (done * PER + k < K), other=0.0)
            w0, w1, w2, w3 = decoded(code, scale, a.dtype, BITS, 1, BN, WORDS)
            x0, x1, x2, x3 = taken_apart(a, BITS, 1, WIDTH, WORDS)
            acc = added(w0, x0, acc, BN, WIDTH, WORDS)
            acc = added(w1, x1, acc, BN, WIDTH, WORDS)
            if BITS == 4:
                acc = added(w2, x2, acc, BN, WIDTH, WORDS)
                acc = added(w3, x3, acc, BN, WIDTH, WORDS)
        kept(y, acc * times, use, live, n, rows)


@triton.jit
def added(w, x, acc, BN: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr):
    """acc and the product of one slice's operands, whose warps divide rows."""
    w, x = tl.reshape(w, [BN, 2 * WORDS]), tl.reshape(x, [2 * WORDS, WIDTH])
    return tl.dot(w, x, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["tokens"])
def strip_kernel(
    x, w, scales, factor, choice, y, shared_x, shared_w, shared_y, rows, tokens,
    TOP: tl.constexpr, BT: tl.constexpr, SHARED: tl.constexpr, SHARED_STRIDE: tl.constexpr, SHARED_NEXT: tl.constexpr,
    BITS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, WORDS: tl.constexpr,
    DENSE_BN: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Shared experts come first; the first use of a routed one works for all of them. The choice is read early: what
    stands between router and here triggers after its wait."""
    program, start = tl.program_id(1), tl.program_id(0) * (TILES * BN)
    own = tl.maximum(program - SHARED, 0)
    e = tl.load(choice + own).to(tl.int64)
    token, place = tl.arange(0, WIDTH)[:, None], tl.arange(0, BT)[None, :]
    number = token * TOP + place
    chosen = tl.load(choice + number, mask=(token < tokens) & (place < TOP), other=-1)
    use = tl.max(tl.where(chosen == e, number, -1), 1)  # a token uses an expert once
    live = use >= 0
    pdl.wait(PDL)
    pdl.trigger(PDL)
    if program < SHARED:
        at = tl.arange(0, WIDTH)
        mine = tl.where(at < tokens, at, 0) * SHARED + program
        dense_strip(
            shared_x, shared_w + program * (SHARED_NEXT * K), shared_y, mine, at < tokens, start, rows, SHARED_STRIDE,
            K, WIDTH, DENSE_BN, BK, TILES * BN // DENSE_BN, STAGES,
        )  # fmt: skip
    elif tl.min(tl.where(live, use, WIDTH * TOP), 0) == own:
        use = tl.maximum(use, 0)
        if BITS == 16:
            dense_strip(
                x, w + e * rows * K, y, use, live, start, rows, K,
                K, WIDTH, DENSE_BN, BK, TILES * BN // DENSE_BN, STAGES,
            )  # fmt: skip
        else:
            times = unit(x.dtype.element_ty, BITS)
            if BITS == 4:
                times *= tl.load(factor + e)
            coded_strip(
                x, w, scales, y, use, live, e * rows, start, rows, times,
                BITS, K, WIDTH, BN, WORDS, TILES, STAGES,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Strip:
    """How `strip_kernel` cuts its work: rows of a tile and of a dense one, tiles of a program, words and dense columns
    at once, loads in flight, warps. Each warp has 16 rows of a tile."""

    rows: int
    dense_rows: int
    tiles: int
    words: int
    dense: int
    stages: int
    warps: int


# by bits of a code, 16 for dense weights; measured on an H200, see docs/kernels.md
STRIPS = {4: Strip(32, 16, 4, 16, 128, 3, 2), 16: Strip(32, 32, 4, 16, 128, 3, 2)}


def short(w: Weights) -> bool:
    """Whether rows of w are short and of a kind that was measured."""
    return w.shape[2] <= MOST and (not isinstance(w, Coded) or w.bits in STRIPS)


def in_strips(x: Tensor, w: Weights, route: Routed, out: Tensor, also: Also | None = None) -> Tensor:
    """Use `number` of x [uses, K] times w [E, rows, K] of its expert, into out [uses, rows], which it returns.

    Uses are those of up to 16 tokens; w is `short`.
    """
    _, rows, length = w.shape
    bits, stores = (w.bits, stored(w)) if isinstance(w, Coded) else (16, (w, w, w))
    strip, on = STRIPS[bits], pdl.supported(x.device)
    (tokens, top), shared = route.choice.shape, 0
    beside, strides = (x, x, out), (length, 1)
    if also is not None:
        shared = len(also.w)
        beside, strides = (also.x, also.w, also.out), (also.w.stride(1), also.w.stride(0) // length)
    strip_kernel[(triton.cdiv(rows, strip.rows * strip.tiles), shared + tokens * top)](
        x, *stores, route.choice, out, *beside, rows, tokens, top, triton.next_power_of_2(top), shared, *strides,
        bits, length, NARROW if tokens <= NARROW else FEW, strip.rows, strip.words, strip.dense_rows, strip.dense,
        strip.tiles, strip.stages, on, num_warps=strip.warps, **pdl.launch(on),
    )  # fmt: skip
    return out
