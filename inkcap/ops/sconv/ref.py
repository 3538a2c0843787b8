"""Short causal convolution of packed tokens over paged history."""

import torch
from torch import Tensor

from inkcap.ops import paged
from inkcap.ops.dispatch import op
from inkcap.ops.values import GroupView, Packing


def plus(residual: Tensor | None, x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """residual + x, rounded once to `dtype`, by default that of the sum; x alone where there is no residual."""
    if residual is None:
        return x if dtype is None else x.to(dtype)
    rounded = torch.promote_types(residual.dtype, x.dtype) if dtype is None else dtype
    return (residual.to(torch.promote_types(residual.dtype, torch.float32)) + x).to(rounded)


@op
def sconv(
    x: Tensor,
    taps: Tensor,
    view: GroupView,
    packing: Packing,
    *,
    plane: int,
    scale: float = 1.0,
    residual: Tensor | None = None,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """y[t] = (x[t] + sum_i taps[i] x[t - W + 1 + i]) * scale, fp32 inside, rounded once; then `plus` the residual.

    x: [T, C] of the plane's dtype; taps: [C, W], the last one for the token itself, or [T, heads, W], one set per token
    and group of C / heads channels. added: [T, heads, W] to add to taps [C, W], by distance: its first one is for the
    token itself.
    Inputs of this step come from x, older ones from `view.planes[plane]`
    [blocks, block, C], and are zero before position 0. Writes x at each token's slot. Returns [T, C].
    """
    width = taps.shape[-1]
    channels = x.shape[1]
    out = torch.empty_like(x)
    for start, stop, row, first in packing.spans:
        past = paged.read(view, plane, row, first - width + 1, first)  # [W - 1, C]
        inputs = torch.cat([past, x[start:stop]]).float()  # [W - 1 + n, C]
        total = inputs[width - 1 :]
        for i in range(width):
            tap = (
                taps[:, i]
                if taps.dim() == 2
                else taps[start:stop, :, i].repeat_interleave(channels // taps.shape[1], 1)
            )
            if added is not None:
                tap = tap + added[start:stop, :, width - 1 - i].repeat_interleave(channels // added.shape[1], 1)
            total = total + inputs[i : i + stop - start] * tap.float()
        out[start:stop] = (total * scale).to(x.dtype)
    paged.store(view, plane, x)
    return plus(residual, out, dtype)
