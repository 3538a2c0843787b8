"""RMS norm as a layer: it marks rows to be normed and leaves the arithmetic to their consumer."""

import torch
from torch import Tensor

from inkcap.ops.values import Normed
from inkcap.parallel.slot import Slot


class RMSNorm:
    """Weight [C], fp32 because the norm is computed so; every rank holds all of it.

    The normed rows have `dtype`, or that of the rows.
    """

    def __init__(self, channels: int, eps: float, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self.weight = torch.empty(channels, dtype=torch.float32, device=device)
        self.eps = eps
        self.dtype = dtype

    def slots(self) -> dict[str, Slot]:
        """`weight` [C]."""
        return {"weight": Slot(self.weight, tuple(self.weight.shape))}

    def __call__(self, rows: Tensor, squares: Tensor | None = None) -> Normed:
        """rows [T, C] and, where known, the sums of squares [T, P] of their parts."""
        return Normed(rows, self.weight, self.eps, squares, self.dtype)
