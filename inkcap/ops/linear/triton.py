"""Products on a GPU. One row: kernels that stream the weights, with all that surrounds the product inside. A few: in
parts, which the convolution's kernel sums. More: the library's product, norm before it and convolution behind it.

One row is normed without rounding the normed row in between; everything else rounds where the reference does.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.linear.device import chunks, fetch_all, multiply
from inkcap.ops.linear.few import in_parts, normed_in_parts, settle_parts, sum_parts
from inkcap.ops.linear.ref import logits, product, project, settle
from inkcap.ops.sconv.triton import convolve, finish, history
from inkcap.ops.values import GroupView, Normed, Packing

FEW = 16  # rows that are multiplied in parts
LARGE = 12 << 20  # elements of a matrix from which on the library is faster then


@triton.jit
def project_row(
    x, norm, w, y, eps, scale, soft_cap, rows, w_stride,
    NORMED: tl.constexpr, CAPPED: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr,
    BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.trigger(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    held = tl.minimum(n, rows - 1)
    w0, w1, w2, w3 = fetch_all(w + held[:, None].to(tl.int64) * w_stride, K, BK, CHUNKS)
    pdl.wait(PDL)
    out = multiply(w0, w1, w2, w3, x, norm, eps, NORMED, K, BK, CHUNKS) * scale
    if CAPPED:
        out = soft_cap * (2.0 * tl.sigmoid(2.0 * (out / soft_cap)) - 1.0)
    tl.store(y + n, out.to(y.dtype.element_ty), mask=n < rows)


@triton.jit
def settle_row(
    x, w, residual, y, taps, plane, table, slots, row_of, positions, scale, conv_scale, rows, w_stride,
    block_stride, token_stride, table_stride, tap_channel, tap_distance,
    W: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, RESIDUAL: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.trigger(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    mask = n < rows
    held = tl.minimum(n, rows - 1)
    w0, w1, w2, w3 = fetch_all(w + held[:, None].to(tl.int64) * w_stride, K, BK, CHUNKS)
    zero = tl.arange(0, 1)
    row, position, slot = tl.load(row_of + zero), tl.load(positions + zero), tl.load(slots + zero)
    past = history(
        plane, table, taps, row, position, n, mask, block_stride, token_stride, table_stride,
        tap_channel, tap_distance, BLOCK, W,
    )  # fmt: skip
    own_tap = tl.load(taps + n * tap_channel + (W - 1) * tap_distance, mask=mask, other=0.0)
    pdl.wait(PDL)
    out = multiply(w0, w1, w2, w3, x, x, 0.0, False, K, BK, CHUNKS)
    out = out.to(x.dtype.element_ty)
    if SCALED:
        out = (out.to(tl.float32) * tl.load(scale)).to(out.dtype)
    out = finish(out, past, own_tap, conv_scale, plane, slot, n, mask, block_stride, token_stride, BLOCK).to(tl.float32)
    if RESIDUAL:
        out += tl.load(residual + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + n, out.to(y.dtype.element_ty), mask=mask)


def tile(rows: int, length: int) -> tuple[int, int]:
    """(rows of a program, warps) for a matrix of `rows` rows of `length`; measured on an H200, see docs/kernels.md."""
    if length > 4096:
        return (2, 8) if rows < 4096 else (4, 8)
    return (8, 4) if length > 1024 else (8, 2)


def few(rows: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether a product has a few rows, of `dtype`, and a matrix whose parts cost less than they save."""
    fits = 1 < len(rows) <= FEW and weight.numel() <= LARGE and weight.stride(1) == rows.stride(1) == 1
    return fits and dtype == weight.dtype


def streams(rows: Tensor, weight: Tensor) -> bool:
    """Whether a product has one row and a matrix that the kernels for one row take."""
    return len(rows) == 1 and chunks(weight.shape[1])[1] > 0 and weight.stride(1) == 1 and rows.stride(1) == 1


