"""RMS norm with one rounding, at the end, as the serving stacks do it (transformers rounds before the weight too)."""

import torch
from torch import Tensor

from inkcap.ops.dispatch import op


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, fp32 inside, rounded to `dtype` or that of x.

    x: [..., C]; weight: [C].
    """
    rows = x.float()
    scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return (rows * scale * weight.float()).to(dtype or x.dtype)


@op
def embed_norm(ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows of `table` [V, C] at `ids` [T], normed: [T, C] in the table's dtype."""
    return rms_norm(table[ids], weight, eps)
