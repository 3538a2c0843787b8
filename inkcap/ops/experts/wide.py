"""Products of experts for many tokens on Hopper: warps that fetch, warps that decode, beside warps that multiply.

A program takes one tile of up to 256 uses after the other. Two consumers, four warps each, multiply half of the uses
each, and write while what ring.py does for them is at the next columns. Weights are read, and decoded, once for as many
uses: what limits all this is how much a multiprocessor can take from the L2 cache.
"""

import functools
from dataclasses import dataclass

import torch
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from inkcap.ops.experts.coded_many import stored
from inkcap.ops.experts.group import tiles
from inkcap.ops.experts.ring import DEPTH, GROUP, gather, in_order, item_of, unpack
from inkcap.ops.quantize.coded import Coded, Weights
from inkcap.ops.values import Caps, Routed

MANY = 48  # uses of an expert, on average, beyond which it is worth its large tiles


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
def write(
    acc, order, first, end, column, y, gate_cap, up_cap,
    PAIRED: gl.constexpr, CAPPED: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Products of uses from `first` on with columns from `column` on, to y [uses, N], or N / 2 where PAIRED."""
    PER: gl.constexpr = 2 if PAIRED else 1
    out = gated(acc, gate_cap, up_cap, CAPPED) if PAIRED else acc
    out = in_order(out.to(y.dtype.element_ty), PAIRED)
    AT: gl.constexpr = out.type.layout
    at = first + gl.arange(0, out.shape[0], layout=gl.SliceLayout(1, AT))
    n = gl.arange(0, out.shape[1], layout=gl.SliceLayout(0, AT))
    use = gl.load(order + gl.minimum(at, end - 1)).to(gl.int64)
    gl.store(y + use[:, None] * (N // PER) + (column // PER + n)[None, :], out, mask=(at < end)[:, None])


@gluon.jit
def multiply(
    ring, step, order, first, end, column, factor, y, gate_cap, up_cap,
    SECOND: gl.constexpr, PAIRED: gl.constexpr, CAPPED: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    M: gl.constexpr, BN: gl.constexpr, SIDE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Products of M uses from `first` on with a block of columns, times `factor`, written. Returns the next step."""
    rows, weights, side, full, empty = ring
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc = gl.zeros([M, BN], gl.float32, SUMS)
    if SIDE > 0:
        also = gl.zeros([M, SIDE], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16]))
    for at in range(K // DEPTH):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        fence_async_shared()
        own = rows.index(2 * stage + SECOND).slice(0, M)
        acc = warpgroup_mma(own, weights.index(stage).permute((1, 0)), acc, is_async=True)
        if SIDE > 0:
            also = warpgroup_mma(own, side.index(stage).permute((1, 0)), also, is_async=True)
            acc, also = warpgroup_mma_wait(2, deps=[acc, also])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        if at > 0:
            mbarrier.arrive(empty.index((step - 1) % STAGES))
        step += 1
    if SIDE > 0:
        acc, also = warpgroup_mma_wait(0, deps=[acc, also])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((step - 1) % STAGES))
    write(acc * factor, order, first, end, column, y, gate_cap, up_cap, PAIRED, CAPPED, N)
    if SIDE > 0:
        write(also * factor, order, first, end, column + BN, y, gate_cap, up_cap, PAIRED, CAPPED, N)
    return step


