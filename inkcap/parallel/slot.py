"""What a rank wants of a checkpoint: named places to fill, each with the part of a tensor that belongs there."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of a checkpoint as this rank keeps it.

    `target` is to be filled, converting its dtype, with indices [start, start + target.shape[dim]) along `dim` of a
    tensor of shape `whole`; with all of it when `dim` is None. It is a view into a parameter and may be strided, so it
    is filled with `copy_` and never replaced. Other dimensions of `target` and `whole` agree.
    """

    target: Tensor
    whole: tuple[int, ...]
    dim: int | None = None
    start: int = 0

    @property
    def stop(self) -> int:
        """End of the part along `dim`."""
        assert self.dim is not None, "a slot that takes everything has no stop"
        return self.start + self.target.shape[self.dim]

    def part(self, tensor: Tensor) -> Tensor:
        """The part of the whole `tensor` that `target` takes."""
        return tensor if self.dim is None else tensor.narrow(self.dim, self.start, self.target.shape[self.dim])

    def fill(self, tensor: Tensor) -> None:
        """Take this rank's part of the whole `tensor`."""
        assert tuple(tensor.shape) == self.whole, f"slot for {self.whole} got {tuple(tensor.shape)}"
        self.target.copy_(self.part(tensor))
