"""Which units of a whole one rank holds. No torch: a rank's place is two numbers."""

from dataclasses import dataclass
from typing import Protocol

from inkcap.base.errors import ConfigInvalid


class Place(Protocol):
    """One of `size` ranks; every `Comm` is one."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Share:
    """Units [start, start + count) of `whole` units (heads, columns, words) that one rank holds."""

    start: int
    count: int
    whole: int

    def times(self, size: int) -> "Share":
        """The same share counted in parts of a unit, `size` to each."""
        return Share(self.start * size, self.count * size, self.whole * size)

    def check_blocks(self, size: int) -> None:
        """Raise ConfigInvalid when this share of an expert's columns begins or ends inside a block of `size`."""
        if self.whole % size or self.count % size:
            raise ConfigInvalid(
                f"a rank would hold {self.count} of an expert's {self.whole} columns, which scales of {size} columns "
                "each do not divide; choose a smaller parallel.tp"
            )


def split(whole: int, place: Place, what: str) -> Share:
    """An even share of `whole` units for the rank of `place`. Raises ConfigInvalid when it does not divide."""
    if whole % place.size:
        raise ConfigInvalid(
            f"{what} is {whole}, which {place.size} ranks cannot share evenly; choose another parallel.tp"
        )
    count = whole // place.size
    return Share(place.rank * count, count, whole)


def split_or_repeat(whole: int, place: Place, what: str) -> Share:
    """An even share, or one unit that several neighbouring ranks hold when there are more ranks than units.

    Raises ConfigInvalid when neither number divides the other.
    """
    if whole >= place.size:
        return split(whole, place, what)
    if place.size % whole:
        raise ConfigInvalid(
            f"{what} is {whole}, which {place.size} ranks cannot repeat evenly; choose another parallel.tp"
        )
    return Share(place.rank * whole // place.size, 1, whole)
