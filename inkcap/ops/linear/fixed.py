"""Products whose rows depend on no other row, nor on how many there are: deterministic mode on a GPU.

All of them are sums of products of LENGTH columns each, added up in order of the columns. Few rows are multiplied part
by part, in many programs; many rows tile by tile, where a program adds up the parts itself. A product's columns go
through the same instructions in the same order either way, so that both give the same bits (device test).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.linear.few import LENGTH, each_in_parts, in_parts, settle_parts, sum_parts
from inkcap.ops.linear.ref import logits, product, project, project_each, settle
from inkcap.ops.sconv.triton import convolve
from inkcap.ops.values import GroupView, Normed, Packing

FEW, PARTED = 64, 1 << 18  # tokens, and products, up to which parts are programs of their own; measured on an H200


@dataclass(frozen=True, slots=True)
class Tile:
    """Of a product: tokens, rows of the matrix, columns at once, loads in flight, warps."""

    tokens: int
    rows: int
    depth: int
    stages: int
    warps: int


# by the tokens up to which they are taken; measured on an H200 (8,192 tokens, 6,144 x 6,144: 1.28 ms, the library 0.78)
TILES = {16: Tile(16, 64, LENGTH, 2, 4), 64: Tile(64, 128, 64, 4, 4), 1 << 30: Tile(128, 128, 64, 4, 8)}


@triton.jit(do_not_specialize=["tokens"])
def tile_kernel(
    x, w, y, tokens, rows, x_stride, w_stride,
    K: tl.constexpr, PART: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One tile [BT, BN] of a product: the weights are the first operand, as in `part_kernel`."""
    pdl.trigger(PDL)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    k = tl.arange(0, BK)
    wp = w + tl.minimum(n, rows - 1).to(tl.int64)[:, None] * w_stride + k[None, :]
    xp = x + tl.minimum(t, tokens - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
    total, acc = tl.zeros([BN, BT], tl.float32), tl.zeros([BN, BT], tl.float32)
    pdl.wait(PDL)
    for at in tl.range(0, K, BK, num_stages=STAGES):
        if K % BK == 0:
            own = tl.load(wp + at)
            a = tl.load(xp + at)
        else:
            own = tl.load(wp + at, mask=(at + k < K)[None, :], other=0.0)
            a = tl.load(xp + at, mask=(at + k < K)[None, :], other=0.0)
        acc = tl.dot(own, tl.trans(a), acc, input_precision="ieee")
        if ((at + BK) % PART == 0) | (at + BK >= K):  # a part is complete
            total += acc
            acc = tl.zeros([BN, BT], tl.float32)
    to = y + t.to(tl.int64)[:, None] * rows + n[None, :]
    tl.store(to, tl.trans(total).to(y.dtype.element_ty), mask=(t < tokens)[:, None] & (n < rows)[None, :])


def in_tiles(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x [T, K] times `weight` [N, K]: [T, N]."""
    (rows, length), tokens, on = weight.shape, len(x), pdl.supported(x.device)
    part = max(16, min(LENGTH, triton.next_power_of_2(length)))
    out = torch.empty(tokens, rows, dtype=dtype, device=x.device)
    tile = next(tile for most, tile in TILES.items() if tokens <= most)
    columns = max(64, min(tile.rows, triton.next_power_of_2(rows)))
    tile_kernel[(triton.cdiv(tokens, tile.tokens), triton.cdiv(rows, columns))](
        x, weight, out, tokens, rows, x.stride(0), weight.stride(0),
        length, part, min(tile.depth, part), tile.tokens, columns, tile.stages, on,
        num_warps=tile.warps, **pdl.launch(on),
    )  # fmt: skip
    return out


def parted(x: Tensor, weight: Tensor) -> bool:
    """Whether parts of a product are programs of their own."""
    return len(x) <= FEW and len(x) * len(weight) <= PARTED


def together(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x [T, K] times `weight` [N, K] by whichever way is the faster one: [T, N]."""
    assert x.dtype == weight.dtype, f"rows of {x.dtype} and a matrix of {weight.dtype}; the kernels need one dtype"
    if parted(x, weight):
        return sum_parts(in_parts(x, weight), dtype)
    return in_tiles(x, weight, dtype)


def parts_of(x: Tensor, weight: Tensor) -> Tensor:
    """Parts [P, T, N] fp32 whose sum in order is the product: many, or the sum itself."""
    return in_parts(x, weight) if len(x) <= FEW else in_tiles(x, weight, torch.float32).unsqueeze(0)


@project.implement("fixed", when=lambda device: device.type == "cuda", spare=True)
def project_fixed(rows: Normed, weight: Tensor) -> Tensor:
    """`project` of the reference."""
    return together(rows.tensor(), weight, rows.dtype)


@product.implement("fixed", when=lambda device: device.type == "cuda", spare=True)
def product_fixed(rows: Tensor, weight: Tensor) -> Tensor:
    """`product` of the reference."""
    return together(rows, weight, rows.dtype)


@project_each.implement("fixed", when=lambda device: device.type == "cuda", spare=True)
def project_each_fixed(inputs: Sequence[Normed], weight: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """`project_each` of the reference."""
    xs, dtype = [rows.tensor() for rows in inputs], inputs[0].dtype
    if all(x is xs[0] for x in xs):
        return project_fixed(inputs[0], weight).split_with_sizes(list(widths), 1)
    if parted(xs[0], weight):
        return sum_parts(each_in_parts(xs, weight, widths), dtype).split_with_sizes(list(widths), 1)
    own = weight.split_with_sizes(list(widths))
    return tuple(together(x, part, dtype) for x, part in zip(xs, own, strict=True))


@settle.implement("fixed", when=lambda device: device.type == "cuda", spare=True)
def settle_fixed(
    rows: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    taps: Tensor,
    view: GroupView,
    packing: Packing,
    *,
    plane: int,
    scale: Tensor | None = None,
    conv_scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`settle` of the reference."""
    if packing.widest == 1 and len(rows) <= FEW:
        parts = parts_of(rows, weight)
        return settle_parts(parts, rows, residual, taps, view, packing, plane, scale, conv_scale, dtype)[0], None
    made = together(rows, weight, rows.dtype)
    return convolve(made, taps, view, packing, plane, conv_scale, residual, before=scale, dtype=dtype), None


@logits.implement("fixed", when=lambda device: device.type == "cuda", spare=True)
def logits_fixed(hidden: Tensor, weight: Tensor, scale: float, soft_cap: float | None = None) -> Tensor:
    """`logits` of the reference."""
    out = together(hidden, weight, torch.float32).mul_(scale)
    return out if soft_cap is None else out.div_(soft_cap).tanh_().mul_(soft_cap)
