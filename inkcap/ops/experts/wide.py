"""Products of experts for many tokens on Hopper: warps that fetch, and decode, beside warps that multiply.

A program takes one tile of up to 128 uses and 256 columns after the other. Its producer, four warps, brings rows and
weights through a ring of shared memory; two consumers, four warps each, multiply half of the uses each, and write while
the producer is at the next tile. Codes pass through the producer's registers, so that decoding costs no time of the
tensor cores. Written in Gluon, which is compiled, not interpreted: the reference is compared with it on a device.
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
from inkcap.ops.experts.group import Tiles
from inkcap.ops.quantize.coded import Coded, Weights
from inkcap.ops.values import Caps

USES = 128  # of a tile; a consumer has half of them
HALF = gl.constexpr(USES // 2)
DEPTH = 64  # of a stage: 128 bytes of a row, the widest swizzle of shared memory

# Triton 3.7 renamed what 3.6 has
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
def scale_pairs(four):
    """Words [R] of four E4M3 scales to bf16 pairs [R, 4] of each, times 2^110."""
    apart = gl.join(gl.join(four, four >> 16), gl.join(four >> 8, four >> 24))
    byte = gl.reshape(apart, [four.shape[0], 4]) & 0xFF
    scale = (byte << 20).to(gl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    bits = (scale * 1.298074214633707e33).to(gl.int32, bitcast=True)  # a bf16: its low half is empty
    return bits | ((bits >> 16) & 0xFFFF)


@gluon.jit
def decode(words, four, stage):
    """Words of codes [R, 8] under words of scales [R] into a stage [R, 64]: weights in bf16, times 2^-16."""
    R: gl.constexpr = words.shape[0]
    words = gl.reshape(words, [R, 4, 2])
    pairs = gl.convert_layout(scale_pairs(four), gl.SliceLayout(2, words.type.layout))
    pairs, words = gl.broadcast(gl.expand_dims(pairs, 2), words)
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
def fetch(rows, x, low, high, stage, done, both, K: gl.constexpr, BK: gl.constexpr, AT: gl.constexpr):
    """Begin to bring a step's columns of both halves' rows of x."""
    k = done + gl.arange(0, BK, layout=gl.SliceLayout(0, AT))
    copy_rows(rows.index(2 * stage), x + low.to(gl.int64)[:, None] * K + k[None, :])
    if both:
        copy_rows(rows.index(2 * stage + 1), x + high.to(gl.int64)[:, None] * K + k[None, :])
    async_copy.commit_group()


@gluon.jit
def announce(full, step, STAGES: gl.constexpr, BEHIND: gl.constexpr):
    """Once rows fetched BEHIND steps ago have come, let consumers have that stage."""
    async_copy.wait_group(BEHIND)
    fence_async_shared()
    everybody()
    if step >= BEHIND:
        mbarrier.arrive(full.index((step - BEHIND) % STAGES))


@gluon.jit
def produce(
    tiles, ring, x, w, scales,
    SHARE: gl.constexpr, CODED: gl.constexpr, N: gl.constexpr, K: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, BEHIND: gl.constexpr,
):  # fmt: skip
    order, expert, start, stop, items = tiles
    rows, weights, full, empty = ring
    BLOCKS: gl.constexpr = N // BN
    AT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m = gl.arange(0, HALF, layout=gl.SliceLayout(1, AT))
    e, first, end, block = tile_of(expert, start, stop, gl.program_id(0), items, BLOCKS)
    low, high = row_of(order, first + m, end, SHARE), row_of(order, first + HALF + m, end, SHARE)
    step = 0
    if CODED:  # the codes of two steps are in registers while those before them are decoded
        WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [4, 1], [1, 0])
        n = gl.arange(0, BN, layout=gl.SliceLayout(1, WORDS))
        words = n[:, None] * (K // 8) + gl.arange(0, BK // 8, layout=gl.SliceLayout(0, WORDS))[None, :]
        fours = n * (K // 64)
        row = e * N + block * BN
        even, odd = gl.load(w + row * (K // 8) + words), gl.load(w + row * (K // 8) + BK // 8 + words)
        even_scales, odd_scales = (
            gl.load(scales + row * (K // 64) + fours),
            gl.load(scales + row * (K // 64) + 1 + fours),
        )
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        both = end - first > HALF
        next_e, next_first, next_end, next_block = tile_of(
            expert, start, stop, item + gl.num_programs(0), items, BLOCKS
        )
        next_low = row_of(order, next_first + m, next_end, SHARE)
        next_high = row_of(order, next_first + HALF + m, next_end, SHARE)
        if CODED:
            next_row = next_e * N + next_block * BN
            for done in range(0, K, 2 * BK):
                more = done + 2 * BK < K
                ahead = gl.where(more, row * K + done + 2 * BK, next_row * K)
                mbarrier.wait(empty.index(step % STAGES), step // STAGES & 1 ^ 1)
                fetch(rows, x, low, high, step % STAGES, done, both, K, BK, AT)
                decode(even, even_scales, weights.index(step % STAGES))
                even, even_scales = gl.load(w + ahead // 8 + words), gl.load(scales + ahead // 64 + fours)
                announce(full, step, STAGES, BEHIND)
                step += 1
                mbarrier.wait(empty.index(step % STAGES), step // STAGES & 1 ^ 1)
                fetch(rows, x, low, high, step % STAGES, done + BK, both, K, BK, AT)
                decode(odd, odd_scales, weights.index(step % STAGES))
                odd = gl.load(w + ahead // 8 + BK // 8 + words)
                odd_scales = gl.load(scales + ahead // 64 + 1 + fours)
                announce(full, step, STAGES, BEHIND)
                step += 1
            row = next_row
        else:
            for done in range(0, K, BK):
                stage = step % STAGES
                mbarrier.wait(empty.index(stage), step // STAGES & 1 ^ 1)
                mbarrier.expect(full.index(stage), BN * BK * 2)
                copy_tile(w, [(e * N).to(gl.int32) + block * BN, done], full.index(stage), weights.index(stage))
                fetch(rows, x, low, high, stage, done, both, K, BK, AT)
                announce(full, step, STAGES, BEHIND)
                step += 1
        e, first, end, block, low, high = next_e, next_first, next_end, next_block, next_low, next_high
    for _ in gl.static_range(BEHIND):
        async_copy.commit_group()
        announce(full, step, STAGES, BEHIND)
        step += 1


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
def consume(
    tiles, ring, factor, y, gate_cap, up_cap,
    SECOND: gl.constexpr, CODED: gl.constexpr, PAIRED: gl.constexpr, CAPPED: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """The first or second half of each tile's uses."""
    order, expert, start, stop, items = tiles
    rows, weights, full, empty = ring
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    PER: gl.constexpr = 2 if PAIRED else 1
    m = SECOND * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, OUT))
    n = gl.arange(0, BN // PER, layout=gl.SliceLayout(0, OUT))
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        e, first, end, block = tile_of(expert, start, stop, item, items, N // BN)
        live = first + SECOND * HALF < end
        acc = gl.zeros([HALF, BN], gl.float32, SUMS)
        if live:
            for done in range(0, K, BK):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                acc = warpgroup_mma(
                    rows.index(2 * stage + SECOND), weights.index(stage).permute((1, 0)), acc, is_async=True
                )
                acc = warpgroup_mma_wait(1, deps=[acc])
                if done > 0:
                    mbarrier.arrive(empty.index((step - 1) % STAGES))
                step += 1
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index((step - 1) % STAGES))
            if CODED:
                acc = acc * (gl.load(factor + e) * 65536.0)
            out = gated(acc, gate_cap, up_cap, CAPPED) if PAIRED else acc
            out = gl.convert_layout(out.to(y.dtype.element_ty), OUT)
            use = gl.load(order + gl.minimum(first + m, end - 1)).to(gl.int64)
            to = y + use[:, None] * (N // PER) + (block * (BN // PER) + n)[None, :]
            gl.store(to, out, mask=(first + m < end)[:, None] & (n < N)[None, :])
        else:
            for _ in range(0, K, BK):
                mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
                mbarrier.arrive(empty.index(step % STAGES))
                step += 1


@gluon.jit
def wide_kernel(
    x, w, scales, factor, order, expert, start, stop, number, y, gate_cap, up_cap,
    SHARE: gl.constexpr, CODED: gl.constexpr, PAIRED: gl.constexpr, CAPPED: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, BEHIND: gl.constexpr,
    OUT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """x [.., K]; w [E, N, K], a descriptor or, CODED, words of E2M1 codes; y [uses, N], or N / 2 where PAIRED."""
    items = gl.load(number) * (N // BN)
    TILED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    rows = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, HALF, BK], TILED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], TILED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1 if CODED else 2)
        mbarrier.init(empty.index(s), count=2)
    tiles = (order, expert, start, stop, items)
    ring = (rows, weights, full, empty)
    gl.warp_specialize(
        [
            (consume, (tiles, ring, factor, y, gate_cap, up_cap,
                       gl.constexpr(0), CODED, PAIRED, CAPPED, N, K, BN, BK, STAGES, OUT)),
            (consume, (tiles, ring, factor, y, gate_cap, up_cap,
                       gl.constexpr(1), CODED, PAIRED, CAPPED, N, K, BN, BK, STAGES, OUT)),
            (produce, (tiles, ring, x, w, scales, SHARE, CODED, N, K, BN, BK, STAGES, BEHIND)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """Columns of a tile, stages of the ring, steps that rows may be on their way, registers of a thread."""

    columns: int
    stages: int
    behind: int
    registers: int


SHAPE = Shape(256, 4, 2, 168)  # all of a multiprocessor; chosen by what fits; see docs/kernels.md


def written(columns: int) -> gl.DistributedLinearLayout:
    """How 128 threads hold what they write: eight columns each, four of them 32 of one row."""
    blocks = [[0, 1 << i] for i in range(5, columns.bit_length() - 1)]
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *blocks]
    return gl.DistributedLinearLayout(
        registers, [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [USES // 2, columns]
    )


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a Hopper; 0 of anything else."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def fits(x: Tensor, w: Weights) -> bool:
    """Whether `wide` takes rows x and these weights: bf16 or NVFP4 on a Hopper, in sizes that its tiles divide."""
    _, rows, length = w.shape
    coded = isinstance(w, Coded) and w.bits == 4
    plain = not isinstance(w, Coded) and w.is_contiguous()
    known = x.dtype == w.dtype == torch.bfloat16 and x.is_contiguous() and (coded or plain)
    return known and processors(x.device) > 0 and rows % SHAPE.columns == length % (2 * DEPTH) == 0


def wide(
    x: Tensor, w: Weights, uses: Tiles, share: int, out: Tensor, *, paired: bool, caps: Caps | None = None
) -> Tensor:
    """`grouped` of many.py for tiles of USES uses, where `fits`."""
    _, rows, length = w.shape
    if isinstance(w, Coded):
        weights, scales, factor = stored(w)
        scales = scales.view(torch.int32)
    else:
        layout = gl.NVMMASharedLayout(128, 16, 2)
        weights = TensorDescriptor.from_tensor(w.flatten(0, 1), [SHAPE.columns, DEPTH], layout)
        scales = factor = x
    programs = min(processors(x.device), len(uses.expert) * triton.cdiv(rows, SHAPE.columns))
    wide_kernel[(programs,)](
        x, weights, scales, factor, uses.order, uses.expert, uses.start, uses.stop, uses.number, out,
        1.0 if caps is None else caps.gate, 1.0 if caps is None else caps.up,
        share, isinstance(w, Coded), paired, caps is not None, rows, length, SHAPE.columns, DEPTH,
        SHAPE.stages, SHAPE.behind, written(SHAPE.columns // 2 if paired else SHAPE.columns), SHAPE.registers,
        num_warps=4,
    )  # fmt: skip
    return out
