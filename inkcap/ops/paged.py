"""Reading and writing state by absolute position: what the table and the slots mean."""

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
    tokens, blocks, offsets = kept(view)
    target = view.planes[plane]
    target.index_put_((blocks, offsets), (x if tokens is None else x[tokens]).to(target.dtype))


def kept(view: GroupView) -> tuple[Tensor | None, Tensor, Tensor]:
    """Which tokens of the step have slots, None for all of them, and their blocks and offsets."""
    found = view.memo.get("kept")
    if found is None:
        tokens = (view.slots >= 0).nonzero().squeeze(1)
        slots = view.slots[tokens]
        found = (None if len(tokens) == len(view.slots) else tokens, slots // view.block, slots % view.block)
        view.memo["kept"] = found
    return found  # pyright: ignore[reportReturnType]  # a memo has no types


def flatten(plane: Tensor) -> tuple[Tensor, int] | None:
    """A plane [blocks, block, ...] as rows [N, ...], of which block b starts at row b * n; returns the rows and n.

    None where a block's stride is no multiple of a token's. Rows between those of two blocks belong to other planes.
    """
    blocks, block = plane.shape[:2]
    between, step = plane.stride()[:2]
    if between % step:
        return None
    ratio = between // step
    rows = (blocks - 1) * ratio + block
    return plane.as_strided((rows, *plane.shape[2:]), plane.stride()[1:], plane.storage_offset()), ratio


def gather(view: GroupView, plane: int, blocks: Tensor, offsets: Tensor, name: str) -> Tensor:
    """State at any [N] blocks and offsets: [N, ...]. `name` tells these indices from others of the same step."""
    source = view.planes[plane]
    if (flat := flatten(source)) is None:
        return source[blocks, offsets]
    rows, ratio = flat
    index = view.memo.get((name, ratio))
    if index is None:
        index = blocks * ratio + offsets
        view.memo[name, ratio] = index
    return rows.index_select(0, index)  # pyright: ignore[reportArgumentType]  # a memo has no types
