"""Products of a few rows: a program multiplies all rows with a tile of weights, and whoever needs the product sums.

The tile's weights are asked for at once and before the rows are known, like those of one row; its rows are few elements
long, so that there are many programs. Sums go in order of the parts, so a row's result depends on no other row.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.sconv.triton import finish, history
from inkcap.ops.values import GroupView, Normed, Packing

ROWS, MANY_ROWS, LENGTH = 64, 128, 256  # rows of a tile of weights, of a matrix of many rows; columns
MANY = 1024  # rows of such a matrix
SUMMED = 64  # elements of a program that sums parts
SETTLED = 512  # channels of a program that sums parts and convolves


@triton.jit(do_not_specialize=["tokens"])
def part_kernel(
    xs, w, parts, norm, squares, normed, tiles, starts, stops, eps, tokens, rows, x_stride, w_stride,
    SQUARES: tl.constexpr,  # sums of squares of a row of x; 0: it is not to be normed
    BS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile [tokens, BN] of one part of a product [parts, tokens, rows]. Input i has the tiles from tiles[i] on, and
    rows starts[i] .. stops[i] of w."""
    pdl.trigger(PDL)
    own_tile = tl.program_id(0)
    x, first, start, stop = xs[0], tiles[0], starts[0], stops[0]
    for i in tl.static_range(1, len(xs)):
        if own_tile >= tiles[i]:
            x, first, start, stop = xs[i], tiles[i], starts[i], stops[i]
    n = start + (own_tile - first) * BN + tl.arange(0, BN)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    m = tl.arange(0, BM)
    held = tl.minimum(n, stop - 1).to(tl.int64)
    if K % BK == 0:
        own = tl.load(w + held[:, None] * w_stride + k[None, :], eviction_policy="evict_first")
    else:
        own = tl.load(w + held[:, None] * w_stride + k[None, :], mask=(k < K)[None, :], other=0.0)
    if SQUARES > 0:
        scale = tl.load(norm + k, mask=k < K, other=0.0)
    pdl.wait(PDL)
    mask = (m < tokens)[:, None] & (k < K)[None, :]
    a = tl.load(x + m[:, None] * x_stride + k[None, :], mask=mask, other=0.0)
    if SQUARES > 0:
        s = tl.arange(0, BS)[None, :]
        sums = tl.load(squares + m[:, None] * SQUARES + s, mask=(m < tokens)[:, None] & (s < SQUARES), other=0.0)
        a = a.to(tl.float32) * tl.rsqrt(tl.sum(sums, 1) / K + eps)[:, None] * scale[None, :]
        a = a.to(w.dtype.element_ty)
        if own_tile == 0:
            tl.store(normed + m[:, None] * K + k[None, :], a, mask=mask)
    out = tl.trans(tl.dot(own, tl.trans(a), input_precision="ieee"))
    to = parts + (tl.program_id(1) * tokens + m)[:, None] * rows + n[None, :]
    tl.store(to, out, mask=(m < tokens)[:, None] & (n < stop)[None, :])


