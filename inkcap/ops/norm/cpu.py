"""RMS norm in few calls."""

import torch
import torch.nn.functional as F
from torch import Tensor

from inkcap.ops.norm.ref import rms_norm


@rms_norm.implement("cpu", when=lambda device: device.type == "cpu")
def rms_norm_cpu(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """`rms_norm` of the reference, with the library's where everything is fp32 anyway."""
    if x.dtype == weight.dtype == torch.float32:
        out = F.rms_norm(x, weight.shape, weight, eps)
        return out if dtype is None else out.to(dtype)
    return rms_norm.reference(x, weight, eps, dtype)
