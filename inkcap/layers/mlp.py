"""The dense gated MLP."""

import torch
from torch import Tensor

from inkcap.layers.batch import Batch
from inkcap.layers.linear import Columns, Row, prefixed
from inkcap.layers.sconv import ShortConv
from inkcap.ops.act.ref import swiglu
from inkcap.ops.values import Normed
from inkcap.parallel.comm import Comm
from inkcap.parallel.share import split
from inkcap.parallel.slot import Slot


class GatedMlp:
    """SwiGLU between two products, and one learned scale behind them. Gate and up columns are interleaved."""

    def __init__(self, channels: int, units: int, comm: Comm, dtype: torch.dtype, device: torch.device) -> None:
        share = split(units, comm, "width of the dense MLP")
        self.w13 = Columns(channels, {"w13": share.times(2)}, dtype, device)
        self.w2 = Row(share, channels, comm, dtype, device)
        self.global_scale = torch.empty(1, dtype=torch.float32, device=device)

    def slots(self) -> dict[str, Slot]:
        """`w13.weight` [2 I, C], `w2.weight` [C, I] and `global_scale` [1]."""
        return {
            **self.w13.slots(),
            **prefixed("w2", self.w2.slots()),
            "global_scale": Slot(self.global_scale, (1,)),
        }

    def __call__(self, rows: Normed) -> Tensor:
        """Normed rows [T, C] to activations [T, this rank's units]."""
        return swiglu(*self.w13(rows))

    def settle(
        self, rows: Tensor, residual: Tensor | None, conv: ShortConv, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """The last product and what follows it; see `Row.settle`."""
        return self.w2.settle(rows, residual, conv, batch, self.global_scale)
