"""One token's routed experts in codes on tensor cores: words of codes go from memory to the lanes that multiply them.

A warp's product has 16 rows. These are pieces of fewer rows of weights side by side, so that 128 bytes of a row are
read at once (first half), or rows of two experts (second half). Piece or expert i of x is column i of the other
operand: of the product [16, 8] one column is wanted. The order in which a word's codes are multiplied is that in which
they fall out of it. Weights are exact in bf16: code times scale has six bits. Written in Gluon, which is compiled, not
interpreted: CI compiles it, a device compares it.
"""

import functools

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from inkcap.ops import pdl
from inkcap.ops.act.triton import gated
from inkcap.ops.experts.coded_many import stored
from inkcap.ops.experts.codes import E4M3_PAIRS_TIMES_SCALE, PAIRS_TIMES_SCALE, scale_of, unit
from inkcap.ops.experts.ring import copy_rows, everybody
from inkcap.ops.quantize.coded import Coded
from inkcap.ops.sconv.triton import finish, older
from inkcap.ops.values import Caps, Routed

LANES = gl.constexpr(8)  # columns of the product
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
    return gl.load(words + step * W), gl.load(scales + step * (W // (2 if BITS == 4 else 8)))


@gluon.jit
def multiplied(word, scale, x, acc, BITS: gl.constexpr, W: gl.constexpr):
    """acc [M, 8] and the product of a step with x [8, codes of W words]."""
    M: gl.constexpr = word.shape[0]
    SCALED: gl.constexpr = 2 if BITS == 4 else 8  # words under one scale
    A: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, W // 2)
    B: gl.constexpr = gl.DotOperandLayout(1, acc.type.layout, W // 2)
    if BITS == 4:
        both = gl.inline_asm_elementwise(
            SCALE_PAIR, "=r,r", [scale.to(gl.int32)], dtype=gl.int32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        bits = scale_of(scale, BITS).to(gl.int32, bitcast=True)  # a bf16: its low half is empty
        both = bits | ((bits >> 16) & 0xFFFF)
    word = gl.reshape(word, [M, W // SCALED, SCALED])
    both, word = gl.broadcast(gl.expand_dims(both, 2), word)
    if BITS == 4:
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            PAIRS_TIMES_SCALE, "=r,=r,=r,=r,r,r", [word, both],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        even, odd = gl.split(gl.reshape(x, [LANES, W, 2, 2, 2]))
        x0, x2 = gl.split(even)
        x1, x3 = gl.split(odd)
        acc = mma_v2(first_operand(gl.reshape(p2, [M, W]), A), second_operand(x2, B), acc)
        acc = mma_v2(first_operand(gl.reshape(p3, [M, W]), A), second_operand(x3, B), acc)
    else:
        p0, p1 = gl.inline_asm_elementwise(
            E4M3_PAIRS_TIMES_SCALE, "=r,=r,r,r", [word, both], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
        x0, x1 = gl.split(gl.reshape(x, [LANES, W, 2, 2]))
    acc = mma_v2(first_operand(gl.reshape(p0, [M, W]), A), second_operand(x0, B), acc)
    return mma_v2(first_operand(gl.reshape(p1, [M, W]), A), second_operand(x1, B), acc)


@gluon.jit
def wanted(acc, column):
    """Of each row [M] of acc the element in its column."""
    at = gl.arange(0, LANES, layout=gl.SliceLayout(0, acc.type.layout))
    return gl.sum(gl.where(column[:, None] == at[None, :], acc, 0.0), 1)


@gluon.jit
def up_fragments(
    x, words, scales, factor, choice, act, gate_cap, up_cap,
    CAPPED: gl.constexpr, UNITS: gl.constexpr, BITS: gl.constexpr, K: gl.constexpr, W: gl.constexpr,
    P: gl.constexpr, AHEAD: gl.constexpr, WORDS: gl.constexpr, X: gl.constexpr, SUMS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Eight units of one expert, in P pieces of each row. Triggers after its wait, so that the second half may read the
    choice early."""
    PER: gl.constexpr = 32 // BITS  # codes of a word
    SCALED: gl.constexpr = 2 if BITS == 4 else 8
    STEPS: gl.constexpr = K // PER // (W * P)
    pdl.wait(PDL)
    pdl.trigger(PDL)
    e = gl.load(choice + gl.program_id(1)).to(gl.int64)
    row = e * (2 * UNITS) + gl.program_id(0) * 16
    m = gl.arange(0, 16 * P, layout=gl.SliceLayout(1, WORDS))
    at = gl.arange(0, W, layout=gl.SliceLayout(0, WORDS))
    wp = words + row * (K // PER) + (m // P * (K // PER) + m % P * W)[:, None] + at[None, :]
    BLOCKS: gl.constexpr = gl.SliceLayout(2, gl.reshape(wp, [16 * P, W // SCALED, SCALED]).type.layout)
    m = gl.arange(0, 16 * P, layout=gl.SliceLayout(1, BLOCKS))
    at = gl.arange(0, W // SCALED, layout=gl.SliceLayout(0, BLOCKS))
    sp = scales + row * (K // PER // SCALED)
    sp += (m // P * (K // PER // SCALED) + m % P * (W // SCALED))[:, None] + at[None, :]
    n = gl.arange(0, LANES, layout=gl.SliceLayout(1, X))
    k = gl.arange(0, W * PER, layout=gl.SliceLayout(0, X))
    xp = x + (n % P * (W * PER))[:, None] + k[None, :]
    acc = gl.zeros([16 * P, LANES], gl.float32, SUMS)
    held = ()
    for i in gl.static_range(AHEAD):
        held += (fetch(wp, sp, i * P, BITS, W),)
    pdl.wait(PDL)  # for nothing: loads stay before it
    for i in gl.static_range(STEPS):
        if i + AHEAD < STEPS:
            held += (fetch(wp, sp, (i + AHEAD) * P, BITS, W),)
        part = gl.load(xp + i * (W * PER * P))
        acc = multiplied(held[i][0], held[i][1], part, acc, BITS, W)
    piece = gl.arange(0, 16 * P, layout=gl.SliceLayout(1, SUMS)) % P
    out = gl.sum(gl.reshape(wanted(acc, piece), [16, P]), 1) * unit(gl.bfloat16, BITS)
    if BITS == 4:
        out *= gl.load(factor + e)
    out = gl.convert_layout(out, gl.BlockedLayout([2], [32], [P], [0]))
    out = gated(out, gate_cap, up_cap, CAPPED, 16)
    to = gl.program_id(1) * UNITS + gl.program_id(0) * 8 + gl.arange(0, 8, layout=out.type.layout)
    gl.store(act + to, out.to(act.dtype.element_ty))


@gluon.jit
def down_fragments(
    act, words, scales, factor, choice, weights, residual, y,
    taps, plane, table, slots, row_of, positions,
    conv_scale, rows, block_stride, token_stride, table_stride, tap_channel, tap_distance,
    CONVOLVED: gl.constexpr, RESIDUAL: gl.constexpr, TAPS: gl.constexpr, HELD: gl.constexpr,
    TOP: gl.constexpr, BITS: gl.constexpr, K: gl.constexpr, W: gl.constexpr,
    ROWS: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr, WORDS: gl.constexpr, X: gl.constexpr,
    SUMS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """ROWS rows of all experts of the token, 16 // ROWS experts to a warp; everything else as in `down_row_joined`."""
    PER: gl.constexpr = 32 // BITS
    SCALED: gl.constexpr = 2 if BITS == 4 else 8
    STEPS: gl.constexpr = K // PER // W
    PLACES: gl.constexpr = 16 * WARPS // ROWS
    pdl.trigger(PDL)
    first = gl.program_id(0) * ROWS
    m = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, WORDS))
    at = gl.arange(0, W, layout=gl.SliceLayout(0, WORDS))
    e = gl.load(choice + gl.minimum(m // ROWS, TOP - 1)).to(gl.int64)
    wp = words + ((e * rows + first + m % ROWS) * (K // PER))[:, None] + at[None, :]
    BLOCKS: gl.constexpr = gl.SliceLayout(2, gl.reshape(wp, [16 * WARPS, W // SCALED, SCALED]).type.layout)
    m = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, BLOCKS))
    at = gl.arange(0, W // SCALED, layout=gl.SliceLayout(0, BLOCKS))
    e = gl.load(choice + gl.minimum(m // ROWS, TOP - 1)).to(gl.int64)
    sp = scales + ((e * rows + first + m % ROWS) * (K // PER // SCALED))[:, None] + at[None, :]
    held = ()
    for i in gl.static_range(AHEAD):
        held += (fetch(wp, sp, i, BITS, W),)
    m = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, SUMS))
    place = m // ROWS
    times = gl.full([16 * WARPS], unit(gl.bfloat16, BITS), gl.float32, place.type.layout)
    if BITS == 4:
        times *= gl.load(factor + gl.load(choice + place, mask=place < TOP, other=0))
    OUT: gl.constexpr = gl.SliceLayout(0, gl.reshape(place, [PLACES, ROWS]).type.layout)
    c = first + gl.arange(0, ROWS, layout=OUT)
    mask = c < rows
    if CONVOLVED:
        zero = gl.arange(0, 1, layout=OUT)
        row, position, slot = gl.load(row_of + zero), gl.load(positions + zero), gl.load(slots + zero)
        past = gl.zeros([ROWS], gl.float32, OUT)
        for i in gl.static_range(TAPS - 1):
            old = older(
                plane, table, row, position - (TAPS - 1 - i), c, mask, block_stride, token_stride, table_stride, HELD
            )
            past += old.to(gl.float32) * gl.load(taps + c * tap_channel + i * tap_distance)
        own_tap = gl.load(taps + c * tap_channel + (TAPS - 1) * tap_distance)
    STAGED: gl.constexpr = STEPS <= FEW  # all of x by shared memory; many small copies cost more than they save
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // (W * PER), W * PER // 8], [WARPS, 1], [1, 0])
    AT: gl.constexpr = WIDE if STAGED else X
    n = gl.arange(0, LANES, layout=gl.SliceLayout(1, AT))
    k = gl.arange(0, W * PER, layout=gl.SliceLayout(0, AT))
    pdl.wait(PDL)
    xp = act + (gl.minimum(n, TOP - 1) * K)[:, None] + k[None, :]
    if STAGED:
        rows_of_x = gl.allocate_shared_memory(
            gl.bfloat16, [STEPS, LANES, W * PER], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        )  # fmt: skip
        for i in gl.static_range(STEPS):
            copy_rows(rows_of_x.index(i), xp + i * (W * PER))
        async_copy.commit_group()
    times *= gl.load(weights + place, mask=place < TOP, other=0.0)
    acc = gl.zeros([16 * WARPS, LANES], gl.float32, SUMS)
    if STAGED:
        async_copy.wait_group(0)
        everybody()
    for i in gl.static_range(STEPS):
        if i + AHEAD < STEPS:
            held += (fetch(wp, sp, i + AHEAD, BITS, W),)
        if STAGED:
            part = rows_of_x.index(i).load(X)
        else:
            part = gl.load(xp + i * (W * PER))
        acc = multiplied(held[i][0], held[i][1], part, acc, BITS, W)
    out = gl.sum(gl.reshape(wanted(acc, place) * times, [PLACES, ROWS]), 0).to(act.dtype.element_ty)
    if CONVOLVED:
        out = finish(out, past, own_tap, conv_scale, plane, slot, c, mask, block_stride, token_stride, HELD)
    out = out.to(gl.float32)
    if RESIDUAL:
        out += gl.load(residual + c).to(gl.float32)
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


# measured on an H200, see docs/kernels.md. First halves, by bits of a code: words of a piece; and by whether there are
# more than FEW steps: steps whose loads are on their way before the first product, registers of a thread. Second
# halves, by words of a step: such steps, registers
FEW = gl.constexpr(9)  # steps
PIECE = {4: 8, 8: 16}
UP = {(4, False): (3, 80), (4, True): (4, 96), (8, False): (5, 255), (8, True): (5, 255)}
DOWN = {16: (9, 168), 8: (9, 128)}


def pieces_of(words: int, piece: int) -> int:
    """Pieces of so many words that a row is read in at once; 0 where it cannot be cut into whole steps."""
    return next((number for number in (4, 2, 1) if words % (number * piece) == 0), 0)


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
    whole = rows % 16 == 0 and min(pieces_of(words, PIECE[w.bits]), step_of(words)) > 0
    return whole and able(x.device) and x.dtype == w.dtype == torch.bfloat16 and top_k <= LANES.value


def up(x: Tensor, w: Coded, route: Routed, caps: Caps | None, out: Tensor) -> Tensor:
    """First half: x [1, C], normed; w [E, 2 I, C]. Activations go into out [1, K, I], which is returned."""
    _, rows, length = w.shape
    on, words, step = pdl.supported(x.device), length * w.bits // 32, PIECE[w.bits]
    pieces = pieces_of(words, step)
    steps = words // (pieces * step)
    ahead, registers = UP[w.bits, steps > FEW.value]
    up_fragments[(triton.cdiv(rows, 16), route.choice.numel())](
        x, *stored(w), route.choice, out, 1.0 if caps is None else caps.gate, 1.0 if caps is None else caps.up,
        caps is not None, rows // 2, w.bits, length, step, pieces, min(ahead, steps),
        *layouts(pieces, step, 32 // w.bits), on,
        num_warps=pieces, maxnreg=registers, **pdl.launch(on),
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
) -> Tensor:
    """Second half: act [1, K, I]; w [E, C, I]. The sum goes into out [1, C], which is returned; with `convolved` behind
    the convolution, whose taps and state `where`, `strides` and `window` are, and the addition."""
    _, rows, length = w.shape
    on, words = pdl.supported(act.device), length * w.bits // 32
    step = step_of(words)
    ahead, registers = DOWN[step]
    down_fragments[(triton.cdiv(rows, 8),)](
        act, *stored(w), route.choice, route.weights, act if residual is None else residual, out, *where, conv_scale,
        rows, *strides, convolved, residual is not None, *window, route.choice.numel(), w.bits, length, step,
        8, 4, min(ahead, words // step), *layouts(4, step, 32 // w.bits), on,
        num_warps=4, maxnreg=registers, **pdl.launch(on),
    )  # fmt: skip
    return out
