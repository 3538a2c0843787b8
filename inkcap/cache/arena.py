"""The memory behind the cache groups: one byte tensor, seen by each group as an array of its own blocks."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from inkcap.base.step import BlockMove
from inkcap.cache.state import LayerState, Plane, plane_bytes
from inkcap.ops.blocks.ref import copy_blocks


class Arena:
    """State of all layers on one rank. A block holds the planes of all visits one after another, so it moves as one.

        memory, as a group sees it | block 0            | block 1            | ...
        one block                  | visit 0: k, v | visit 3: k, v | ...       each plane [block, *shape], padded

    Groups share `size_bytes`: blocks of different groups lie over one another, and who holds blocks sees to it that a
    byte is in one held block at a time (see plan.Layout). Block 0 belongs to nobody. Memory is not cleared: what was
    never written may hold anything, NaN included, and no reader may depend on it.
    """

    def __init__(self, states: Sequence[LayerState], size_bytes: int, device: torch.device) -> None:
        visits = 1 + max((state.visit for state in states), default=-1)
        self.memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.storage: dict[str, Tensor] = {}  # group -> [blocks, bytes of a block] uint8
        self.planes: list[dict[str, tuple[Tensor, ...]]] = [{} for _ in range(visits)]
        for group in dict.fromkeys(state.group for state in states):
            members = sorted((s for s in states if s.group == group), key=lambda s: s.visit)
            size = sum(plane_bytes(plane, state.block) for state in members for plane in state.planes)
            storage = self.memory[: size_bytes // size * size].view(-1, size)
            self.storage[group] = storage
            offset = 0
            for state in members:
                assert group not in self.planes[state.visit], f"visit {state.visit} declares {group} twice"
                views = []
                for plane in state.planes:
                    views.append(_view(storage, offset, plane, state.block))
                    offset += plane_bytes(plane, state.block)
                self.planes[state.visit][group] = tuple(views)

    def copy(self, moves: Sequence[BlockMove]) -> None:
        """Copy whole blocks; all sources are read before a target is written."""
        for group in {move.group for move in moves}:
            pairs = [(move.source, move.target) for move in moves if move.group == group]
            storage = self.storage[group]
            host = torch.tensor(pairs, pin_memory=storage.is_cuda)  # pinned: the copy is queued, not waited for
            source, target = host.to(storage.device, non_blocking=True).unbind(1)  # [moves] each
            copy_blocks(storage, source, target)


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of that name; "float8_e4m3fn" is a name like any other."""
    dtype = vars(torch).get(name)
    assert isinstance(dtype, torch.dtype), f"{name!r} is not a dtype"
    return dtype


def _view(storage: Tensor, offset: int, plane: Plane, block: int) -> Tensor:
    """[blocks, block, *shape] of `plane`, whose bytes start `offset` into every block."""
    dtype = dtype_of(plane.dtype)
    span = storage[:, offset : offset + block * prod(plane.shape) * dtype.itemsize]
    return span.view(dtype).unflatten(1, (block, *plane.shape))