def row_product(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, out: Tensor, *, normed: bool, scale: float, cap: float | None
) -> Tensor:
    """Launch `project_row`: x [1, K], weight [N, K], out [1, N], which it returns."""
    (rows, length), on = weight.shape, pdl.supported(x.device)
    (bn, warps), (bk, number) = tile(rows, length), chunks(length)
    project_row[(triton.cdiv(rows, bn),)](
        x, norm, weight, out, eps, scale, 1.0 if cap is None else cap, rows, weight.stride(0),
        normed, cap is not None, length, bk, number, bn, on,
        num_warps=warps, **pdl.launch(on),
    )  # fmt: skip
    return out


@project.implement("triton", when=lambda device: device.type == "cuda")
def project_triton(rows: Normed, weight: Tensor) -> Tensor:
    """`project` of the reference."""
    x = rows.rows
    if not streams(x, weight):
        if few(x, weight, rows.dtype):
            return sum_parts(normed_in_parts(rows, weight), rows.dtype)
        return F.linear(rows.tensor(), weight)
    out = torch.empty(1, len(weight), dtype=rows.dtype, device=x.device)
    if rows.normed is not None:
        return row_product(rows.normed, rows.weight, rows.eps, weight, out, normed=False, scale=1.0, cap=None)
    return row_product(x, rows.weight, rows.eps, weight, out, normed=True, scale=1.0, cap=None)


@product.implement("triton", when=lambda device: device.type == "cuda")
def product_triton(rows: Tensor, weight: Tensor) -> Tensor:
    """`product` of the reference."""
    if streams(rows, weight):
        out = torch.empty(1, len(weight), dtype=rows.dtype, device=rows.device)
        return row_product(rows, rows, 0.0, weight, out, normed=False, scale=1.0, cap=None)
    return sum_parts(in_parts(rows, weight), rows.dtype) if few(rows, weight, rows.dtype) else F.linear(rows, weight)


@settle.implement("triton", when=lambda device: device.type == "cuda")
def settle_triton(
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
    """`settle` of the reference. It leaves sums of squares of a few rows; who norms one row has it at hand anyway."""
    if not streams(rows, weight) and not (few(rows, weight, rows.dtype) and packing.widest == 1):
        product = F.linear(rows, weight)
        return convolve(product, taps, view, packing, plane, conv_scale, residual, before=scale, dtype=dtype), None
    if len(rows) > 1:
        parts = in_parts(rows, weight)
        return settle_parts(parts, rows, residual, taps, view, packing, plane, scale, conv_scale, dtype)
    (channels, length), state, on = weight.shape, view.planes[plane], pdl.supported(rows.device)
    summed = rows.dtype if residual is None else residual.dtype
    out = torch.empty(len(rows), channels, dtype=dtype or summed, device=rows.device)
    base = rows if residual is None else residual.contiguous()
    (bn, warps), (bk, number) = tile(channels, length), chunks(length)
    settle_row[(triton.cdiv(channels, bn),)](
        rows, weight, base, out, taps,
        state, view.table, view.slots, packing.row_of, packing.positions,
        rows if scale is None else scale, conv_scale, channels, weight.stride(0),
        state.stride(0), state.stride(1), view.table.stride(0), taps.stride(0), taps.stride(1),
        taps.shape[1], view.block, scale is not None, residual is not None, length, bk, number, bn, on,
        num_warps=warps, **pdl.launch(on),
    )  # fmt: skip
    return out, None


@logits.implement("triton", when=lambda device: device.type == "cuda")
def logits_triton(hidden: Tensor, weight: Tensor, scale: float, soft_cap: float | None = None) -> Tensor:
    """`logits` of the reference. Products of bf16 are exact in fp32, so no fp32 copy is needed."""
    if streams(hidden, weight):
        out = torch.empty(1, len(weight), dtype=torch.float32, device=hidden.device)
        return row_product(hidden, hidden, 0.0, weight, out, normed=False, scale=scale, cap=soft_cap)
    if hidden.dtype == weight.dtype == torch.float32:
        out = F.linear(hidden, weight)
    else:
        out = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    if scale != 1.0:
        out.mul_(scale)
    return out if soft_cap is None else out.div_(soft_cap).tanh_().mul_(soft_cap)