@gluon.jit
def consume(
    tiles, ring, factors, y, gate_cap, up_cap,
    SECOND: gl.constexpr, BITS: gl.constexpr, PAIRED: gl.constexpr, CAPPED: gl.constexpr, N: gl.constexpr,
    K: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, SIDE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The first or second half of each tile's uses."""
    order, expert, start, stop, items = tiles
    full, empty = ring[3], ring[4]
    HALF: gl.constexpr = BM // 2
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        e, first, end, block = item_of(expert, start, stop, item, items, N // (BN + SIDE))
        first += SECOND * HALF
        column = block * (BN + SIDE)
        factor = 1.0
        if BITS == 4:
            factor = gl.load(factors + e) * 65536.0
        if end - first > HALF - GROUP:
            step = multiply(
                ring, step, order, first, end, column, factor, y, gate_cap, up_cap,
                SECOND, PAIRED, CAPPED, N, K, HALF, BN, SIDE, STAGES,
            )  # fmt: skip
        elif end > first:
            step = multiply(
                ring, step, order, first, end, column, factor, y, gate_cap, up_cap,
                SECOND, PAIRED, CAPPED, N, K, GROUP, BN, SIDE, STAGES,
            )  # fmt: skip
        else:
            for _ in range(K // DEPTH):
                mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
                mbarrier.arrive(empty.index(step % STAGES))
                step += 1


@gluon.jit
def wide_kernel(
    x, w, w_side, scales, factors, order, expert, start, stop, number, y, gate_cap, up_cap,
    SHARE: gl.constexpr, BITS: gl.constexpr, PAIRED: gl.constexpr, CAPPED: gl.constexpr, N: gl.constexpr,
    K: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, SIDE: gl.constexpr, STAGES: gl.constexpr,
    DECODERS: gl.constexpr, CONSUMER: gl.constexpr, GATHERER: gl.constexpr, DECODER: gl.constexpr,
):  # fmt: skip
    """x [.., K]; w [E, N, K], descriptors or words of codes; y [uses, N], or N / 2 where PAIRED.

    SIDE: columns of a block beside its BN ones, from another tile of shared memory.
    """
    TILED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    rows = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, BM // 2, DEPTH], TILED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, DEPTH], TILED)
    side = weights
    if SIDE > 0:
        side = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SIDE, DEPTH], TILED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=128 + 1)  # threads whose rows have come; the weights
        mbarrier.init(empty.index(s), count=2)
    tiles = (order, expert, start, stop, gl.load(number) * (N // (BN + SIDE)))
    ring = (rows, weights, side, full, empty)
    if BITS == 16:
        gl.warp_specialize(
            [
                (consume, (tiles, ring, factors, y, gate_cap, up_cap, gl.constexpr(0), BITS, PAIRED, CAPPED,
                           N, K, BM, BN, SIDE, STAGES)),
                (consume, (tiles, ring, factors, y, gate_cap, up_cap, gl.constexpr(1), BITS, PAIRED, CAPPED,
                           N, K, BM, BN, SIDE, STAGES)),
                (gather, (tiles, ring, x, w, w_side, SHARE, gl.constexpr(True), PAIRED, N, K, BM, BN, SIDE, STAGES)),
            ],
            [4, 4],
            [CONSUMER, GATHERER],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (tiles, ring, factors, y, gate_cap, up_cap, gl.constexpr(0), BITS, PAIRED, CAPPED,
                           N, K, BM, BN, SIDE, STAGES)),
                (consume, (tiles, ring, factors, y, gate_cap, up_cap, gl.constexpr(1), BITS, PAIRED, CAPPED,
                           N, K, BM, BN, SIDE, STAGES)),
                (gather, (tiles, ring, x, w, w_side, SHARE, gl.constexpr(False), PAIRED, N, K, BM, BN, SIDE, STAGES)),
                (unpack, (tiles, ring, w, scales, BITS, PAIRED, N, K, BN, STAGES, DECODERS)),
            ],
            [4, 4, DECODERS],
            [CONSUMER, GATHERER, DECODER],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a tile and its ring; registers of a thread of each kind of warps."""

    uses: int
    columns: int
    side: int  # more columns
    stages: int
    decoders: int  # warps
    registers: tuple[int, int, int]  # of a consumer, of who gathers, of a decoder


# us of both halves of 8192 tokens on an H200, see docs/kernels.md; rows that stay in shared memory while all blocks of
# a tile go by, which 384 columns allow, made prefill 6 % slower with dense weights and no faster with codes
CODES, PLAIN = Shape(256, 128, 0, 4, 4, (168, 64, 112)), Shape(256, 128, 64, 4, 0, (224, 56, 0))
NO_SIDE = Shape(256, 128, 0, 4, 0, (168, 168, 0))  # dense, where PLAIN's columns do not divide the rows


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a Hopper; 0 of anything else."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def fits(x: Tensor, w: Weights) -> bool:
    """Whether `wide` takes rows x and these weights: bf16 or codes on a Hopper, in sizes that its tiles divide."""
    _, rows, length = w.shape
    known = isinstance(w, Coded) or w.is_contiguous()
    known = known and x.dtype == w.dtype == torch.bfloat16 and x.is_contiguous()
    return known and processors(x.device) > 0 and rows % 128 == length % (2 * DEPTH.value) == 0


def descriptor(w: Tensor, columns: int, paired: bool) -> TensorDescriptor:
    """Tiles of `columns` rows of w [E, N, K], in the order of ring.py's `column_of`."""
    experts, rows, length = w.shape
    groups = 8 if paired else 4
    return TensorDescriptor(
        w, [experts * rows // (8 * groups), groups, 4, 2, length],
        [8 * groups * length, 2 * length, 2 * groups * length, length, 1],
        [columns // (8 * groups), groups, 4, 2, DEPTH.value], gl.NVMMASharedLayout(128, 16, 5),
    )  # fmt: skip


def wide(
    x: Tensor, w: Weights, route: Routed, share: int, out: Tensor, *, paired: bool, caps: Caps | None = None
) -> Tensor:
    """`grouped` of many.py for all uses of a routing, where `fits`."""
    experts, rows, length = w.shape
    shape = CODES if isinstance(w, Coded) else PLAIN if rows % (PLAIN.columns + PLAIN.side) == 0 else NO_SIDE
    uses = tiles(route, experts, shape.uses)
    if isinstance(w, Coded):
        bits = w.bits
        weights, scales, factors = stored(w)
        side, scales = weights, scales.view(torch.int16) if bits == 4 else scales
    else:
        bits, scales, factors = 16, x, x
        weights = descriptor(w, shape.columns, paired)
        side = descriptor(w, shape.side, paired) if shape.side else weights
    blocks = rows // (shape.columns + shape.side)
    wide_kernel[(min(processors(x.device), len(uses.expert) * blocks),)](
        x, weights, side, scales, factors, uses.order, uses.expert, uses.start, uses.stop, uses.number, out,
        1.0 if caps is None else caps.gate, 1.0 if caps is None else caps.up,
        share, bits, paired, caps is not None, rows, length, shape.uses, shape.columns, shape.side, shape.stages,
        shape.decoders, *shape.registers, num_warps=4,
    )  # fmt: skip
    return out
