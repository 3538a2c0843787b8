"""Products of experts for many tokens on Hopper: warps that fetch, and decode, beside warps that multiply.

A program takes one tile of up to 256 uses and 128 columns after the other. Its producer, four warps, brings rows and
weights through a ring of shared memory; two consumers, four warps each, multiply half of the uses each, and write while
the producer is at the next tile. Codes pass through the producer's registers, so that decoding costs no time of the
tensor cores. Weights are read, and decoded, once for as many uses: what limits all this is how much a multiprocessor
can take from the L2 cache. Written in Gluon, which is compiled, not interpreted: CI compiles it, a device compares it.
"""

import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from inkcap.ops.experts.coded_many import stored
from inkcap.ops.experts.group import tiles
from inkcap.ops.quantize.coded import Coded, Weights
from inkcap.ops.values import Caps, Routed

GROUP = gl.constexpr(64)  # uses that are fetched and multiplied, or not, together: rows of the tensor cores' product
MANY = 48  # uses of an expert, on average, beyond which it is worth its large tiles
DEPTH = 64  # of a stage: 128 bytes of a row, the widest swizzle of shared memory

# newer versions of Triton have other names for what 3.6 has
copy_rows = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
everybody = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

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


@gluon.jit
def scale_pair(byte):
    """E4M3 scales in the low bytes of words to pairs of bf16, each times 2^110."""
    scale = ((byte & 0xFF) << 20).to(gl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    bits = (scale * 1.298074214633707e33).to(gl.int32, bitcast=True)  # a bf16: its low half is empty
    return bits | ((bits >> 16) & 0xFFFF)


@gluon.jit
def decode(words, two, stage):
    """Words of codes [R, 8] under pairs of scales [R, 2] into a stage [R, 64]: weights in bf16, times 2^-16."""
    R: gl.constexpr = words.shape[0]
    words = gl.reshape(words, [R, 2, 2, 2])
    two = two.to(gl.int32)
    pairs = gl.join(scale_pair(two), scale_pair(two >> 8))
    pairs = gl.expand_dims(gl.convert_layout(pairs, gl.SliceLayout(3, words.type.layout)), 3)
    pairs, words = gl.broadcast(pairs, words)
    p0, p1, p2, p3 = gl.inline_asm_elementwise(
        WORD_TIMES_SCALE, "=&r,=&r,=&r,=&r,r,r", [words, pairs],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    made = gl.reshape(gl.join(gl.join(p0, p2), gl.join(p1, p3)), [R, 32])
    SAME: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    if RENAMED:
        stage.reinterpret(gl.int32, [R, 32], SAME).store(made)
    else:
        stage._reinterpret(gl.int32, [R, 32], SAME).store(made)


@gluon.jit
def tile_of(expert, start, stop, item, items, BLOCKS: gl.constexpr):
    """Expert, first and end of the uses, block of columns of an item, or of the last one."""
    item = gl.minimum(item, items - 1)
    tile = item // BLOCKS
    return gl.load(expert + tile).to(gl.int64), gl.load(start + tile), gl.load(stop + tile), item % BLOCKS


@gluon.jit
def row_of(order, at, end, SHARE: gl.constexpr):
    """Rows of x of the uses at these places; beyond the end that of the last use."""
    return gl.load(order + gl.minimum(at, end - 1)) // SHARE


@gluon.jit
def rows_of(order, first, end, m, SHARE: gl.constexpr):
    """The same for all of a tile, GROUP by GROUP."""
    r0, r1 = row_of(order, first + m, end, SHARE), row_of(order, first + GROUP + m, end, SHARE)
    r2, r3 = row_of(order, first + 2 * GROUP + m, end, SHARE), row_of(order, first + 3 * GROUP + m, end, SHARE)
    return r0, r1, r2, r3


@gluon.jit
def fetch(
    rows, full, x, each, count, stage, done, K: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr, AT: gl.constexpr
):
    """Begin to bring a step's columns of `count` uses' rows of x; the stage is told when they have come."""
    k = done + gl.arange(0, BK, layout=gl.SliceLayout(0, AT))
    HALF: gl.constexpr = BM // 2
    for g in gl.static_range(BM // GROUP):
        if g * GROUP < count:
            to = rows.index(2 * stage + g * GROUP // HALF).slice(g * GROUP % HALF, GROUP)
            copy_rows(to, x + each[g].to(gl.int64)[:, None] * K + k[None, :])
    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def produce(
    tiles, ring, x, w, scales,
    SHARE: gl.constexpr, CODED: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    order, expert, start, stop, items = tiles
    rows, weights, full, empty = ring
    BLOCKS: gl.constexpr = N // BN
    AT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m = gl.arange(0, GROUP, layout=gl.SliceLayout(1, AT))
    e, first, end, block = tile_of(expert, start, stop, gl.program_id(0), items, BLOCKS)
    each = rows_of(order, first, end, m, SHARE)
    step = 0
    if CODED:  # the codes of two steps are in registers while those before them are decoded
        AT_WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [4, 1], [1, 0])
        n = gl.arange(0, BN, layout=gl.SliceLayout(1, AT_WORDS))
        words = n[:, None] * (K // 8) + gl.arange(0, BK // 8, layout=gl.SliceLayout(0, AT_WORDS))[None, :]
        APART: gl.constexpr = gl.reshape(words, [BN, 2, 2, 2]).type.layout
        AT_TWOS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, APART))
        twos = gl.arange(0, BN, layout=gl.SliceLayout(1, AT_TWOS))[:, None] * (K // 32)
        twos = twos + gl.arange(0, 2, layout=gl.SliceLayout(0, AT_TWOS))[None, :]
        row = e * N + block * BN
        even, odd = gl.load(w + row * (K // 8) + words), gl.load(w + row * (K // 8) + BK // 8 + words)
        even_scales, odd_scales = gl.load(scales + row * (K // 32) + twos), gl.load(scales + row * (K // 32) + 2 + twos)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        count = end - first
        next_e, next_first, next_end, next_block = tile_of(
            expert, start, stop, item + gl.num_programs(0), items, BLOCKS
        )
        next_each = rows_of(order, next_first, next_end, m, SHARE)
        if CODED:
            next_row = next_e * N + next_block * BN
            for done in range(0, K, 2 * BK):
                ahead = gl.where(done + 2 * BK < K, row * K + done + 2 * BK, next_row * K)
                stage = step % STAGES
                mbarrier.wait(empty.index(stage), step // STAGES & 1 ^ 1)
                fetch(rows, full, x, each, count, stage, done, K, BM, BK, AT)
                decode(even, even_scales, weights.index(stage))
                even, even_scales = gl.load(w + ahead // 8 + words), gl.load(scales + ahead // 32 + twos)
                everybody()
                mbarrier.arrive(full.index(stage))
                stage = (step + 1) % STAGES
                mbarrier.wait(empty.index(stage), (step + 1) // STAGES & 1 ^ 1)
                fetch(rows, full, x, each, count, stage, done + BK, K, BM, BK, AT)
                decode(odd, odd_scales, weights.index(stage))
                odd = gl.load(w + ahead // 8 + BK // 8 + words)
                odd_scales = gl.load(scales + ahead // 32 + 2 + twos)
                everybody()
                mbarrier.arrive(full.index(stage))
                step += 2
            row = next_row
        else:
            for done in range(0, K, BK):
                stage = step % STAGES
                mbarrier.wait(empty.index(stage), step // STAGES & 1 ^ 1)
                mbarrier.expect(full.index(stage), BN * BK * 2)
                copy_tile(w, [(e * N).to(gl.int32) + block * BN, done], full.index(stage), weights.index(stage))
                fetch(rows, full, x, each, count, stage, done, K, BM, BK, AT)
                step += 1
        e, first, end, block, each = next_e, next_first, next_end, next_block, next_each


@gluon.jit
def gated(x, gate_cap, up_cap, CAPPED: gl.constexpr):
    """`gated` of act/triton.py for rows [M, N] of pairs."""
    gate, up = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    own = gate / (1.0 + gl.exp(-gate))
    if CAPPED:
        own = gate_cap * (2.0 / (1.0 + gl.exp(-2.0 / gate_cap * gate)) - 1.0) / (1.0 + gl.exp(-gate))
        up = up_cap * (2.0 / (1.0 + gl.exp(-2.0 / up_cap * up)) - 1.0)
    return own * up


@gluon.jit
def multiply(
    ring, step, order, first, end, block, factor, y, gate_cap, up_cap,
    SECOND: gl.constexpr, PAIRED: gl.constexpr, CAPPED: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    M: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Products of M uses from `first` on with a tile's columns, times `factor`, written. Returns the next step."""
    rows, weights, full, empty = ring
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    PER: gl.constexpr = 2 if PAIRED else 1
    acc = gl.zeros([M, BN], gl.float32, SUMS)
    for done in range(0, K, BK):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        fence_async_shared()
        acc = warpgroup_mma(
            rows.index(2 * stage + SECOND).slice(0, M), weights.index(stage).permute((1, 0)), acc, is_async=True
        )
        acc = warpgroup_mma_wait(1, deps=[acc])
        if done > 0:
            mbarrier.arrive(empty.index((step - 1) % STAGES))
        step += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((step - 1) % STAGES))
    acc = acc * factor
    out = gated(acc, gate_cap, up_cap, CAPPED) if PAIRED else acc
    out = gl.convert_layout(out.to(y.dtype.element_ty), OUT)
    at = first + gl.arange(0, M, layout=gl.SliceLayout(1, OUT))
    n = gl.arange(0, BN // PER, layout=gl.SliceLayout(0, OUT))
    use = gl.load(order + gl.minimum(at, end - 1)).to(gl.int64)
    to = y + use[:, None] * (N // PER) + (block * (BN // PER) + n)[None, :]
    gl.store(to, out, mask=(at < end)[:, None] & (n < N)[None, :])
    return step


@gluon.jit
def consume(
    tiles, ring, factors, y, gate_cap, up_cap,
    SECOND: gl.constexpr, CODED: gl.constexpr, PAIRED: gl.constexpr, CAPPED: gl.constexpr, N: gl.constexpr,
    K: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    OUT: gl.constexpr, OUT_GROUP: gl.constexpr,
):  # fmt: skip
    """The first or second half of each tile's uses."""
    order, expert, start, stop, items = tiles
    full, empty = ring[2], ring[3]
    HALF: gl.constexpr = BM // 2
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        e, first, end, block = tile_of(expert, start, stop, item, items, N // BN)
        first += SECOND * HALF
        factor = 1.0
        if CODED:
            factor = gl.load(factors + e) * 65536.0
        if end - first > HALF - GROUP:
            step = multiply(
                ring, step, order, first, end, block, factor, y, gate_cap, up_cap,
                SECOND, PAIRED, CAPPED, N, K, HALF, BN, BK, STAGES, OUT,
            )  # fmt: skip
        elif end > first:
            step = multiply(
                ring, step, order, first, end, block, factor, y, gate_cap, up_cap,
                SECOND, PAIRED, CAPPED, N, K, GROUP, BN, BK, STAGES, OUT_GROUP,
            )  # fmt: skip
        else:
            for _ in range(0, K, BK):
                mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
                mbarrier.arrive(empty.index(step % STAGES))
                step += 1


@gluon.jit
def wide_kernel(
    x, w, scales, factors, order, expert, start, stop, number, y, gate_cap, up_cap,
    SHARE: gl.constexpr, CODED: gl.constexpr, PAIRED: gl.constexpr, CAPPED: gl.constexpr, N: gl.constexpr,
    K: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    OUT: gl.constexpr, OUT_GROUP: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """x [.., K]; w [E, N, K], a descriptor or, CODED, words of E2M1 codes; y [uses, N], or N / 2 where PAIRED."""
    items = gl.load(number) * (N // BN)
    TILED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    rows = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, BM // 2, BK], TILED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], TILED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=128 + 1)  # threads whose rows have come; the weights
        mbarrier.init(empty.index(s), count=2)
    tiles = (order, expert, start, stop, items)
    ring = (rows, weights, full, empty)
    gl.warp_specialize(
        [
            (consume, (tiles, ring, factors, y, gate_cap, up_cap,
                       gl.constexpr(0), CODED, PAIRED, CAPPED, N, K, BM, BN, BK, STAGES, OUT, OUT_GROUP)),
            (consume, (tiles, ring, factors, y, gate_cap, up_cap,
                       gl.constexpr(1), CODED, PAIRED, CAPPED, N, K, BM, BN, BK, STAGES, OUT, OUT_GROUP)),
            (produce, (tiles, ring, x, w, scales, SHARE, CODED, N, K, BM, BN, BK, STAGES)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """Uses and columns of a tile, stages of the ring, registers of a thread; all of a multiprocessor."""

    uses: int
    columns: int
    stages: int
    registers: int


# us of both halves of 8192 tokens on an H200, in bf16 and in NVFP4: 256 x 128 946 + 626 and 1227 + 681, 128 x 256
# 1200 + 616 and 1667 + 801; see docs/kernels.md
SHAPE = Shape(256, 128, 4, 168)


def written(rows: int, columns: int) -> gl.DistributedLinearLayout:
    """How 128 threads hold what they write: eight columns each, four of them 32 of one row."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *([0, 1 << i] for i in range(5, columns.bit_length() - 1))]
    registers += [[1 << i, 0] for i in range(6, rows.bit_length() - 1)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, columns])


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a Hopper; 0 of anything else."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def fits(x: Tensor, w: Weights) -> bool:
    """Whether `wide` takes rows x and these weights: bf16 or NVFP4 on a Hopper, in sizes that its tiles divide."""
    _, rows, length = w.shape
    known = w.bits == 4 if isinstance(w, Coded) else w.is_contiguous()
    known = known and x.dtype == w.dtype == torch.bfloat16 and x.is_contiguous()
    return known and processors(x.device) > 0 and rows % SHAPE.columns == length % (2 * DEPTH) == 0


def wide(
    x: Tensor, w: Weights, route: Routed, share: int, out: Tensor, *, paired: bool, caps: Caps | None = None
) -> Tensor:
    """`grouped` of many.py for all uses of a routing, where `fits`."""
    experts, rows, length = w.shape
    uses = tiles(route, experts, SHAPE.uses)
    if isinstance(w, Coded):
        weights, scales, factors = stored(w)
        scales = scales.view(torch.int16)
    else:
        layout = gl.NVMMASharedLayout(128, 16, 2)
        weights = TensorDescriptor.from_tensor(w.flatten(0, 1), [SHAPE.columns, DEPTH], layout)
        scales = factors = x
    programs = min(processors(x.device), len(uses.expert) * triton.cdiv(rows, SHAPE.columns))
    columns = SHAPE.columns // 2 if paired else SHAPE.columns
    wide_kernel[(programs,)](
        x, weights, scales, factors, uses.order, uses.expert, uses.start, uses.stop, uses.number, out,
        1.0 if caps is None else caps.gate, 1.0 if caps is None else caps.up,
        share, isinstance(w, Coded), paired, caps is not None, rows, length, SHAPE.uses, SHAPE.columns, DEPTH,
        SHAPE.stages, written(SHAPE.uses // 2, columns), written(GROUP.value, columns), SHAPE.registers,
        num_warps=4,
    )  # fmt: skip
    return out
