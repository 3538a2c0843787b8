"""One token's routed experts in codes on tensor cores: words of codes go from memory to the lanes that multiply them.

A warp's product has 16 rows. These are pieces of fewer rows of weights side by side, so that 128 bytes of a row are
read at once (first half), or rows of two experts (second half). Each piece or expert of x has columns of the other
operand: of the product [16, 8] one column a row is wanted. The order in which a word's codes are multiplied is that in
which they fall out of it; x is put into this order in registers or on its way through shared memory. Weights are exact
in bf16: code times scale has six bits. Where a row is read in four pieces, lanes.py can sum in the same order, and in
deterministic mode it does. Written in Gluon, which is compiled, not interpreted: CI compiles it, a device compares it.
"""

import functools

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from inkcap.ops import pdl
from inkcap.ops.act.triton import gated
from inkcap.ops.experts.coded_many import stored
from inkcap.ops.experts.codes import E4M3_PAIRS_TIMES_SCALE, scale_of, unit
from inkcap.ops.gluon import everybody, seen_as
from inkcap.ops.quantize.coded import Coded
from inkcap.ops.sconv.triton import finish, older
from inkcap.ops.values import Caps, Routed

LANES = gl.constexpr(8)  # columns of the product
# as PAIRS_TIMES_SCALE of codes.py with one instruction less: the sign of the last code is where bf16 wants it
PAIRS = gl.constexpr("""{
.reg .b32 a, b, z;
mov.b32 z, 0x80008000; shr.u32 b, $4, 6;
and.b32 a, $4, 0x000F000F; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81C081C0; fma.rn.bf16x2 $0, a, $5, z;
and.b32 a, $4, 0x00F000F0; mul.lo.u32 a, a, 0x0104; and.b32 a, a, 0x81C081C0; fma.rn.bf16x2 $1, a, $5, z;
and.b32 a, b, 0x003C003C; mul.lo.u32 a, a, 0x0410; and.b32 a, a, 0x81C081C0; fma.rn.bf16x2 $2, a, $5, z;
and.b32 a, b, 0x01C001C0; lop3.b32 a, $4, z, a, 0xEA; fma.rn.bf16x2 $3, a, $5, z;
}""")
# the byte of an E4M3 scale, whose bits moved into a bf16 are 2^-120 of it, to a pair of bf16, times 2^110
SCALE_PAIR = gl.constexpr("""{
.reg .b32 a, b, c, z;
mov.b32 z, 0x80008000; mov.b32 b, 0x7B807B80; mov.b32 c, 0x76807680;
mul.lo.u32 a, $1, 0x00100010; fma.rn.bf16x2 a, a, b, z; fma.rn.bf16x2 $0, a, c, z;
}""")


@gluon.jit
def first_operand(pair, A: gl.constexpr):
    """Pairs of bf16 in words [M, n] to [M, 2 n]."""
    low = (pair & 0xFFFF).to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (pair >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), [pair.shape[0], 2 * pair.shape[1]]), A)


@gluon.jit
def second_operand(x, B: gl.constexpr):
    """[8, words, 2] to [2 words, 8]."""
    return gl.convert_layout(gl.permute(gl.reshape(x, [LANES, 2 * x.shape[1]]), (1, 0)), B)


