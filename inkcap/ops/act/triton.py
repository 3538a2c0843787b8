"""Gated activations on a GPU, each input read once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.act.ref import swiglu, swiglu_capped
from inkcap.ops.values import Caps

BLOCK = 1024  # units of a program, of as many rows as they make; 10.5 us for 16,384 rows of 384, 22 by single rows


@triton.jit
def gated(x, gate_cap, up_cap, CAPPED: tl.constexpr, N: tl.constexpr):
    """fp32 [N] with gate and up of a unit side by side to activations [N / 2], with soft caps where CAPPED."""
    gate, up = tl.split(tl.reshape(x, [N // 2, 2]))
    own = gate * tl.sigmoid(gate)
    if CAPPED:
        # cap * tanh(x / cap), the tanh as a sigmoid
        own = gate_cap * (2.0 * tl.sigmoid(2.0 / gate_cap * gate) - 1.0) * tl.sigmoid(gate)
        up = up_cap * (2.0 * tl.sigmoid(2.0 / up_cap * up) - 1.0)
    return own * up


@triton.jit(do_not_specialize=["count"])
def gated_kernel(
    x, scale, y, count, gate_cap, up_cap,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, UNITS: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.trigger(PDL)
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    unit = tl.program_id(0).to(tl.int64) * (N // 2) + tl.arange(0, N // 2)
    pdl.wait(PDL)
    own = tl.load(x + at, mask=at < 2 * count, other=0.0).to(tl.float32)
    out = gated(own, gate_cap, up_cap, CAPPED, N)
    if SCALED:
        out *= tl.load(scale + unit // UNITS, mask=unit < count, other=0.0)
    tl.store(y + unit, out.to(y.dtype.element_ty), mask=unit < count)


def activate(x: Tensor, scale: Tensor | None, caps: Caps | None) -> Tensor:
    """Both activations of the reference."""
    units, x = x.shape[-1] // 2, x.contiguous()
    out = torch.empty(*x.shape[:-1], units, dtype=x.dtype, device=x.device)
    if count := out.numel():
        on, block = pdl.supported(x.device), min(2 * BLOCK, triton.next_power_of_2(2 * count))
        gated_kernel[(triton.cdiv(2 * count, block),)](
            x, x if scale is None else scale.contiguous(), out, count,
            1.0 if caps is None else caps.gate, 1.0 if caps is None else caps.up,
            scale is not None, caps is not None, units, block, on,
            num_warps=max(1, block // 256), **pdl.launch(on),
        )  # fmt: skip
    return out


@swiglu.implement("triton", when=lambda device: device.type == "cuda", tokenwise=True)
def swiglu_triton(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """`swiglu` of the reference."""
    return activate(x, scale, None)


@swiglu_capped.implement("triton", when=lambda device: device.type == "cuda", tokenwise=True)
def swiglu_capped_triton(x: Tensor, caps: Caps) -> Tensor:
    """`swiglu_capped` of the reference."""
    return activate(x, None, caps)
