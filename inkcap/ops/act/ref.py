"""Gated activations over interleaved halves."""

import torch
import torch.nn.functional as F
from torch import Tensor

from inkcap.ops.dispatch import op
from inkcap.ops.values import Caps


@op
def swiglu(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """silu(gate) * up * scale, fp32 inside and rounded once.

    x: [..., 2 I], gate and up of one unit side by side: g0 u0 g1 u1 ...; scale: [...] fp32. Returns [..., I].
    """
    gate, up = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    out = F.silu(gate.contiguous()).mul_(up)  # a strided silu is not vectorised: 36 instead of 20 us for 48 rows
    if scale is not None:
        out = out * scale.unsqueeze(-1)
    return out.to(x.dtype)


@op
def swiglu_capped(x: Tensor, caps: Caps) -> Tensor:
    """cap(gate) * sigmoid(gate) * cap(up), fp32 inside and rounded once; the sigmoid sees the gate without its cap.

    x: [..., 2 I], gate and up of one unit side by side. Returns [..., I].
    """
    gate, up = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    capped = caps.gate * torch.tanh(gate / caps.gate)
    return (capped * torch.sigmoid(gate) * (caps.up * torch.tanh(up / caps.up))).to(x.dtype)
