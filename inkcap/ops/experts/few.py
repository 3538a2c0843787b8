"""Products of experts for a few tokens: a warp multiplies 16 rows of weights, as the first operand, with up to 8 or 16
uses of their expert, over its own slice of the columns.

Codes go from shared memory straight to where the product wants them, so nothing but their decoding stands between: the
order in which a word's codes are multiplied is that in which they fall out of it, and x is taken in the same order.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.act.triton import gated
from inkcap.ops.experts.coded_many import stored
from inkcap.ops.experts.codes import E4M3_PAIRS_TIMES_SCALE, PAIRS_TIMES_SCALE, half, high, low, moved, scale_of, unit
from inkcap.ops.experts.group import Tiles
from inkcap.ops.experts.many import Also
from inkcap.ops.quantize.coded import Coded, Weights
from inkcap.ops.values import Caps, Routed


@triton.jit
def joined(first, second, Q: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """A pair of numbers of each word [Q, ROWS, WORDS] side by side: [Q, ROWS, 2 WORDS]."""
    return tl.reshape(tl.join(first, second), [Q, ROWS, 2 * WORDS])


@triton.jit
def halves(pair, Q: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """The same of pairs of bf16 in an int32."""
    return joined(half(pair, tl.bfloat16, False), half(pair, tl.bfloat16, True), Q, ROWS, WORDS)


@triton.jit
def whole(
    w, times, LEFT: tl.constexpr, SIGN_LEFT: tl.constexpr, dtype: tl.constexpr,
    BITS: tl.constexpr, Q: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """A pair of codes of each word in a dtype without packed arithmetic, times the word's scale."""
    pair = moved(w, LEFT, SIGN_LEFT, 0x01C001C0 if BITS == 4 else 0x07F007F0)
    unit_: tl.constexpr = 8.507059173023462e37 if BITS == 4 else 1.329227995784916e36
    first, second = low(pair) * unit_ * times, high(pair) * unit_ * times
    return joined(first.to(dtype), second.to(dtype), Q, ROWS, WORDS)


