"""The residual stream: what layers read from and write to, and the work between two layers."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor

from inkcap.layers.batch import Batch
from inkcap.layers.norm import RMSNorm
from inkcap.layers.sconv import ShortConv
from inkcap.ops.values import Normed

Value = TypeVar("Value", contravariant=True)


class Settles(Protocol[Value]):
    """The last product of a sublayer, with the sum over ranks, the convolution and the addition behind it."""

    def settle(
        self, rows: Value, residual: Tensor | None, conv: ShortConv, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """The new residual [T, C], or what begins one, and the sums of squares [T, P] of its parts where computed."""
        ...


class ResidualStream:
    """h <- h + conv(sublayer). `write` leaves its work undone until the next `read`, which can do it in one step."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden  # [T, C]
        self.squares: Tensor | None = None  # [T, P] fp32, of P parts of `hidden`
        self.undone: Callable[[], tuple[Tensor, Tensor | None]] | None = None

    def write(self, rows: Value, out: Settles[Value], conv: ShortConv, batch: Batch) -> None:
        """Add a sublayer: `rows` is what its last product `out` multiplies. Settled in the writer's `batch`."""
        self.settle()
        self.undone = lambda: out.settle(rows, self.hidden, conv, batch)

    def settle(self) -> None:
        """Do what the last `write` left."""
        if self.undone is not None:
            self.hidden, self.squares = self.undone()
            self.undone = None

    def read(self, norm: RMSNorm) -> Normed:
        """The stream as of now, to be normed by its consumers."""
        self.settle()
        return norm(self.hidden, self.squares)

    def tensors(self) -> tuple[Tensor, ...]:
        """What another stage needs to go on."""
        self.settle()
        return (self.hidden,)
