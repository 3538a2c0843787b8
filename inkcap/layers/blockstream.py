"""A residual stream in blocks: sums of a few layers, which later layers read through learned mixtures of them all."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from inkcap.layers.batch import Batch
from inkcap.layers.sconv import ShortConv
from inkcap.layers.stream import Settles
from inkcap.ops.mix.ref import mix
from inkcap.parallel.slot import Slot

Value = TypeVar("Value", contravariant=True)


class Reads(Protocol):
    """How a sublayer reads the stream."""

    def __call__(self, sources: list[Tensor]) -> tuple[Tensor, ...]:
        """Finished blocks and the running sum last, [T, C] each, to one [T, C] per input of the sublayer."""
        ...


class BlockMix:
    """One learned query for each input of a sublayer; every rank holds all of them, in fp32."""

    def __init__(self, channels: int, queries: int, eps: float, device: torch.device) -> None:
        self.queries = torch.empty(queries, channels, dtype=torch.float32, device=device)
        self.eps = eps

    def slots(self) -> dict[str, Slot]:
        """`query` [C], or [queries, C] when there are several."""
        target = self.queries if len(self.queries) > 1 else self.queries[0]
        return {"query": Slot(target, tuple(target.shape))}

    def __call__(self, sources: list[Tensor]) -> tuple[Tensor, ...]:
        """One fp32 mixture [T, C] for each query."""
        return mix(sources, self.queries, self.eps).unbind(0)


class RunningSum:
    """The read of a layer that has no mixture: the running sum itself, for each of `inputs`."""

    def __init__(self, inputs: int) -> None:
        self.inputs = inputs

    def slots(self) -> dict[str, Slot]:
        """Nothing."""
        return {}

    def __call__(self, sources: list[Tensor]) -> tuple[Tensor, ...]:
        """The last source, `inputs` times."""
        return (sources[-1],) * self.inputs


@dataclass(frozen=True, slots=True)
class Place:
    """A point of a stream to return to."""

    blocks: tuple[Tensor, ...]
    partial: Tensor


class BlockStream:
    """Finished blocks and the running sum, each [T, C]. The sum is rounded once a layer, in between it is fp32.

    As in ResidualStream, `write` leaves its work undone until something reads.
    """

    def __init__(self, hidden: Tensor) -> None:
        self.dtype = hidden.dtype
        self.blocks: list[Tensor] = []
        self.partial: Tensor | None = hidden  # None: a block was closed and nothing is written since
        self.undone: Callable[[], Tensor] | None = None

    def write(
        self, rows: Value, out: Settles[Value], conv: ShortConv, batch: Batch, *, ends_layer: bool = False
    ) -> None:
        """Add a sublayer to the running sum, or begin one with it. `ends_layer`: the sum is rounded behind it.

        `rows` is what the sublayer's last product `out` multiplies. Settled in `batch`, so in the writer's visit.
        """
        self.settle()
        base = None if self.partial is None else self.partial.float()
        dtype = self.dtype if ends_layer else torch.float32

        def work() -> Tensor:
            return out.settle(rows, base, conv, batch)[0].to(dtype)

        self.undone = work

    def settle(self) -> None:
        """Do what the last `write` left."""
        if self.undone is not None:
            self.partial = self.undone()
            self.undone = None

    def current(self) -> Tensor:
        """The running sum [T, C]."""
        self.settle()
        assert self.partial is not None, "nothing is written since close_block"
        return self.partial

    def read(self, reads: Reads) -> tuple[Tensor, ...]:
        """What `reads` makes of the blocks and the running sum."""
        return reads([*self.blocks, self.current()])

    def close_block(self) -> None:
        """The running sum becomes a finished block; the next write begins a new sum."""
        self.blocks.append(self.current())
        self.partial = None

    def place(self) -> Place:
        """Where the stream stands between two layers."""
        return Place(tuple(self.blocks), self.current())

    def resume(self, place: Place) -> None:
        """Go on from `place`; the sums written since are forgotten, the state of their convolutions is kept."""
        self.settle()
        self.blocks, self.partial = list(place.blocks), place.partial

    def tensors(self) -> tuple[Tensor, ...]:
        """What another stage needs to go on: the running sum, then the blocks."""
        return (self.current(), *self.blocks)