@triton.jit
def summed(parts, next_part, at, mask, PARTS: tl.constexpr):
    """fp32 sum over the parts of a product; `at` is the place in each."""
    total = tl.load(parts + at, mask=mask, other=0.0, cache_modifier=".cg")
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * next_part + at, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def sum_kernel(parts, y, size, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    pdl.trigger(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pdl.wait(PDL)
    tl.store(y + at, summed(parts, size, at, at < size, PARTS).to(y.dtype.element_ty), mask=at < size)


@triton.jit
def keep_square(squares, out, t, mask):
    """Leave the sum of squares of a program's part of row t, whose programs are numbered along axis 1."""
    own = tl.where(mask, out.to(tl.float32), 0.0)
    tl.store(squares + t * tl.num_programs(1) + tl.program_id(1), tl.sum(own * own, 0))


@triton.jit(do_not_specialize=["tokens"])
def settle_kernel(
    parts, residual, y, squares, taps, plane, table, slots, row_of, positions, scale, conv_scale, tokens, rows,
    block_stride, token_stride, table_stride, tap_channel, tap_distance, x,
    W: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, RESIDUAL: tl.constexpr, PARTS: tl.constexpr,
    BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum, convolution and addition for tokens that are alone in their sequences. x gives the product's dtype."""
    pdl.trigger(PDL)
    t = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = n < rows
    here = t + tl.arange(0, 1)
    row, position, slot = tl.load(row_of + here), tl.load(positions + here), tl.load(slots + here)
    past = history(
        plane, table, taps, row, position, n, mask, block_stride, token_stride, table_stride,
        tap_channel, tap_distance, BLOCK, W,
    )  # fmt: skip
    own_tap = tl.load(taps + n * tap_channel + (W - 1) * tap_distance, mask=mask, other=0.0)
    pdl.wait(PDL)
    out = summed(parts, tokens * rows, t * rows + n, mask, PARTS).to(x.dtype.element_ty)
    if SCALED:
        out = (out.to(tl.float32) * tl.load(scale)).to(out.dtype)
    out = finish(out, past, own_tap, conv_scale, plane, slot, n, mask, block_stride, token_stride, BLOCK).to(tl.float32)
    if RESIDUAL:
        out += tl.load(residual + t * rows + n, mask=mask, other=0.0).to(tl.float32)
    out = out.to(y.dtype.element_ty)
    tl.store(y + t * rows + n, out, mask=mask)
    keep_square(squares, out, t, mask)


def in_parts(x: Tensor, weight: Tensor, norm: Normed | None = None) -> Tensor:
    """x [T, K] times `weight` [N, K] as fp32 parts [P, T, N], whose sum it is. Rows must be contiguous.

    With `norm`, x are its rows with known sums of squares; they are normed on the way, and `norm` has the normed ones.
    """
    return each_in_parts([x], weight, [len(weight)], norm)


def each_in_parts(xs: Sequence[Tensor], weight: Tensor, widths: Sequence[int], norm: Normed | None = None) -> Tensor:
    """`in_parts` of several inputs, each times its own `widths` of the rows of `weight`; `norm`: of a single one."""
    x, on = xs[0], pdl.supported(weight.device)
    (rows, length), tokens, strides = weight.shape, len(x), {each.stride() for each in xs}
    assert len(strides) == 1, f"inputs have strides {strides}; the kernel needs equal ones"
    bk = max(16, min(LENGTH, triton.next_power_of_2(length)))
    parts = torch.empty(triton.cdiv(length, bk), tokens, rows, dtype=torch.float32, device=x.device)
    scale, squares, normed, eps, number = x, x, x, 0.0, 0
    if norm is not None and norm.squares is not None:
        scale, squares, eps, number = norm.weight, norm.squares, norm.eps, norm.squares.shape[1]
        norm.normed = normed = torch.empty(tokens, length, dtype=weight.dtype, device=x.device)
    tile = MANY_ROWS if rows > MANY else ROWS
    tiles, stops = (tuple(accumulate(each)) for each in ([triton.cdiv(width, tile) for width in widths], widths))
    part_kernel[(tiles[-1], len(parts))](
        tuple(xs), weight, parts, scale, squares, normed, (0, *tiles[:-1]), (0, *stops[:-1]), stops, eps, tokens, rows,
        x.stride(0), weight.stride(0), number, triton.next_power_of_2(max(1, number)), length, bk,
        max(16, triton.next_power_of_2(tokens)), tile, on,
        num_warps=4, **pdl.launch(on),
    )  # fmt: skip
    return parts


def normed_in_parts(rows: Normed, weight: Tensor) -> Tensor:
    """`in_parts` of the normed rows; the norm is part of it where the sums of squares are known."""
    if rows.normed is None and rows.squares is not None and rows.rows.stride(1) == 1:
        return in_parts(rows.rows, weight, rows)
    return in_parts(rows.tensor(), weight)


def sum_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 parts [P, T, N] to their sum [T, N]."""
    number, tokens, rows = parts.shape
    out, on = torch.empty(tokens, rows, dtype=dtype, device=parts.device), pdl.supported(parts.device)
    sum_kernel[(triton.cdiv(out.numel(), SUMMED),)](
        parts, out, out.numel(), number, SUMMED, on, num_warps=1, **pdl.launch(on)
    )
    return out


def settle_parts(
    parts: Tensor,
    rows: Tensor,
    residual: Tensor | None,
    taps: Tensor,
    view: GroupView,
    packing: Packing,
    plane: int,
    scale: Tensor | None,
    conv_scale: float,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """What follows a product of `rows` in parts [P, T, C] in `settle`, for tokens that are alone in their sequences."""
    (number, tokens, channels), state, on = parts.shape, view.planes[plane], pdl.supported(parts.device)
    summed_dtype, blocks = rows.dtype if residual is None else residual.dtype, triton.cdiv(channels, SETTLED)
    out = torch.empty(tokens, channels, dtype=dtype or summed_dtype, device=parts.device)
    squares = torch.empty(tokens, blocks, dtype=torch.float32, device=parts.device)
    settle_kernel[(tokens, blocks)](
        parts, rows if residual is None else residual.contiguous(), out, squares, taps, state, view.table, view.slots,
        packing.row_of, packing.positions, rows if scale is None else scale, conv_scale, tokens, channels,
        state.stride(0), state.stride(1), view.table.stride(0), taps.stride(0), taps.stride(1), rows,
        taps.shape[1], view.block, scale is not None, residual is not None, number, SETTLED, on,
        num_warps=4, **pdl.launch(on),
    )  # fmt: skip
    return out, squares
