"""A residual stream in blocks: sums of a few layers, which later layers read through learned mixtures of them all."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from inkcap.layers.batch import Batch
from inkcap.layers.sconv import ShortConv
from inkcap.ops.mix.ref import mix_norm
from inkcap.ops.values import Normed, Norms
from inkcap.parallel.slot import Slot

Value = TypeVar("Value", contravariant=True)
Inputs = tuple[Normed, ...]


class Reads(Protocol):
    """How a sublayer reads the stream."""

    def __call__(self, sources: list[Tensor], late: int) -> Inputs:
        """Finished blocks and the running sum last, [T, C] each, to the sublayer's inputs [T, C]; `late` of them, from
        the end, are of this layer."""
        ...


class Settles(Protocol[Value]):
    """The last product of a sublayer; see layers/stream.py."""

    def settle(
        self, rows: Value, residual: Tensor | None, conv: ShortConv, batch: Batch, *, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor | None]:
        """The new running sum [T, C] in `dtype`, or what begins one."""
        ...


def build_norms(names: tuple[str, ...], channels: int, eps: float, dtype: torch.dtype, device: torch.device) -> Norms:
    """One norm for each name, to the model's dtype."""
    return Norms(torch.empty(len(names), channels, dtype=torch.float32, device=device), eps, dtype)


def norm_slots(names: tuple[str, ...], norms: Norms) -> dict[str, Slot]:
    """`NAME.weight` [C] for each."""
    return {f"{name}.weight": Slot(row, tuple(row.shape)) for name, row in zip(names, norms.weight, strict=True)}


class BlockMix:
    """One learned query for each norm, or one mixture for all of them, in fp32; every rank holds all of it."""

    def __init__(self, name: str, queries: int, norm_names: tuple[str, ...], norms: Norms, eps: float) -> None:
        self.name = name
        self.norm_names = norm_names
        self.norms = norms
        self.queries = torch.empty(queries, norms.weight.shape[1], dtype=torch.float32, device=norms.weight.device)
        self.eps = eps

    def slots(self) -> dict[str, Slot]:
        """`NAME.query` [C], or [queries, C] when there are several, and the weights of the norms."""
        target = self.queries if len(self.queries) > 1 else self.queries[0]
        return {f"{self.name}.query": Slot(target, tuple(target.shape)), **norm_slots(self.norm_names, self.norms)}

    def __call__(self, sources: list[Tensor], late: int) -> Inputs:
        """One input for each query."""
        return mix_norm(sources, self.queries, self.eps, self.norms, late)


class RunningSum:
    """The read of a layer that has no mixture: the running sum itself, under each of the norms."""

    def __init__(self, norm_names: tuple[str, ...], norms: Norms) -> None:
        self.norm_names = norm_names
        self.norms = norms

    def slots(self) -> dict[str, Slot]:
        """The weights of the norms."""
        return norm_slots(self.norm_names, self.norms)

    def __call__(self, sources: list[Tensor], late: int) -> Inputs:
        """The last source, once for each norm."""
        return self.norms.later([sources[-1]] * len(self.norm_names))


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
        self.late = 1  # sources that may have been written since the last layer's experts began

    def write(
        self, rows: Value, out: Settles[Value], conv: ShortConv, batch: Batch, *, ends_layer: bool = False
    ) -> None:
        """Add a sublayer to the running sum, or begin one with it. `ends_layer`: the sum is rounded behind it.

        `rows` is what the sublayer's last product `out` multiplies. Settled in `batch`, so in the writer's visit.
        """
        self.settle()
        if ends_layer:
            self.late = 1
        base, dtype = self.partial, self.dtype if ends_layer else torch.float32
        self.undone = lambda: out.settle(rows, base, conv, batch, dtype=dtype)[0]

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

    def read(self, reads: Reads) -> Inputs:
        """What `reads` makes of the blocks and the running sum."""
        return reads([*self.blocks, self.current()], self.late)

    def close_block(self) -> None:
        """The running sum becomes a finished block; the next write begins a new sum."""
        self.blocks.append(self.current())
        self.partial = None
        self.late = 2

    def place(self) -> Place:
        """Where the stream stands between two layers."""
        return Place(tuple(self.blocks), self.current())

    def resume(self, place: Place) -> None:
        """Go on from `place`; the sums written since are forgotten, the state of their convolutions is kept."""
        self.settle()
        self.blocks, self.partial, self.late = list(place.blocks), place.partial, 1

    def tensors(self) -> tuple[Tensor, ...]:
        """What another stage needs to go on: the running sum, then the blocks."""
        return (self.current(), *self.blocks)