@gluon.jit
def fetch(words, scales, step, BITS: gl.constexpr, W: gl.constexpr):
    """Words [M, W] of codes and the scales of their blocks of one step."""
    return gl.load(words + step * W), gl.load(scales + step * (W // (2 if BITS == 4 else 8))).to(gl.int32)


@gluon.jit
def multiplied(word, scale, pairs, acc, BITS: gl.constexpr, W: gl.constexpr):
    """acc [M, 8] and the product of a step with x, whose `pairs` belong to those of a word."""
    M: gl.constexpr = word.shape[0]
    SCALED: gl.constexpr = 2 if BITS == 4 else 8  # words under one scale
    A: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, W // 2)
    B: gl.constexpr = gl.DotOperandLayout(1, acc.type.layout, W // 2)
    if BITS == 4:
        both = gl.inline_asm_elementwise(
            SCALE_PAIR, "=r,r", [scale], dtype=gl.int32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        bits = scale_of(scale, BITS).to(gl.int32, bitcast=True)  # a bf16: its low half is empty
        both = bits | ((bits >> 16) & 0xFFFF)
    word = gl.reshape(word, [M, W // SCALED, SCALED])
    both, word = gl.broadcast(gl.expand_dims(both, 2), word)
    if BITS == 4:
        p = gl.inline_asm_elementwise(
            PAIRS, "=r,=r,=r,=r,r,r", [word, both],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        p = gl.inline_asm_elementwise(
            E4M3_PAIRS_TIMES_SCALE, "=r,=r,r,r", [word, both], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
    for i in gl.static_range(32 // BITS // 2):
        acc = mma_v2(first_operand(gl.reshape(p[i], [M, W]), A), second_operand(pairs[i], B), acc)
    return acc


@gluon.jit
def pairs_of(x, BITS: gl.constexpr, W: gl.constexpr):
    """x [8, codes of W words] to what is multiplied with each of the pairs of a word, [8, W, 2]."""
    if BITS == 4:
        even, odd = gl.split(gl.reshape(x, [LANES, W, 2, 2, 2]))
        x0, x2 = gl.split(even)
        x1, x3 = gl.split(odd)
        out = (x0, x1, x2, x3)
    else:
        x0, x1 = gl.split(gl.reshape(x, [LANES, W, 2, 2]))
        out = (x0, x1)
    return out


@gluon.constexpr_function
def groups(steps: int) -> int:
    """Of how many powers of two `steps` is the sum: tensors have no other sizes."""
    return steps.bit_count()


@gluon.constexpr_function
def first_of(steps: int, group: int) -> int:
    """First step of a group, larger ones first; of the one behind the last: `steps`."""
    for _ in range(steps.bit_count() - group):
        steps &= steps - 1
    return steps


@gluon.jit
def within(k, N: gl.constexpr, TURNS: gl.constexpr):
    """Where elements k of N of a piece are from its first one, if four lanes take N / 4 each and TURNS pieces take
    turns at that."""
    OWN: gl.constexpr = N // 4
    return k // OWN * (OWN * TURNS) + k % OWN


@gluon.jit
def read_steps(
    x, next_column, next_step, columns,
    STEPS: gl.constexpr, GROUP: gl.constexpr, C: gl.constexpr, N: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """A group's steps of x [steps C, N], C columns each, of which there may be fewer; a thread has all that a lane
    multiplies of a column in one step. Pieces take turns as those of the weights do."""
    FIRST: gl.constexpr = first_of(STEPS, GROUP)
    AT: gl.constexpr = gl.BlockedLayout([1, N // 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    n = gl.arange(0, (first_of(STEPS, GROUP + 1) - FIRST) * C, layout=gl.SliceLayout(1, AT))
    k = gl.arange(0, N, layout=gl.SliceLayout(0, AT))
    c = gl.minimum(n % C, columns - 1)
    at = c // TURNS * (TURNS * next_column) + c % TURNS * (N // 4) + (FIRST + n // C) * next_step
    return gl.load(x + at[:, None] + within(k, N, TURNS)[None, :])


@gluon.jit
def keep_steps(x, C: gl.constexpr, BITS: gl.constexpr):
    """What `read_steps` read, in shared memory [steps, C, N], in the order in which words are multiplied: the first
    pairs of all words of a lane, the second ones, .."""
    PER: gl.constexpr = 32 // BITS
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    AT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, C, [1, 0])
    out = gl.allocate_shared_memory(gl.bfloat16, [M // C, C, N], AT)
    x = gl.permute(gl.reshape(x, [M, 4, N // PER // 4, 2, PER // 2]), (0, 1, 4, 2, 3))
    seen_as(out, gl.bfloat16, [M, N], AT).store(gl.reshape(x, [M, N]))
    return out


@gluon.jit
def kept_pairs_of(x, BITS: gl.constexpr, W: gl.constexpr):
    """`pairs_of` of a step that `keep_steps` left, its columns repeated, side by side, to make eight."""
    C: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    if C < LANES:
        x = gl.expand_dims(x, 1)
        x, _ = gl.broadcast(x, gl.full([C, LANES // C, N], 0.0, gl.bfloat16, x.type.layout))
    x = gl.permute(gl.reshape(x, [LANES, 4, 16 // BITS, W // 2]), (0, 1, 3, 2))
    if BITS == 4:
        a, b = gl.split(gl.reshape(x, [LANES, 4, W // 2, 2, 2]))
        x0, x2 = gl.split(a)
        x1, x3 = gl.split(b)
        x0, x1 = gl.reshape(x0, [LANES, W, 2]), gl.reshape(x1, [LANES, W, 2])
        out = (x0, x1, gl.reshape(x2, [LANES, W, 2]), gl.reshape(x3, [LANES, W, 2]))
    else:
        x0, x1 = gl.split(x)
        out = (gl.reshape(x0, [LANES, W, 2]), gl.reshape(x1, [LANES, W, 2]))
    return out


@gluon.jit
def wanted(acc, column):
    """Of each row [M] of acc the element in its column."""
    at = gl.arange(0, LANES, layout=gl.SliceLayout(0, acc.type.layout))
    return gl.sum(gl.where(column[:, None] == at[None, :], acc, 0.0), 1)


@gluon.jit
def each_place(x, ROWS: gl.constexpr, OUT: gl.constexpr):
    """x [8 ROWS] as eight tensors [ROWS], a row's elements in one thread."""
    ALL: gl.constexpr = gl.BlockedLayout([1, 2, 2, 2], [32, 1, 1, 1], [gl.num_warps(), 1, 1, 1], [3, 2, 1, 0])
    x = gl.convert_layout(gl.reshape(gl.permute(gl.reshape(x, [8, ROWS]), (1, 0)), [ROWS, 2, 2, 2]), ALL)
    level = (x,)
    for _ in gl.static_range(3):  # from a place's last bit to its first
        even, odd = (), ()
        for i in gl.static_range(len(level)):
            one, two = gl.split(level[i])
            even += (one,)
            odd += (two,)
        level = even + odd
    out = ()
    for i in gl.static_range(8):
        out += (gl.convert_layout(level[i], OUT),)
    return out


@gluon.jit
def place_of(m, P: gl.constexpr, SHARE: gl.constexpr):
    """Row and piece of rows m of the product, if SHARE warps have a row together."""
    PER: gl.constexpr = 16 // P  # rows of a warp
    return m // 16 // SHARE * PER + m // P % PER, m // 16 % SHARE * P + m % P


@gluon.jit
def up_fragments(
    x, words, scales, factor, choice, act, gate_cap, up_cap,
    CAPPED: gl.constexpr, UNITS: gl.constexpr, BITS: gl.constexpr, K: gl.constexpr, W: gl.constexpr,
    P: gl.constexpr, SHARE: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr, WORDS: gl.constexpr,
    X: gl.constexpr, SUMS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Units of one expert. SHARE warps have P pieces each of their rows. Triggers after its wait, so that the second
    half may read the choice early."""
    PER: gl.constexpr = 32 // BITS  # codes of a word
    SCALED: gl.constexpr = 2 if BITS == 4 else 8
    C: gl.constexpr = P * SHARE  # pieces of a step
    SAME: gl.constexpr = LANES // C  # columns of the product with the same piece of x, side by side: fewer lines a load
    STEPS: gl.constexpr = K // PER // (W * C)
    M: gl.constexpr = 16 * WARPS
    ROWS: gl.constexpr = M // C
    KEPT: gl.constexpr = BITS == 4  # all of x in shared memory, else a step is read while the one before is multiplied
    TURNS: gl.constexpr = min(P, 2) if KEPT else 1
    pdl.wait(PDL)
    pdl.trigger(PDL)
    e = gl.load(choice + gl.program_id(1))
    if KEPT:
        steps = ()
        for g in gl.static_range(groups(STEPS)):
            steps += (read_steps(x, W * PER, C * W * PER, C, STEPS, g, C, W * PER, TURNS),)
        ONE: gl.constexpr = gl.reshape(gl.full([LANES, W * PER], 0, gl.int32, X), [C, SAME, W * PER]).type.layout
        AT: gl.constexpr = gl.SliceLayout(1, ONE) if C < LANES else X
    else:
        n = gl.arange(0, LANES, layout=gl.SliceLayout(1, X))
        k = gl.arange(0, W * PER, layout=gl.SliceLayout(0, X))
        xp = x + (n // SAME * (W * PER))[:, None] + k[None, :]
        part = gl.load(xp)
    m = gl.arange(0, M, layout=gl.SliceLayout(1, WORDS))
    at = gl.arange(0, W, layout=gl.SliceLayout(0, WORDS))
    own, piece = place_of(m, P, SHARE)
    first = piece // TURNS * (W * TURNS) + piece % TURNS * (W // 4)
    wp = words + ((own * (K // PER) + first)[:, None] + within(at, W, TURNS)[None, :])
    BLOCKS: gl.constexpr = gl.SliceLayout(2, gl.reshape(wp, [M, W // SCALED, SCALED]).type.layout)
    m = gl.arange(0, M, layout=gl.SliceLayout(1, BLOCKS))
    at = gl.arange(0, W // SCALED, layout=gl.SliceLayout(0, BLOCKS))
    own, piece = place_of(m, P, SHARE)
    first = piece // TURNS * (W // SCALED * TURNS) + piece % TURNS
    sp = scales + ((own * (K // PER // SCALED) + first)[:, None] + at[None, :] * TURNS)
    # all that depends on the choice: little stands between it and the first words
    row = (e.to(gl.int32) * (2 * UNITS) + gl.program_id(0) * ROWS).to(gl.int64)
    wp += row * (K // PER)
    sp += row * (K // PER // SCALED)
    held = ()
    for i in gl.static_range(AHEAD):
        held += (fetch(wp, sp, i * C, BITS, W),)
    times = unit(gl.bfloat16, BITS)
    if BITS == 4:
        times *= gl.load(factor + e)
    pdl.wait(PDL)  # for nothing: loads stay before it
    if KEPT:
        kept = ()
        for g in gl.static_range(groups(STEPS)):
            kept += (keep_steps(steps[g], C, BITS),)
        everybody()
    acc = gl.zeros([M, LANES], gl.float32, SUMS)
    for g in gl.static_range(groups(STEPS)):
        for i in gl.static_range(first_of(STEPS, g), first_of(STEPS, g + 1)):
            if i + AHEAD < STEPS:
                held += (fetch(wp, sp, (i + AHEAD) * C, BITS, W),)
            if KEPT:
                pairs = kept_pairs_of(kept[g].index(i - first_of(STEPS, g)).load(AT), BITS, W)
            else:
                pairs = pairs_of(part, BITS, W)
                if i + 1 < STEPS:
                    part = gl.load(xp + (i + 1) * (W * PER * C))
            acc = multiplied(held[i][0], held[i][1], pairs, acc, BITS, W)
    _, piece = place_of(gl.arange(0, M, layout=gl.SliceLayout(1, SUMS)), P, SHARE)
    out = wanted(acc, piece * SAME)
    if P == 4:  # one sum of two after the other: an order that others can have too
        out = gl.reshape(out, [WARPS // SHARE, SHARE, 16 // P, 2, 2])
        out = gl.sum(gl.sum(out, 4 if BITS == 4 else 3), 3)
    else:
        out = gl.sum(gl.reshape(out, [WARPS // SHARE, SHARE, 16 // P, P]), 3)
    # over the warps that share a row, and gate and up of a unit to one thread
    sums = gl.allocate_shared_memory(gl.float32, [SHARE, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    sums.store(gl.reshape(gl.permute(out, (1, 0, 2)), [SHARE, ROWS]))
    everybody()
    out = gl.sum(sums.load(gl.BlockedLayout([SHARE, 2], [1, 32], [1, WARPS], [1, 0])), 0)
    out = gated(out * times, gate_cap, up_cap, CAPPED, ROWS)
    to = gl.program_id(1) * UNITS + gl.program_id(0) * (ROWS // 2) + gl.arange(0, ROWS // 2, layout=out.type.layout)
    gl.store(act + to, out.to(act.dtype.element_ty))


@gluon.jit
def down_fragments(
    act, words, scales, factor, choice, weights, residual, y,
    taps, plane, table, slots, row_of, positions,
    conv_scale, rows, block_stride, token_stride, table_stride, tap_channel, tap_distance,
    CONVOLVED: gl.constexpr, RESIDUAL: gl.constexpr, TAPS: gl.constexpr, HELD: gl.constexpr,
    ROUNDED: gl.constexpr, TOP: gl.constexpr, BITS: gl.constexpr, K: gl.constexpr, W: gl.constexpr,
    ROWS: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr, WORDS: gl.constexpr, X: gl.constexpr,
    SUMS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """ROWS rows of all experts of the token, 16 // ROWS experts to a warp; everything else as in `down_row_joined`.
    Words are on their way before the chain of table and state is followed."""
    PER: gl.constexpr = 32 // BITS
    SCALED: gl.constexpr = 2 if BITS == 4 else 8
    STEPS: gl.constexpr = K // PER // W
    pdl.trigger(PDL)
    first = gl.program_id(0) * ROWS
    place = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, SUMS)) // ROWS
    OUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    c = first + gl.arange(0, ROWS, layout=OUT)
    mask = c < rows
    if CONVOLVED:
        zero = gl.arange(0, 1, layout=OUT)
        row, position, slot = gl.load(row_of + zero), gl.load(positions + zero), gl.load(slots + zero)
    chosen = gl.load(choice + place, mask=place < TOP, other=0)
    times = gl.full([16 * WARPS], unit(gl.bfloat16, BITS), gl.float32, gl.SliceLayout(1, SUMS))
    shares = ()
    for k in gl.static_range(TOP):
        shares += (gl.load(weights + k),)
    m = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, WORDS))
    at = gl.arange(0, W, layout=gl.SliceLayout(0, WORDS))
    e = gl.load(choice + gl.minimum(m // ROWS, TOP - 1)).to(gl.int32)
    wp = words + ((e * rows + first + m % ROWS).to(gl.int64) * (K // PER))[:, None] + at[None, :]
    BLOCKS: gl.constexpr = gl.SliceLayout(2, gl.reshape(wp, [16 * WARPS, W // SCALED, SCALED]).type.layout)
    m = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, BLOCKS))
    at = gl.arange(0, W // SCALED, layout=gl.SliceLayout(0, BLOCKS))
    e = gl.load(choice + gl.minimum(m // ROWS, TOP - 1)).to(gl.int32)
    sp = scales + ((e * rows + first + m % ROWS).to(gl.int64) * (K // PER // SCALED))[:, None] + at[None, :]
    held = ()
    for i in gl.static_range(AHEAD):
        held += (fetch(wp, sp, i, BITS, W),)
    if BITS == 4:
        times *= gl.load(factor + chosen)
    pdl.trigger(PDL)  # for nothing: loads stay before it
    if CONVOLVED:
        past = gl.zeros([ROWS], gl.float32, OUT)
        for i in gl.static_range(TAPS - 1):
            old = older(
                plane, table, row, position - (TAPS - 1 - i), c, mask, block_stride, token_stride, table_stride, HELD
            )
            past += old.to(gl.float32) * gl.load(taps + c * tap_channel + i * tap_distance)
        own_tap = gl.load(taps + c * tap_channel + (TAPS - 1) * tap_distance)
    pdl.wait(PDL)
    steps, kept = (), ()
    for g in gl.static_range(groups(STEPS)):
        steps += (read_steps(act, K, W * PER, TOP, STEPS, g, LANES, W * PER, 1),)
    if RESIDUAL:
        base = gl.load(residual + c).to(gl.float32)
    for g in gl.static_range(groups(STEPS)):
        kept += (keep_steps(steps[g], LANES, BITS),)
    everybody()
    acc = gl.zeros([16 * WARPS, LANES], gl.float32, SUMS)
    for g in gl.static_range(groups(STEPS)):
        for i in gl.static_range(first_of(STEPS, g), first_of(STEPS, g + 1)):
            if i + AHEAD < STEPS:
                held += (fetch(wp, sp, i + AHEAD, BITS, W),)
            pairs = kept_pairs_of(kept[g].index(i - first_of(STEPS, g)).load(X), BITS, W)
            acc = multiplied(held[i][0], held[i][1], pairs, acc, BITS, W)
    products = each_place(wanted(acc, place) * times, ROWS, OUT)
    total = gl.zeros([ROWS], gl.float32, OUT)
    for k in gl.static_range(TOP):
        product = products[k]
        if ROUNDED:
            product = product.to(act.dtype.element_ty).to(gl.float32)
        total += product * shares[k]
    out = total.to(act.dtype.element_ty)
    if CONVOLVED:
        out = finish(out, past, own_tap, conv_scale, plane, slot, c, mask, block_stride, token_stride, HELD)
    out = out.to(gl.float32)
    if RESIDUAL:
        out += base
    gl.store(y + c, out.to(y.dtype.element_ty))


def layouts(warps: int, words: int, per: int) -> tuple[gl.DistributedLinearLayout, ...]:
    """Of words of codes [16 warps, words], of x [8, codes of them] and of the product [16 warps, 8]: lane 4 l + i has
    the fourth i of the words of rows l and l + 8 and of the codes of column l of x."""
    own, lanes = words // 4, [[1, 0], [2, 0], [4, 0]]
    warp = [[16 << i, 0] for i in range((warps - 1).bit_length())]

    def bits(count: int) -> list[list[int]]:
        return [[0, 1 << i] for i in range((count - 1).bit_length())]

    return (
        gl.DistributedLinearLayout(
            [*bits(own), [8, 0]], [[0, own], [0, 2 * own], *lanes], warp, [], [16 * warps, words]
        ),
        gl.DistributedLinearLayout(
            bits(own * per), [[0, own * per], [0, 2 * own * per], *lanes], [[0, 0] for _ in warp], [], [8, words * per]
        ),
        gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8]),
    )


# measured on an H200, see docs/kernels.md. First halves, by bits of a code: words of a piece; steps whose loads are on
# their way before the first product, registers of a thread. Second halves, by words of a step: such steps, registers,
# so few for short rows that all programs of 4,608 rows are on the card at once
WARPS = 4
PIECE = {4: 8, 8: 16}
UP = {4: (6, 96), 8: (3, 128)}
DOWN = {16: (9, 168), 8: (9, 96)}
FEW = 9  # steps of a row of MXFP8 above which two warps share it


def pieces_of(words: int, piece: int) -> int:
    """Pieces of so many words that a row is read in at once; 0 where it cannot be cut into whole steps."""
    return next((number for number in (4, 2, 1) if words % (number * piece) == 0), 0)


def share_of(words: int, bits: int) -> int:
    """Warps that have a row of the first half together."""
    pieces = pieces_of(words, PIECE[bits])
    steps = words // (pieces * PIECE[bits])
    return 2 if bits == 8 and steps > FEW and steps % 2 == 0 else 1


def rows_of(words: int, bits: int) -> int:
    """Rows of a program of the first half."""
    return 16 * WARPS // (pieces_of(words, PIECE[bits]) * share_of(words, bits))


def step_of(words: int) -> int:
    """Words of a step in rows of second halves; 0 where these cannot be cut into whole ones."""
    return next((step for step in DOWN if words % step == 0), 0)


@functools.cache
def able(device: torch.device) -> bool:
    """Whether `device` has the products."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def suits(x: Tensor, w: Coded, top_k: int) -> bool:
    """Whether fragments are made for one token x [1, ..] with so many experts, and w."""
    _, rows, length = w.shape
    words = length * w.bits // 32
    whole = min(pieces_of(words, PIECE[w.bits]), step_of(words)) > 0 and rows % rows_of(words, w.bits) == 0
    return whole and able(x.device) and x.dtype == w.dtype == torch.bfloat16 and top_k <= LANES.value


def up(x: Tensor, w: Coded, route: Routed, caps: Caps | None, out: Tensor, *, fixed: bool = False) -> Tensor:
    """First half: x [1, C], normed; w [E, 2 I, C]. Activations go into out [1, K, I], which is returned.

    `fixed`: no two warps share a row, so that sums are those of `lanes.py`.
    """
    _, rows, length = w.shape
    on, words, step = pdl.supported(x.device), length * w.bits // 32, PIECE[w.bits]
    pieces, share, (ahead, registers) = pieces_of(words, step), 1 if fixed else share_of(words, w.bits), UP[w.bits]
    ahead = min(ahead, words // (pieces * step * share))
    up_fragments[(rows * pieces * share // (16 * WARPS), route.choice.numel())](
        x, *stored(w), route.choice, out, 1.0 if caps is None else caps.gate, 1.0 if caps is None else caps.up,
        caps is not None, rows // 2, w.bits, length, step, pieces, share, WARPS, ahead,
        *layouts(WARPS, step, 32 // w.bits), on,
        num_warps=WARPS, maxnreg=registers, **pdl.launch(on),
    )  # fmt: skip
    return out


def down(
    act: Tensor,
    w: Coded,
    route: Routed,
    residual: Tensor | None,
    where: tuple[Tensor, ...],
    strides: tuple[int, ...],
    window: tuple[int, int],
    conv_scale: float,
    out: Tensor,
    *,
    convolved: bool,
    fixed: bool = False,
) -> Tensor:
    """Second half: act [1, K, I]; w [E, C, I]. The sum goes into out [1, C], which is returned; with `convolved` behind
    the convolution, whose taps and state `where`, `strides` and `window` are, and the addition.

    `fixed`: products are rounded before they are summed, as those of several tokens are.
    """
    _, rows, length = w.shape
    on, words = pdl.supported(act.device), length * w.bits // 32
    step = step_of(words)
    ahead, registers = DOWN[step]
    down_fragments[(triton.cdiv(rows, 8),)](
        act, *stored(w), route.choice, route.weights, act if residual is None else residual, out, *where, conv_scale,
        rows, *strides, convolved, residual is not None, *window, fixed, route.choice.numel(), w.bits, length, step,
        8, WARPS, min(ahead, words // step), *layouts(WARPS, step, 32 // w.bits), on,
        num_warps=WARPS, maxnreg=registers, **pdl.launch(on),
    )  # fmt: skip
    return out
