"""RMS norm of rows on a GPU, one program a row, each row read once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.norm.ref import embed_norm, rms_norm


@triton.jit
def norm_kernel(
    x,
    ids,
    weight,
    y,
    eps,
    x_stride,
    GATHER: tl.constexpr,  # the row is x[ids[program]]
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    at = tl.arange(0, BLOCK)
    scale = tl.load(weight + at, mask=at < C, other=0.0).to(tl.float32)
    if GATHER:  # first of a forward: nothing may start before what the step is made of is complete
        pdl.wait(PDL)
        pdl.trigger(PDL)
        row = tl.load(ids + tl.program_id(0)).to(tl.int64)
    else:
        pdl.trigger(PDL)
        pdl.wait(PDL)
        row = tl.program_id(0).to(tl.int64)
    own = tl.load(x + row * x_stride + at, mask=at < C, other=0.0).to(tl.float32)
    mean = tl.sum(own * own, 0) / C
    out = own * tl.rsqrt(mean + eps) * scale
    tl.store(y + tl.program_id(0).to(tl.int64) * C + at, out.to(y.dtype.element_ty), mask=at < C)


def warps(block: int) -> int:
    """32 elements a thread, within what a program can have."""
    return max(1, min(16, block // 1024))


@rms_norm.implement("triton", when=lambda device: device.type == "cuda", tokenwise=True)
def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """`rms_norm` of the reference."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(rows.shape, dtype=dtype or x.dtype, device=x.device)
    if len(rows):
        on, block = pdl.supported(x.device), triton.next_power_of_2(rows.shape[1])
        norm_kernel[(len(rows),)](
            rows, rows, weight, out, eps, rows.stride(0), False, rows.shape[1], block, on,
            num_warps=warps(block), **pdl.launch(on),
        )  # fmt: skip
    return out.view(x.shape)


@embed_norm.implement("triton", when=lambda device: device.type == "cuda", tokenwise=True)
def embed_norm_triton(ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`embed_norm` of the reference."""
    out = table.new_empty(len(ids), table.shape[1])
    if len(ids):
        on, block = pdl.supported(table.device), triton.next_power_of_2(table.shape[1])
        norm_kernel[(len(ids),)](
            table, ids, weight, out, eps, table.stride(0), True, table.shape[1], block, on,
            num_warps=warps(block), **pdl.launch(on),
        )  # fmt: skip
    return out
