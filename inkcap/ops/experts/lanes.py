"""Products of experts for tiles of 8 or 16 uses with weights that are codes, in Gluon: words of codes go from memory to
the lanes that multiply them, so that nothing passes through shared memory and no warp waits for another.

A warp has 16 rows of weights, or several times as many, and one of Q slices of the columns, which take turns. The order
in which a word's codes are multiplied is that in which they fall out of it. CI compiles this, a device compares it.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from inkcap.ops import pdl
from inkcap.ops.act.triton import gated
from inkcap.ops.experts.coded_many import stored
from inkcap.ops.experts.codes import E4M3_PAIRS_TIMES_SCALE, PAIRS_TIMES_SCALE, scale_of, unit
from inkcap.ops.experts.few import FEW, NARROW
from inkcap.ops.experts.fragments import PIECE, able, pieces_of
from inkcap.ops.experts.group import Tiles
from inkcap.ops.quantize.coded import Coded, Weights
from inkcap.ops.values import Caps, Routed

# a scale in E4M3 to a pair of bf16, both the scale times 2^110
PAIR_OF_SCALE = gl.constexpr("""{
.reg .b32 t, c, z;
mov.b32 z, 0x80008000;
mov.b32 c, 0x79007900;
mul.lo.u32 t, $1, 0x00100010; fma.rn.bf16x2 t, t, c, z; fma.rn.bf16x2 $0, t, c, z;
}""")


@gluon.jit
def first_operand(pair, A: gl.constexpr):
    """Pairs of bf16 in words [Q, M, n] to [Q, M, 2 n]."""
    low = (pair & 0xFFFF).to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (pair >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), [pair.shape[0], pair.shape[1], 2 * pair.shape[2]]), A)


@gluon.jit
def parted(x):
    """x [Q, n, k], of whose columns a lane has a fourth: the first half of each fourth, and the second."""
    FOURTH: gl.constexpr = x.shape[2] // 4
    x = gl.reshape(x, [x.shape[0], x.shape[1], 4, 2, FOURTH // 2])
    one, two = gl.split(gl.permute(x, (0, 1, 2, 4, 3)))
    one = gl.reshape(one, [x.shape[0], x.shape[1], 2 * FOURTH])
    return one, gl.reshape(two, [x.shape[0], x.shape[1], 2 * FOURTH])


@gluon.jit
def added(acc, pair, x):
    """acc [Q, M, uses] and the product of pairs [Q, M, n] with x [Q, uses, 2 n]."""
    A: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, pair.shape[2] // 2)
    B: gl.constexpr = gl.DotOperandLayout(1, acc.type.layout, pair.shape[2] // 2)
    return mma_v2(first_operand(pair, A), gl.convert_layout(gl.permute(x, (0, 2, 1)), B), acc)


@gluon.jit
def multiplied(word, scale, x, sums, STEP: gl.constexpr, BITS: gl.constexpr):
    """Sums [Q, M, uses], one or two, and the product of a step's words [Q, M, W] with x [Q, uses, codes of W words], in
    the order of fragments.py. Of two sums, those of E4M3 codes take turns; of E2M1 codes the first has the first half
    of each lane's words."""
    Q: gl.constexpr = word.shape[0]
    M: gl.constexpr = word.shape[1]
    W: gl.constexpr = word.shape[2]
    N: gl.constexpr = x.shape[1]
    SCALED: gl.constexpr = 2 if BITS == 4 else 8  # words under one scale
    if BITS == 4:
        scale = scale.to(gl.int32)
        both = gl.inline_asm_elementwise(PAIR_OF_SCALE, "=r,r", [scale], dtype=gl.int32, is_pure=True, pack=1)
    else:
        bits = scale_of(scale, BITS).to(gl.int32, bitcast=True)  # a bf16: its low half is empty
        both = bits | ((bits >> 16) & 0xFFFF)
    both, word = gl.broadcast(gl.expand_dims(both, 3), gl.reshape(word, [Q, M, W // SCALED, SCALED]))
    if BITS == 4:
        p = gl.inline_asm_elementwise(
            PAIRS_TIMES_SCALE, "=r,=r,=r,=r,r,r", [word, both],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        even, odd = gl.split(gl.reshape(x, [Q, N, W, 2, 2, 2]))
        x0, x2 = gl.split(even)
        x1, x3 = gl.split(odd)
        pairs = (x0, x1, x2, x3)
    else:
        p = gl.inline_asm_elementwise(
            E4M3_PAIRS_TIMES_SCALE, "=r,=r,r,r", [word, both], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
        pairs = gl.split(gl.reshape(x, [Q, N, W, 2, 2]))
    for i in gl.static_range(32 // BITS // 2):
        pair, own = gl.reshape(p[i], [Q, M, W]), gl.reshape(pairs[i], [Q, N, 2 * W])
        if len(sums) == 1:
            sums = (added(sums[0], pair, own),)
        elif BITS == 4:
            one, two = parted(pair)
            one_x, two_x = parted(own)
            sums = (added(sums[0], one, one_x), added(sums[1], two, two_x))
        elif STEP % 2 == 0:
            sums = (added(sums[0], pair, own), sums[1])
        else:
            sums = (sums[0], added(sums[1], pair, own))
    return sums


@gluon.jit(do_not_specialize=["tokens"])
def lanes_kernel(
    x, words, scales, factor, choice, order, start, stop, y, rows, tokens, gate_cap, up_cap,
    LISTED: gl.constexpr, TOP: gl.constexpr, BT: gl.constexpr, SHARE: gl.constexpr,  # as in few.py
    PAIRED: gl.constexpr, CAPPED: gl.constexpr, BITS: gl.constexpr, K: gl.constexpr,
    N: gl.constexpr,  # uses of a tile
    Q: gl.constexpr,  # slices of the columns, which take turns
    NUMBER: gl.constexpr,  # sums of a slice
    M: gl.constexpr,  # rows of a program
    W: gl.constexpr,  # words of a row that are multiplied at once in one slice
    UNROLLED: gl.constexpr, USES: gl.constexpr, WORDS: gl.constexpr, X: gl.constexpr, SUMS: gl.constexpr,
    APART: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Where tiles are not listed, the first use of an expert works for all of them. Triggers after its wait, so that
    the second half may read the choice and lists, and load weights, before its own."""
    PER: gl.constexpr = 32 // BITS  # codes of a word
    SCALED: gl.constexpr = 2 if BITS == 4 else 8
    NEXT: gl.constexpr = Q * W  # words of a row from one step to the next
    STEPS: gl.constexpr = K // PER // NEXT
    if not EARLY:
        pdl.wait(PDL)
        pdl.trigger(PDL)
    tile = gl.program_id(1)
    e = gl.load(choice + tile).to(gl.int64)
    if LISTED:
        at = gl.load(start + tile, mask=e >= 0, other=0) + gl.arange(0, N, layout=gl.SliceLayout(1, USES))
        use = gl.load(order + at, mask=at < gl.load(stop + tile, mask=e >= 0, other=0), other=-1)
        idle = e < 0
    else:
        token = gl.arange(0, N, layout=gl.SliceLayout(1, USES))[:, None]
        place = gl.arange(0, BT, layout=gl.SliceLayout(0, USES))[None, :]
        number = token * TOP + place
        chosen = gl.load(choice + number, mask=(token < tokens) & (place < TOP), other=-1)
        use = gl.max(gl.where(chosen == e, number, -1), 1)  # a token uses an expert once
        idle = gl.min(gl.where(use >= 0, use, N * TOP), 0) != tile
    if not idle:
        first = gl.program_id(0) * M
        q = gl.arange(0, Q, layout=gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))[:, None, None]
        m = gl.arange(0, M, layout=gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))[None, :, None]
        k = gl.arange(0, W, layout=gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))[None, None, :]
        wp = words + (e * rows + first) * (K // PER) + (m * (K // PER) + q * W + k)
        BLOCKS: gl.constexpr = gl.SliceLayout(3, gl.reshape(wp, [Q, M, W // SCALED, SCALED]).type.layout)
        q = gl.arange(0, Q, layout=gl.SliceLayout(1, gl.SliceLayout(2, BLOCKS)))[:, None, None]
        m = gl.arange(0, M, layout=gl.SliceLayout(0, gl.SliceLayout(2, BLOCKS)))[None, :, None]
        k = gl.arange(0, W // SCALED, layout=gl.SliceLayout(0, gl.SliceLayout(1, BLOCKS)))[None, None, :]
        sp = scales + (e * rows + first) * (K // PER // SCALED)
        sp += m * (K // PER // SCALED) + q * (W // SCALED) + k
        q = gl.arange(0, Q, layout=gl.SliceLayout(1, gl.SliceLayout(2, X)))[:, None, None]
        k = gl.arange(0, W * PER, layout=gl.SliceLayout(0, gl.SliceLayout(1, X)))[None, None, :]
        n = gl.convert_layout(use, gl.SliceLayout(0, gl.SliceLayout(2, X)))[None, :, None]
        xp = x + (gl.maximum(n, 0) // SHARE).to(gl.int64) * K + (q * (W * PER) + k)
        live, _ = gl.broadcast(n >= 0, q + k == q + k)
        acc = (gl.zeros([Q, M, N], gl.float32, SUMS),)
        if NUMBER == 2:
            acc += acc
        word, scale = gl.load(wp), gl.load(sp)
        if EARLY:
            pdl.wait(PDL)
            pdl.trigger(PDL)
        if UNROLLED:
            for i in gl.static_range(STEPS):
                next_word, next_scale = word, scale
                if i + 1 < STEPS:
                    next_word, next_scale = gl.load(wp + (i + 1) * NEXT), gl.load(sp + (i + 1) * (NEXT // SCALED))
                own = gl.load(xp + i * (NEXT * PER), mask=live, other=0.0)
                acc = multiplied(word, scale, own, acc, i, BITS)
                word, scale = next_word, next_scale
        else:
            next_word, next_scale = gl.load(wp + NEXT), gl.load(sp + NEXT // SCALED)
            for i in range(0, STEPS, 2):
                one, two = gl.minimum(i + 2, STEPS - 2), gl.minimum(i + 3, STEPS - 1)
                one_word, one_scale = gl.load(wp + one * NEXT), gl.load(sp + one * (NEXT // SCALED))
                two_word, two_scale = gl.load(wp + two * NEXT), gl.load(sp + two * (NEXT // SCALED))
                own = gl.load(xp + i * (NEXT * PER), mask=live, other=0.0)
                acc = multiplied(word, scale, own, acc, 0, BITS)
                own = gl.load(xp + (i + 1) * (NEXT * PER), mask=live, other=0.0)
                acc = multiplied(next_word, next_scale, own, acc, 1, BITS)
                word, scale, next_word, next_scale = one_word, one_scale, two_word, two_scale
        total = acc[0]
        if NUMBER == 2:
            total += acc[1]
        times = unit(gl.bfloat16, BITS)
        if BITS == 4:
            times *= gl.load(factor + e)
        out = gl.sum(gl.convert_layout(gl.permute(total, (2, 0, 1)), APART), 1) * times  # [N, M]
        width = rows
        if PAIRED:
            out = gl.reshape(gated(gl.reshape(out, [N * M]), gate_cap, up_cap, CAPPED, N * M), [N, M // 2])
            first, width = first // 2, rows // 2
        column = first + gl.arange(0, out.shape[1], layout=gl.SliceLayout(0, out.type.layout))
        to_use = gl.convert_layout(use, gl.SliceLayout(1, out.type.layout))[:, None]
        to = y + to_use.to(gl.int64) * width + column[None, :]
        gl.store(to, out.to(y.dtype.element_ty), mask=(to_use >= 0) & (column < width)[None, :])


def bits(count: int, *, axis: int, step: int = 1) -> list[list[int]]:
    """Bases of a layout of three dimensions that count along one of them."""
    return [[step << i if axis == n else 0 for n in range(3)] for i in range((count - 1).bit_length())]


def layouts(slices: int, groups: int, tiles: int, words: int, per: int, uses: int) -> tuple[object, ...]:
    """Of words of codes [slices, 16 groups tiles, words], of x [slices, uses, codes of them], of the product, and of
    the product as [uses, slices, rows]: lane 4 l + i has the fourth i of the words of rows l and l + 8 of each 16 and
    of the codes of uses l and l + 8."""
    own, rows, warps = words // 4, 16 * groups * tiles, slices * groups
    across, along = bits(groups, axis=1, step=16), bits(slices, axis=0)
    lines, nothing = bits(8, axis=1), [[0, 0, 0]] * len(across)
    held = [*bits(own, axis=2), [0, 8, 0], *bits(tiles, axis=1, step=16 * groups)]
    taken = [*bits(own * per, axis=2), *bits(uses // 8, axis=1, step=8)]
    wide = min(32, rows // 2)
    apart = min(warps, uses * wide // 32)
    return (
        gl.DistributedLinearLayout(
            held, [*bits(4, axis=2, step=own), *lines], [*across, *along], [], [slices, rows, words]
        ),
        gl.DistributedLinearLayout(
            taken, [*bits(4, axis=2, step=own * per), *lines], [*nothing, *along], [], [slices, uses, words * per]
        ),
        gl.NVMMADistributedLayout([2, 0], [slices, groups, 1], [1, 16, 8]),
        gl.BlockedLayout([1, slices, 2], [32 // wide, 1, wide], [apart, 1, warps // apart], [2, 1, 0]),
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """How `lanes_kernel` cuts its work: slices of the columns, warps beside each other along the rows, times 16 rows of
    each, registers of a thread (None: as many as it takes), sums of a slice."""

    slices: int
    groups: int
    tiles: int
    registers: int | None = None
    sums: int = 1


MOST = 16  # uses of an expert, on average, up to which this is the fastest way
# by uses of a tile: first and second half; measured on an H200, see docs/kernels.md
CUTS = {NARROW: (Cut(2, 2, 2, 128), Cut(1, 4, 2, 128)), FEW: (Cut(1, 4, 2), Cut(1, 4, 2))}


def step_of(words: int) -> int:
    """Words at once of so many in a slice; 0 where these cannot be cut into whole steps."""
    return next((step for step in (16, 8) if words % step == 0), 0)


def width_of(tokens: int, uses: int, experts: int) -> int:
    """Uses of a tile, from how many there are; of few tokens an expert has no more than one use each."""
    return NARROW if tokens <= NARROW or (tokens > FEW and uses <= 5 * experts) else FEW


def fixed_cut(w: Coded, tokens: int, width: int, *, paired: bool) -> Cut:
    """That of deterministic mode, for tiles of `width` uses: the bits of a product are decided by the numbers of slices
    and sums, and by nothing else here. First halves are summed as one token's pieces in fragments.py, where it has
    four."""
    capped = tokens > 1 and (width == NARROW or w.bits == 8)
    pieces = pieces_of(w.shape[2] * w.bits // 32, PIECE[w.bits])
    return Cut(
        2 if paired else 1, 2, 1 if tokens == 1 else 2, 128 if capped else None, 2 if paired and pieces == 4 else 1
    )


def fits(x: Tensor, w: Weights, cut: Cut) -> bool:
    """Whether `grouped_lanes` takes rows x and w."""
    if not isinstance(w, Coded) or not x.dtype == w.dtype == torch.bfloat16 or not able(x.device):
        return False
    words, left = divmod(w.shape[2] * w.bits // 32, cut.slices)
    return left == w.shape[1] % (16 * cut.groups * cut.tiles) == 0 < step_of(words)


def suits(x: Tensor, w: Weights, tokens: int, uses: int, *, paired: bool) -> bool:
    """Whether it takes them, and is the fastest way for so many uses."""
    return uses <= MOST * len(w) and fits(x, w, CUTS[width_of(tokens, uses, len(w))][not paired])


def grouped_lanes(
    x: Tensor, w: Coded, uses: Tiles | Routed, share: int, out: Tensor, *, paired: bool, caps: Caps | None = None,
    early: bool = False, cut: Cut | None = None,
) -> Tensor:  # fmt: skip
    """`grouped` of many.py, for tiles of 8 or 16 uses or up to 16 tokens, where it `fits`.

    `early`: the choice, and the tiles if there are such, were made before the launch that stands before this one.
    """
    _, rows, length = w.shape
    if isinstance(uses, Tiles):
        tokens, top, width = 0, 1, uses.width
        lists, tiles = (uses.expert, uses.order, uses.start, uses.stop), len(uses.expert)
    else:
        (tokens, top), tiles = uses.choice.shape, uses.choice.numel()
        width, lists = NARROW if tokens <= NARROW else FEW, (uses.choice,) * 4
    on, cut = pdl.supported(x.device), cut or CUTS[width][not paired]
    held, warps, words = 16 * cut.groups * cut.tiles, cut.slices * cut.groups, length * w.bits // 32 // cut.slices
    step, places = step_of(words), triton.next_power_of_2(top)
    steps = words // step
    more = {} if cut.registers is None else {"maxnreg": cut.registers}
    lanes_kernel[(rows // held, tiles)](
        x, *stored(w), *lists, out, rows, tokens,
        1.0 if caps is None else caps.gate, 1.0 if caps is None else caps.up,
        isinstance(uses, Tiles), top, places, share, paired, caps is not None, w.bits, length, width, cut.slices,
        cut.sums, held, step, steps < 10 or steps % 2 > 0,
        gl.BlockedLayout([1, 1], [32 // min(32, places), min(32, places)], [warps, 1], [1, 0]),
        *layouts(cut.slices, cut.groups, cut.tiles, step, 32 // w.bits, width), early, on,
        num_warps=warps, **more, **pdl.launch(on),
    )  # fmt: skip
    return out
