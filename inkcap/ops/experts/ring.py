"""How rows and weights come to the multiplying warps of wide.py: through a ring of shared memory, whose stages hold 64
columns of a tile's rows and of as many weights as a block has columns. Codes are decoded on the way.

An item is a tile of uses and a block of columns. Gluon is compiled, not interpreted: CI compiles this, a device
compares it.
"""

import triton
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from inkcap.ops.gluon import copy_rows, copy_tile, everybody, seen_as

GROUP = gl.constexpr(64)  # uses that are fetched and multiplied, or not, together: rows of the tensor cores' product
DEPTH = gl.constexpr(64)  # of a stage: 128 bytes of a row, the widest swizzle of shared memory

# eight E2M1 codes of a word times a pair of scales, to eight bf16 in order; as in codes.py but for the order
WORD_TIMES_SCALE = gl.constexpr("""{
.reg .b32 a, b, c, d, e, z;
mov.b32 z, 0x80008000;
shl.b32 a, $4, 6; and.b32 a, a, 0x01C001C0; shl.b32 e, $4, 12; lop3.b32 a, a, e, z, 0xF8; fma.rn.bf16x2 a, a, $5, z;
shl.b32 b, $4, 2; and.b32 b, b, 0x01C001C0; shl.b32 e, $4, 8; lop3.b32 b, b, e, z, 0xF8; fma.rn.bf16x2 b, b, $5, z;
shr.u32 c, $4, 2; and.b32 c, c, 0x01C001C0; shl.b32 e, $4, 4; lop3.b32 c, c, e, z, 0xF8; fma.rn.bf16x2 c, c, $5, z;
shr.u32 d, $4, 6; and.b32 d, d, 0x01C001C0; lop3.b32 d, d, $4, z, 0xF8; fma.rn.bf16x2 d, d, $5, z;
prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, c, d, 0x5410; prmt.b32 $2, a, b, 0x7632; prmt.b32 $3, c, d, 0x7632;
}""")
# four E4M3 codes of a word, made whole by 2^120, times a pair of scales, to four bf16 in order
BYTES_TIMES_SCALE = gl.constexpr("""{
.reg .b32 a, b, c, e, z;
mov.b32 z, 0x80008000;
mov.b32 c, 0x7B807B80;
shl.b32 a, $2, 4; and.b32 a, a, 0x07F007F0; shl.b32 e, $2, 8; lop3.b32 a, a, e, z, 0xF8;
fma.rn.bf16x2 a, a, c, z; fma.rn.bf16x2 a, a, $3, z;
shr.u32 b, $2, 4; and.b32 b, b, 0x07F007F0; lop3.b32 b, b, $2, z, 0xF8;
fma.rn.bf16x2 b, b, c, z; fma.rn.bf16x2 b, b, $3, z;
prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632;
}""")


