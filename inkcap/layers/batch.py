"""The only thing a layer gets besides its input: every device-side input of one step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from inkcap.ops.values import GroupView, Packing


@dataclass(frozen=True, slots=True)
class Batch:
    """T packed tokens of R sequences. `views` maps a cache group's name to its view, without planes.

    `at(visit)` binds the planes of one visit; inside it `view(group)` has that visit's tensors.
    """

    ids: Tensor  # [T] int64
    packing: Packing
    sampled: Tensor  # [S] int64: indices of the tokens whose logits are wanted
    views: Mapping[str, GroupView]
    planes: Sequence[Mapping[str, tuple[Tensor, ...]]]  # per visit: group name -> planes, in the order declared
    bound: int | None = None

    def at(self, visit: int) -> "Batch":
        """The same step as the layer of `visit` sees it."""
        return Batch(self.ids, self.packing, self.sampled, self.views, self.planes, visit)

    def view(self, group: str) -> GroupView:
        """The bound visit's view of `group`."""
        assert self.bound is not None, "Batch.view needs Batch.at(visit) first"
        view = self.views[group]
        return GroupView(view.block, view.table, view.slots, self.planes[self.bound][group], view.memo)
