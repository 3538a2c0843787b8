"""StepPlan and row table to Batch: which tokens run, at which positions, and where their state goes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inkcap.base.step import Chunk, Continue, StepPlan
from inkcap.layers.batch import Batch
from inkcap.ops.rows.ref import spread
from inkcap.ops.values import GroupView, Packing
from inkcap.runner.table import RowTable
from inkcap.runner.transfer import upload


@dataclass(frozen=True, slots=True)
class Step:
    """A batch, and which entries of the plan's work its sampled tokens belong to."""

    batch: Batch
    sampling: list[int]  # [S] indices into `work`, in order


def build(plan: StepPlan, table: RowTable, planes: Sequence[Mapping[str, tuple[Tensor, ...]]]) -> Step:
    """The device inputs of one step. The plan's rows are open and its blocks placed.

    A `Continue` runs the newest token its row has. Positions and slots come from the table; the state of a token
    whose block the plan did not give gets slot -1.
    """
    spans: list[tuple[int, int, int, int]] = []
    rows: list[int] = []
    at = 0
    for work in plan.work:
        first, stop = range_of(work, table)
        spans.append((at, at + stop - first, work.row, first))
        rows.append(work.row)
        at += stop - first
    assert len(set(rows)) == len(rows), f"step {plan.step} has two entries for one row"
    sampling = [i for i, work in enumerate(plan.work) if isinstance(work, Continue) or work.samples]
    ids, packing, views = laid_out(spans, table)
    sampled = upload([spans[i][1] - 1 for i in sampling], torch.int64, table.device)
    return Step(Batch(ids, packing, sampled, views, planes), sampling)


def laid_out(
    spans: Sequence[tuple[int, int, int, int]], table: RowTable
) -> tuple[Tensor, Packing, dict[str, GroupView]]:
    """Ids [T] of the tokens of `spans`, see `Packing`, how they are packed, and where they go, without planes."""
    count, room = spans[-1][1], len(spans) // 4 * 4 + 4  # each part begins at a multiple of 16 bytes: kernels want it
    begins, _, rows_of, firsts = zip(*spans, strict=True)
    parts = [(*begins, count), rows_of, firsts]
    packed = [number for part in parts for number in (*part, *[0] * (room - len(part)))]
    uploaded = upload(packed, torch.int32, table.device).split(room)
    starts, rows, first = (own[: len(part)] for own, part in zip(uploaded, parts, strict=True))
    ids, row_of, positions, slots = spread(
        starts, rows, first, table.tokens, [*table.tables.values()], [*table.groups.values()], count
    )  # fmt: skip
    views = {
        group: GroupView(block, table.tables[group], own)
        for (group, block), own in zip(table.groups.items(), slots, strict=True)
    }
    return ids, Packing(starts, rows, first, row_of, positions, tuple(spans)), views


def range_of(work: Chunk | Continue, table: RowTable) -> tuple[int, int]:
    """Positions [first, stop) that an entry runs."""
    table.setup(work.row)  # the row is open
    known = table.host_lengths[work.row]
    if isinstance(work, Continue):
        assert work.drafts == 0, f"row {work.row} continues with {work.drafts} drafts, but there is no drafter"
        return known - 1, known
    assert 0 <= work.start < work.stop <= known, f"chunk [{work.start}, {work.stop}) of a row of {known} tokens"
    assert not work.samples or work.stop == known, f"row {work.row} samples at {work.stop} but has {known} tokens"
    return work.start, work.stop
