"""Steps built by hand for tests of ops and models: state in shuffled blocks, NaN wherever nothing was stored."""

import random
from collections.abc import Sequence

import torch

from inkcap.cache.group import CacheGroup
from inkcap.cache.state import LayerState
from inkcap.layers.batch import Batch
from inkcap.ops.values import GroupView, Packing


class World:
    """State of a model's layers and the block tables of a few rows.

    Blocks come and go by the same formula as in the engine: what a step does not need any more is poisoned.
    """

    def __init__(self, states: Sequence[LayerState], rows: int = 4, length: int = 512, seed: int = 0) -> None:
        self.rows = rows
        self.groups: dict[str, CacheGroup] = {}
        self.tables: dict[str, torch.Tensor] = {}
        self.free: dict[str, list[int]] = {}
        self.arenas: dict[str, torch.Tensor] = {}
        self.planes: list[dict[str, tuple[torch.Tensor, ...]]] = [
            {} for _ in range(1 + max(state.visit for state in states))
        ]
        for name in dict.fromkeys(state.group for state in states):
            self.lay_out(name, [state for state in states if state.group == name], length, random.Random(seed))

    def lay_out(self, name: str, states: list[LayerState], length: int, order: random.Random) -> None:
        """One tensor for the group, all layers of a block side by side, as in the arena."""
        first = states[0]
        dtype = getattr(torch, first.planes[0].dtype)
        sizes = [[first.block * torch.Size(plane.shape).numel() for plane in state.planes] for state in states]
        width = sum(map(sum, sizes))
        blocks = 1 + self.rows * -(-length // first.block)
        arena = torch.full((blocks, width), float("nan"), dtype=dtype)
        at = 0
        for state, parts in zip(states, sizes, strict=True):
            planes = []
            for plane, size in zip(state.planes, parts, strict=True):
                planes.append(arena[:, at : at + size].unflatten(1, (first.block, *plane.shape)))
                at += size
            self.planes[state.visit][name] = tuple(planes)
        self.groups[name] = CacheGroup(name, first.block, width, first.window, first.reads_own_step)
        self.tables[name] = torch.zeros(self.rows, -(-length // first.block), dtype=torch.int32)
        self.free[name] = order.sample(range(1, blocks), blocks - 1)
        self.arenas[name] = arena

    def place(self, name: str, row: int, start: int, stop: int) -> None:
        """Give the row the blocks that tokens [start, stop) need, and take the others away."""
        group, table = self.groups[name], self.tables[name]
        needed = set(group.blocks(group.step_spans(start, stop, stop, 0, 1 << 30)))
        for index, block in enumerate(table[row].tolist()):
            if block and index not in needed:
                self.arenas[name][block] = float("nan")
                self.free[name].insert(0, block)
                table[row, index] = 0
            elif not block and index in needed:
                table[row, index] = self.free[name].pop()

    def batch(self, work: Sequence[tuple[int, int, Sequence[int]]]) -> Batch:
        """One step from (row, position of the first token, tokens) per sequence. All tokens' logits are wanted."""
        spans, ids, positions, row_of = [], [], [], []
        for row, first, tokens in work:
            spans.append((len(ids), len(ids) + len(tokens), row, first))
            ids += tokens
            positions += range(first, first + len(tokens))
            row_of += [row] * len(tokens)
            for name in self.groups:
                self.place(name, row, first, first + len(tokens))
        packing = Packing(
            starts=torch.tensor([0, *(stop for _, stop, _, _ in spans)], dtype=torch.int32),
            rows=torch.tensor([row for _, _, row, _ in spans], dtype=torch.int32),
            first=torch.tensor([first for _, _, _, first in spans], dtype=torch.int32),
            row_of=torch.tensor(row_of, dtype=torch.int32),
            positions=torch.tensor(positions, dtype=torch.int64),
            spans=tuple(spans),
        )
        views = {name: self.view(name, packing) for name in self.groups}
        return Batch(torch.tensor(ids), packing, torch.arange(len(ids)), views, self.planes)

    def view(self, name: str, packing: Packing) -> GroupView:
        """The step's view of one group."""
        block, table = self.groups[name].block, self.tables[name].clone()
        found = table[packing.row_of.long(), packing.positions // block].long()
        slots = torch.where(found > 0, found * block + packing.positions % block, -1)
        return GroupView(block, table, slots)