@gluon.jit
def scale_pair(byte):
    """E4M3 scales in the low bytes of words to pairs of bf16, each times 2^110."""
    scale = ((byte & 0xFF) << 20).to(gl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    bits = (scale * 1.298074214633707e33).to(gl.int32, bitcast=True)  # a bf16: its low half is empty
    return bits | ((bits >> 16) & 0xFFFF)


@gluon.jit
def power_pair(byte):
    """UE8M0 scales in the low bytes of words to pairs of bf16."""
    byte = byte & 0xFF
    bits = gl.where(byte == 0, 0x40, gl.where(byte == 255, 0x7FC0, byte << 7))
    return bits | (bits << 16)


@gluon.jit
def decode(words, scales, stage, BITS: gl.constexpr):
    """Words of codes [R, 64 * BITS / 32] into a stage [R, 64] in bf16. BITS 4: pairs of scales [R, 2], and the weights
    come times 2^-16; 8: scales [R, 2]."""
    R: gl.constexpr = words.shape[0]
    scales = scales.to(gl.int32)
    if BITS == 4:
        words = gl.reshape(words, [R, 2, 2, 2])
        pairs = gl.join(scale_pair(scales), scale_pair(scales >> 8))
        pairs = gl.expand_dims(gl.convert_layout(pairs, gl.SliceLayout(3, words.type.layout)), 3)
        pairs, words = gl.broadcast(pairs, words)
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            WORD_TIMES_SCALE, "=&r,=&r,=&r,=&r,r,r", [words, pairs],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        made = gl.join(gl.join(p0, p2), gl.join(p1, p3))
    else:
        words = gl.reshape(words, [R, 2, 8])
        pairs, words = gl.broadcast(gl.expand_dims(power_pair(scales), 2), words)
        p0, p1 = gl.inline_asm_elementwise(
            BYTES_TIMES_SCALE, "=&r,=&r,r,r", [words, pairs], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        made = gl.join(p0, p1)
    made = gl.reshape(made, [R, 32])
    SAME: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    seen_as(stage, gl.int32, [R, 32], SAME).store(made)


@gluon.jit
def column_of(n, PAIRED: gl.constexpr):
    """Of which column row n of a stage has the weights: so that `in_order` gives a thread eight results in a row."""
    if PAIRED:
        out = (n & -63) | ((n >> 2) & 14) | ((n & 6) << 3)
    else:
        out = (n & -31) | ((n >> 2) & 6) | ((n & 6) << 2)
    return out


@triton.constexpr_function
def written(rows, columns):
    """How 128 threads hold what they write: eight columns each, four of them 32 of one row."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *([0, 1 << i] for i in range(5, columns.bit_length() - 1))]
    registers += [[1 << i, 0] for i in range(6, rows.bit_length() - 1)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, columns])


@gluon.jit
def in_order(results, PAIRED: gl.constexpr):
    """Results [M, N], of columns or PAIRED of pairs of columns, which stand as `column_of` says, in order."""
    M: gl.constexpr = results.shape[0]
    N: gl.constexpr = results.shape[1]
    if PAIRED:
        out = gl.permute(gl.reshape(results, [M, N // 32, 8, 4]), (0, 1, 3, 2))
    else:
        out = gl.permute(gl.reshape(results, [M, N // 32, 4, 4, 2]), (0, 1, 3, 2, 4))
    return gl.convert_layout(gl.reshape(out, [M, N]), written(M, N))  # moves nothing: another order of registers


@gluon.jit
def folded(stage, PAIRED: gl.constexpr):
    """A stage [N, 64] as a descriptor's tile of five dimensions, which has the columns as `column_of` says."""
    GROUPS: gl.constexpr = 8 if PAIRED else 4
    TILE: gl.constexpr = [stage.shape[0] // (GROUPS * 8), GROUPS, 4, 2, stage.shape[1]]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 5)
    return seen_as(stage, gl.bfloat16, TILE, LAYOUT)


@gluon.jit
def item_of(expert, start, stop, item, items, BLOCKS: gl.constexpr):
    """Expert, first and end of the uses, block of columns of an item, or of the last one."""
    item = gl.minimum(item, items - 1)
    tile = item // BLOCKS
    return gl.load(expert + tile).to(gl.int64), gl.load(start + tile), gl.load(stop + tile), item % BLOCKS


@gluon.jit
def row_of(order, at, end, SHARE: gl.constexpr):
    """Rows of x of the uses at these places; beyond the end that of the last use."""
    return gl.load(order + gl.minimum(at, end - 1)) // SHARE


@gluon.jit
def gather(
    tiles, ring, x, w, w_side,
    SHARE: gl.constexpr, DENSE: gl.constexpr, PAIRED: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, SIDE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Begin to bring rows, and DENSE weights; barriers tell when they have come."""
    order, expert, start, stop, items = tiles
    rows, weights, side, full, empty = ring
    HALF: gl.constexpr = BM // 2
    FOLD: gl.constexpr = 64 if PAIRED else 32
    AT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m = gl.arange(0, GROUP, layout=gl.SliceLayout(1, AT))
    k = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, AT))
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        e, first, end, block = item_of(expert, start, stop, item, items, N // (BN + SIDE))
        r0, r1 = row_of(order, first + m, end, SHARE), row_of(order, first + GROUP + m, end, SHARE)
        r2, r3 = row_of(order, first + 2 * GROUP + m, end, SHARE), row_of(order, first + 3 * GROUP + m, end, SHARE)
        each = (r0, r1, r2, r3)
        column = (e * N).to(gl.int32) + block * (BN + SIDE)
        for at in range(K // DEPTH):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), step // STAGES & 1 ^ 1)
            if DENSE:
                mbarrier.expect(full.index(stage), (BN + SIDE) * DEPTH * 2)
                done, fold = full.index(stage), column // FOLD
                copy_tile(w, [fold, 0, 0, 0, at * DEPTH], done, folded(weights.index(stage), PAIRED))
                if SIDE > 0:
                    fold += BN // FOLD
                    copy_tile(w_side, [fold, 0, 0, 0, at * DEPTH], done, folded(side.index(stage), PAIRED))
            for g in gl.static_range(BM // GROUP):
                if g * GROUP < end - first:
                    to = rows.index(2 * stage + g * GROUP // HALF).slice(g * GROUP % HALF, GROUP)
                    there = (m < end - first - g * GROUP)[:, None]  # zeros for the rest: not read, cheap to multiply
                    copy_rows(to, x + each[g].to(gl.int64)[:, None] * K + (at * DEPTH + k)[None, :], mask=there)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            step += 1


@gluon.jit
def unpack(
    tiles, ring, w, scales,
    BITS: gl.constexpr, PAIRED: gl.constexpr, N: gl.constexpr, K: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Decode weights; the codes of two steps are in registers while those before them are decoded."""
    _, expert, start, stop, items = tiles
    _, weights, _, full, empty = ring
    PER: gl.constexpr = 32 // BITS  # codes of a word
    if BITS == 4:
        AT: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [WARPS, 1], [1, 0])
    else:
        AT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    n = column_of(gl.arange(0, BN, layout=gl.SliceLayout(1, AT)), PAIRED)
    words = n[:, None] * (K // PER) + gl.arange(0, DEPTH // PER, layout=gl.SliceLayout(0, AT))[None, :]
    if BITS == 4:
        APART: gl.constexpr = gl.SliceLayout(3, gl.reshape(words, [BN, 2, 2, 2]).type.layout)
    else:
        APART: gl.constexpr = gl.reshape(words, [BN, 2, 8]).type.layout
    AT_TWO: gl.constexpr = gl.SliceLayout(2, APART)
    two = column_of(gl.arange(0, BN, layout=gl.SliceLayout(1, AT_TWO)), PAIRED)[:, None] * (K // 32)
    two += gl.arange(0, 2, layout=gl.SliceLayout(0, AT_TWO))[None, :]
    e, _, _, block = item_of(expert, start, stop, gl.program_id(0), items, N // BN)
    row = e * N + block * BN
    even, odd = gl.load(w + row * (K // PER) + words), gl.load(w + row * (K // PER) + DEPTH // PER + words)
    even_scales, odd_scales = gl.load(scales + row * (K // 32) + two), gl.load(scales + row * (K // 32) + 2 + two)
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        e, _, _, block = item_of(expert, start, stop, item + gl.num_programs(0), items, N // BN)
        behind = e * N + block * BN
        for done in range(0, K, 2 * DEPTH):
            ahead = gl.where(done + 2 * DEPTH < K, row * K + done + 2 * DEPTH, behind * K)
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), step // STAGES & 1 ^ 1)
            decode(even, even_scales, weights.index(stage), BITS)
            even, even_scales = gl.load(w + ahead // PER + words), gl.load(scales + ahead // 32 + two)
            everybody()
            mbarrier.arrive(full.index(stage))
            stage = (step + 1) % STAGES
            mbarrier.wait(empty.index(stage), (step + 1) // STAGES & 1 ^ 1)
            decode(odd, odd_scales, weights.index(stage), BITS)
            odd = gl.load(w + ahead // PER + DEPTH // PER + words)
            odd_scales = gl.load(scales + ahead // 32 + 2 + two)
            everybody()
            mbarrier.arrive(full.index(stage))
            step += 2
        row = behind
