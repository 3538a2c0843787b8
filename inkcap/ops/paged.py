"""Reading and writing state by absolute position, for references: what the table and the slots mean."""

import torch
from torch import Tensor

from inkcap.ops.values import GroupView


def read(view: GroupView, plane: int, row: int, start: int, stop: int) -> Tensor:
    """State of positions [start, stop) of a table row: [stop - start, ...]. Zero before position 0."""
    at = torch.arange(max(start, 0), stop, device=view.table.device)
    found = view.planes[plane][view.table[row, at // view.block].long(), at % view.block]
    if start < 0:
        found = torch.cat([found.new_zeros(min(stop, 0) - start, *found.shape[1:]), found])
    return found


def store(view: GroupView, plane: int, x: Tensor) -> None:
    """Put x [T, ...] at the slots of the step's tokens; tokens with slot -1 are not kept."""
    kept = (view.slots >= 0).nonzero().squeeze(1)
    slots = view.slots[kept]
    view.planes[plane][slots // view.block, slots % view.block] = x[kept].to(view.planes[plane].dtype)
