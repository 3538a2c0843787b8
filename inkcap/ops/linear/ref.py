"""Products with what stands around them: the norm before, and behind it the convolution and the residual addition."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from inkcap.ops.dispatch import op
from inkcap.ops.sconv.ref import sconv
from inkcap.ops.values import GroupView, Normed, Packing

LOGIT_COLUMNS = 16384  # words at once: bounds the fp32 copy of a bf16 head


@op
def project(rows: Normed, weight: Tensor) -> Tensor:
    """Normed rows [T, C] times `weight` [N, C]: [T, N]. The normed rows are rounded to their dtype first."""
    return F.linear(rows.tensor(), weight)


@op
def product(rows: Tensor, weight: Tensor) -> Tensor:
    """rows [T, N] times `weight` [C, N]: [T, C]. `settle` without what follows, for a sum over ranks in between."""
    return F.linear(rows, weight)


@op
def project_each(inputs: Sequence[Normed], weight: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """Several inputs [T, C], each times its own `widths` of the rows of `weight` [N, C]: [T, width] each."""
    parts = weight.split_with_sizes(list(widths))
    return tuple(F.linear(rows.tensor(), part) for rows, part in zip(inputs, parts, strict=True))


@op
def settle(
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
    """The end of a sublayer: residual + sconv(rows weight^T * scale) * conv_scale. Rounds after each of the three.

    rows: [T, N]; weight: [C, N]; residual: [T, C], not changed, fp32 where the sum is not to be rounded, None where it
    begins here; scale: [1] fp32; taps, view, plane and dtype as in `sconv`. Returns the new residual [T, C] and the
    sums of squares [T, P] fp32 of P parts of its rows, or None where whoever norms it computes them.
    """
    product = F.linear(rows, weight)
    if scale is not None:
        product = (product.float() * scale).to(product.dtype)
    settled = sconv(product, taps, view, packing, plane=plane, scale=conv_scale, residual=residual, dtype=dtype)
    return settled, None


@op
def logits(hidden: Tensor, weight: Tensor, scale: float, soft_cap: float | None = None) -> Tensor:
    """hidden [S, C] times `weight` [V, C], times `scale`: [S, V], accumulated and returned in fp32.

    With a soft cap c they become c * tanh(logit / c).
    """
    out = hidden.new_empty(len(hidden), len(weight), dtype=torch.float32)
    for start in range(0, len(weight), LOGIT_COLUMNS):
        part = weight[start : start + LOGIT_COLUMNS]
        out[:, start : start + len(part)] = F.linear(hidden.float(), part.float())
    out.mul_(scale)
    return out if soft_cap is None else out.div_(soft_cap).tanh_().mul_(soft_cap)
