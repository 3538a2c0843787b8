"""Which ranks work together on what: computed once from the sizes of the axes, as a value."""

from dataclasses import dataclass
from math import prod

from inkcap.base.errors import ConfigInvalid

AXES = ("tp", "ep", "pp", "dp")  # fastest first: the ranks of one tp group are neighbours, so on one host


@dataclass(frozen=True)
class Mesh:
    """One rank's place among `tp * ep * pp * dp` ranks. Rank = tp + TP * (ep + EP * (pp + PP * dp)).

    Raises ConfigInvalid for a size below 1 or a rank outside the mesh.
    """

    rank: int = 0
    tp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for axis, size in zip(AXES, self.shape, strict=True):
            if size < 1:
                raise ConfigInvalid(f"parallel.{axis} is {size}; it must be 1 or more")
        if not 0 <= self.rank < self.size:
            raise ConfigInvalid(f"rank is {self.rank}; a mesh of {self.size} has ranks 0 to {self.size - 1}")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes of the axes, in the order of `AXES`."""
        return self.tp, self.ep, self.pp, self.dp

    @property
    def size(self) -> int:
        """Ranks in the mesh."""
        return prod(self.shape)

    def place(self, axis: str) -> int:
        """This rank's index along `axis`."""
        at = AXES.index(axis)
        return self.rank // prod(self.shape[:at]) % self.shape[at]

    def group(self, axis: str) -> tuple[int, ...]:
        """Ranks that differ from this one along `axis` only, itself included, in order of their place."""
        at = AXES.index(axis)
        stride = prod(self.shape[:at])
        first = self.rank - self.place(axis) * stride
        return tuple(first + i * stride for i in range(self.shape[at]))
