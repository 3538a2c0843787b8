"""Gated activations without strided or temporary halves."""

import torch
from torch import Tensor

from inkcap.ops.act.ref import swiglu_capped
from inkcap.ops.values import Caps


@swiglu_capped.implement("cpu", when=lambda device: device.type == "cpu")
def swiglu_capped_cpu(x: Tensor, caps: Caps) -> Tensor:
    """`swiglu_capped` of the reference."""
    gate, up = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    gate = gate.clone(memory_format=torch.contiguous_format)  # a strided sigmoid is not vectorised
    out = gate.sigmoid().mul_(gate.div_(caps.gate).tanh_())
    return out.mul_(torch.div(up, caps.up).tanh_()).mul_(caps.gate * caps.up).to(x.dtype)