@triton.jit
def decoded(w, s, dtype: tl.constexpr, BITS: tl.constexpr, Q: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Words [Q, ROWS, WORDS] and their blocks' scales to weights: four [Q, ROWS, 2 WORDS] of the codes (i, i + 4) of
    each word, or two of its codes (i, i + 2), which come twice. `unit` of codes.py is to be made up for."""
    BLOCKS: tl.constexpr = WORDS // (2 if BITS == 4 else 8)
    scale = scale_of(s, BITS)
    if dtype == tl.bfloat16:
        if BITS == 4:
            scale *= 1.298074214633707e33  # 2^110
        bits = scale.to(tl.uint32, bitcast=True)  # a bf16: its low half is empty
        times = ((bits >> 16) | bits).to(tl.int32, bitcast=True)
    else:
        times = scale
    times = tl.broadcast_to(times[:, :, :, None], [Q, ROWS, BLOCKS, WORDS // BLOCKS])
    times = tl.reshape(times, [Q, ROWS, WORDS])
    if dtype == tl.bfloat16 and BITS == 4:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            PAIRS_TIMES_SCALE, "=r,=r,=r,=r,r,r", [w, times],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        w0, w1 = halves(p0, Q, ROWS, WORDS), halves(p1, Q, ROWS, WORDS)
        w2, w3 = halves(p2, Q, ROWS, WORDS), halves(p3, Q, ROWS, WORDS)
    elif dtype == tl.bfloat16:
        p0, p1 = tl.inline_asm_elementwise(
            E4M3_PAIRS_TIMES_SCALE, "=r,=r,r,r", [w, times], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
        w0, w1 = halves(p0, Q, ROWS, WORDS), halves(p1, Q, ROWS, WORDS)
        w2, w3 = w0, w1
    elif BITS == 4:
        w0, w1 = whole(w, times, 6, 12, dtype, 4, Q, ROWS, WORDS), whole(w, times, 2, 8, dtype, 4, Q, ROWS, WORDS)
        w2, w3 = whole(w, times, -2, 4, dtype, 4, Q, ROWS, WORDS), whole(w, times, -6, 0, dtype, 4, Q, ROWS, WORDS)
    else:
        w0, w1 = whole(w, times, 4, 8, dtype, 8, Q, ROWS, WORDS), whole(w, times, -4, 0, dtype, 8, Q, ROWS, WORDS)
        w2, w3 = w0, w1
    return w0, w1, w2, w3


@triton.jit
def taken_apart(x, BITS: tl.constexpr, Q: tl.constexpr, USES: tl.constexpr, WORDS: tl.constexpr):
    """Rows [Q, USES, columns of WORDS] in the order of `decoded`: four, or two that come twice, [Q, 2 WORDS, USES]."""
    if BITS == 4:
        even, odd = tl.split(tl.reshape(x, [Q, USES, WORDS, 2, 2, 2]))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
    else:
        x0, x1 = tl.split(tl.reshape(x, [Q, USES, WORDS, 2, 2]))
        x2, x3 = x0, x1
    return (
        upright(x0, Q, USES, WORDS),
        upright(x1, Q, USES, WORDS),
        upright(x2, Q, USES, WORDS),
        upright(x3, Q, USES, WORDS),
    )


@triton.jit
def upright(x, Q: tl.constexpr, USES: tl.constexpr, WORDS: tl.constexpr):
    """Numbers [Q, USES, WORDS, 2] as the second operand of a product."""
    return tl.trans(tl.reshape(x, [Q, USES, 2 * WORDS]), 0, 2, 1)


@triton.jit
def coded_tile(
    xs, live, words, scales, row, acc, BITS: tl.constexpr, K: tl.constexpr, Q: tl.constexpr,
    BN: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add rows [BN] of codes, counted over all experts, times rows of x which begin at xs [WIDTH]: [Q, BN, WIDTH]."""
    PER: tl.constexpr = 32 // BITS  # codes of a word
    SCALED: tl.constexpr = 2 if BITS == 4 else 8  # words under one scale
    OWN: tl.constexpr = (K // PER + Q * WORDS - 1) // (Q * WORDS) * WORDS  # words of a slice
    FULL: tl.constexpr = OWN * Q * PER == K
    q = tl.arange(0, Q)[:, None, None] * OWN
    word = q + tl.arange(0, WORDS)[None, None, :]
    block = q // SCALED + tl.arange(0, WORDS // SCALED)[None, None, :]
    k = q * PER + tl.arange(0, WORDS * PER)[None, None, :]
    wp = words + row[None, :, None] * (K // PER) + word
    sp = scales + row[None, :, None] * (K // PER // SCALED) + block
    xp = xs[None, :, None] + k
    here = live[None, :, None]
    for done in tl.range(0, OWN, WORDS, num_stages=STAGES):
        if FULL:
            code = tl.load(wp + done)
            scale = tl.load(sp + done // SCALED)
            a = tl.load(xp + done * PER, mask=here, other=0.0)
        else:
            code = tl.load(wp + done, mask=done + word < K // PER, other=0)
            scale = tl.load(sp + done // SCALED, mask=done // SCALED + block < K // PER // SCALED, other=0)
            a = tl.load(xp + done * PER, mask=here & (done * PER + k < K), other=0.0)
        w0, w1, w2, w3 = decoded(code, scale, a.dtype, BITS, Q, BN, WORDS)
        x0, x1, x2, x3 = taken_apart(a, BITS, Q, WIDTH, WORDS)
        acc = tl.dot(w0, x0, acc, input_precision="ieee")
        acc = tl.dot(w1, x1, acc, input_precision="ieee")
        if BITS == 4:
            acc = tl.dot(w2, x2, acc, input_precision="ieee")
            acc = tl.dot(w3, x3, acc, input_precision="ieee")
    return acc


@triton.jit
def dense_tile(xs, live, ws, acc, K: tl.constexpr, Q: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):
    """The same with rows of weights which begin at ws [BN]."""
    OWN: tl.constexpr = (K + Q * BK - 1) // (Q * BK) * BK
    k = tl.arange(0, Q)[:, None, None] * OWN + tl.arange(0, BK)[None, None, :]
    wp = ws[None, :, None] + k
    xp = xs[None, :, None] + k
    here = live[None, :, None]
    for done in tl.range(0, OWN, BK, num_stages=STAGES):
        if OWN * Q == K:
            b = tl.load(wp + done)
            a = tl.load(xp + done, mask=here, other=0.0)
        else:
            b = tl.load(wp + done, mask=done + k < K, other=0.0)
            a = tl.load(xp + done, mask=here & (done + k < K), other=0.0)
        acc = tl.dot(b, tl.trans(a, 0, 2, 1), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["tokens"])
def few_kernel(
    x, w, scales, factor, choice, order, start, stop, y, shared_x, shared_w, gammas, shared_y, rows, tokens,
    gate_cap, up_cap,
    LISTED: tl.constexpr,  # choice are the experts of tiles, as in many.py; else the choice of tokens that fit one tile
    TOP: tl.constexpr,
    BT: tl.constexpr,
    SHARE: tl.constexpr,  # these and the strides as in many.py's grouped_kernel
    SHARED: tl.constexpr,
    SHARED_SHARE: tl.constexpr,
    SHARED_STRIDE: tl.constexpr,
    SHARED_NEXT: tl.constexpr,
    PAIRED: tl.constexpr,
    CAPPED: tl.constexpr,
    BITS: tl.constexpr,  # of a code; 16: the weights are dense
    K: tl.constexpr,
    WIDTH: tl.constexpr,  # uses of a tile
    BN: tl.constexpr,
    WORDS: tl.constexpr,  # of a row that are multiplied at once in one slice
    BK: tl.constexpr,  # the same of dense columns
    Q: tl.constexpr,  # slices of the columns
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Shared experts are dense; their tiles come first. Where tiles are not listed, the first use of an expert works
    for all of them. Triggers after its wait, so that the second half may read the choice early."""
    EARLY: tl.constexpr = not (LISTED or PAIRED)
    if not EARLY:
        pdl.wait(PDL)
        pdl.trigger(PDL)
    blocks = tl.cdiv(tokens, WIDTH)
    program = tl.program_id(1)
    own = tl.maximum(program - SHARED * blocks, 0)  # among the tiles of routed experts
    e = tl.load(choice + own).to(tl.int64)
    if LISTED:
        idle = e < 0  # nothing is written for tiles that there are not
        routed = tl.load(start + own, mask=e >= 0, other=0) + tl.arange(0, WIDTH)
        inside = routed < tl.load(stop + own, mask=e >= 0, other=0)
        routed = tl.load(order + routed, mask=inside, other=0)
    else:
        token, place = tl.arange(0, WIDTH)[:, None], tl.arange(0, BT)[None, :]
        number = token * TOP + place
        chosen = tl.load(choice + number, mask=(token < tokens) & (place < TOP), other=-1)
        routed = tl.max(tl.where(chosen == e, number, -1), 1)  # a token uses an expert once
        inside = routed >= 0
        idle = tl.min(tl.where(inside, routed, WIDTH * TOP), 0) != own
        routed = tl.maximum(routed, 0)
    if EARLY:
        pdl.wait(PDL)
        pdl.trigger(PDL)
    if (program >= SHARED * blocks) & idle:
        return
    held = tl.minimum(tl.program_id(0) * BN + tl.arange(0, BN), rows - 1).to(tl.int64)
    acc = tl.zeros([Q, BN, WIDTH], tl.float32)
    if program < SHARED * blocks:
        at = program % blocks * WIDTH + tl.arange(0, WIDTH)
        live = at < tokens
        use = tl.where(live, at, 0) * SHARED + program // blocks
        xs = shared_x + (use // SHARED_SHARE).to(tl.int64) * K
        ws = shared_w + program // blocks * (SHARED_NEXT * K) + held * SHARED_STRIDE
        acc = dense_tile(xs, live, ws, acc, K, Q, BK, STAGES)
        to = shared_y
        if PAIRED:
            times = tl.load(gammas + use).to(tl.float32)
        else:
            times = tl.full([WIDTH], 1.0, tl.float32)
    else:
        live = inside
        use = routed
        xs = x + (use // SHARE).to(tl.int64) * K
        to = y
        times = tl.full([WIDTH], 1.0, tl.float32)
        if BITS == 16:
            acc = dense_tile(xs, live, w + (e * rows + held) * K, acc, K, Q, BK, STAGES)
        else:
            acc = coded_tile(xs, live, w, scales, e * rows + held, acc, BITS, K, Q, BN, WIDTH, WORDS, STAGES)
            acc *= (tl.load(factor + e) if BITS == 4 else 1.0) * unit(x.dtype.element_ty, BITS)
    out = tl.trans(tl.sum(acc, 0))
    if PAIRED:
        flat = gated(tl.reshape(out, [WIDTH * BN]), gate_cap, up_cap, CAPPED, WIDTH * BN)
        out = tl.reshape(flat, [WIDTH, BN // 2]) * times[:, None]
        width = rows // 2
        column = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
    else:
        width = rows
        column = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(
        to + use.to(tl.int64)[:, None] * width + column[None, :],
        out.to(y.dtype.element_ty),
        mask=live[:, None] & (column < width)[None, :],
    )


FEW = 16  # tokens up to which tiles need no lists
NARROW = 8  # uses of a tile; 16 where more tokens than that need no lists
LONG = 2048  # columns of rows of dense weights beyond which they are multiplied here


@dataclass(frozen=True, slots=True)
class Cut:
    """How `few_kernel` cuts its work: rows of a tile, slices of the columns, words and dense columns at once in each,
    loads in flight, warps."""

    rows: int
    slices: int
    words: int
    dense: int
    stages: int
    warps: int


# of codes and of dense weights, by the columns of a row up to which they are taken; measured on an H200, see
# docs/kernels.md. Warps of a program divide slices: more of them would repeat each other's work
CODED = {2048: Cut(32, 1, 32, 64, 3, 1), 4096: Cut(32, 2, 16, 64, 3, 2), 1 << 30: Cut(32, 4, 32, 64, 3, 4)}
DENSE = {LONG: Cut(32, 1, 32, 128, 3, 2), 1 << 30: Cut(16, 4, 32, 128, 3, 4)}


def suits(w: Weights, tokens: int) -> bool:
    """Whether `grouped_few` is the fastest way."""
    return tokens <= FEW and (isinstance(w, Coded) or w.shape[2] > LONG)


def cut_of(w: Weights) -> Cut:
    """How products with w are cut."""
    return next(cut for most, cut in (CODED if isinstance(w, Coded) else DENSE).items() if w.shape[2] <= most)


def grouped_few(
    x: Tensor,
    w: Weights,
    uses: Tiles | Routed,
    share: int,
    out: Tensor,
    *,
    paired: bool,
    caps: Caps | None = None,
    also: Also | None = None,
    cut: Cut | None = None,
) -> Tensor:
    """`grouped` of many.py with weights w [E, rows, K] of any kind, for tiles of 8 or 16 uses or up to 16 tokens."""
    _, rows, length = w.shape
    on = pdl.supported(x.device)
    bits, stores = (w.bits, stored(w)) if isinstance(w, Coded) else (16, (w, w, w))
    cut = cut or cut_of(w)
    own = length * bits // 32 // cut.slices
    words = cut.words if own % cut.words == 0 else min(cut.words, 16)  # so that no step is cut
    columns = max(16, min(cut.rows, triton.next_power_of_2(rows)))
    if isinstance(uses, Tiles):
        tokens, top, width = 0, 1, uses.width
        lists, tiles = (uses.expert, uses.order, uses.start, uses.stop), len(uses.expert)
    else:
        (tokens, top), tiles = uses.choice.shape, uses.choice.numel()
        width, lists = NARROW if tokens <= NARROW else FEW, (uses.choice,) * 4
    shared, shared_tiles = 0, 0
    beside, strides = (x, x, out, out), (1, length, 1)
    if also is not None:
        shared, tokens = len(also.w), also.tokens
        shared_tiles = shared * triton.cdiv(tokens, width)
        beside = (also.x, also.w, also.gammas, also.out)
        strides = (also.share, also.w.stride(1), also.w.stride(0) // length)
    few_kernel[(triton.cdiv(rows, columns), shared_tiles + tiles)](
        x, *stores, *lists, out, *beside, rows, tokens,
        1.0 if caps is None else caps.gate, 1.0 if caps is None else caps.up,
        isinstance(uses, Tiles), top, triton.next_power_of_2(top), share, shared, *strides, paired, caps is not None,
        bits, length, width, columns, words, cut.dense, cut.slices, cut.stages, on,
        num_warps=cut.warps, **pdl.launch(on),
    )  # fmt: skip
    return out
