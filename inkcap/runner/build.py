"""StepPlan and row table to Batch: which tokens run, at which positions, and where their state goes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inkcap.base.step import Chunk, Continue, StepPlan
from inkcap.layers.batch import Batch
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
    device = table.device
    sampling = [i for i, work in enumerate(plan.work) if isinstance(work, Continue) or work.samples]
    columns = [*zip(*spans, strict=True)]
    starts, stops, row_ids, first = upload(columns, torch.int64, device).unbind()  # [R] each
    widths = stops - starts
    row_of = row_ids.repeat_interleave(widths, output_size=at)  # [T]
    positions = torch.arange(at, device=device) + (first - starts).repeat_interleave(widths, output_size=at)  # [T]
    packing = Packing(
        starts=torch.nn.functional.pad(stops, (1, 0)).to(torch.int32),
        rows=row_ids.to(torch.int32),
        first=first.to(torch.int32),
        row_of=row_of.to(torch.int32),
        positions=positions,
        spans=tuple(spans),
    )
    last = stops - 1
    batch = Batch(
        ids=table.tokens[row_of, positions].to(torch.int64),
        packing=packing,
        sampled=last[upload(sampling, torch.int64, device)] if len(sampling) < len(spans) else last,
        views={group: view_of(table.tables[group], block, row_of, positions) for group, block in table.groups.items()},
        planes=planes,
    )
    return Step(batch, sampling)


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


def view_of(table: Tensor, block: int, row_of: Tensor, positions: Tensor) -> GroupView:
    """Where tokens [T] of one cache group go, without planes."""
    blocks = table[row_of, positions // block].to(torch.int64)  # [T]
    slots = torch.where(blocks > 0, blocks * block + positions % block, -1)
    return GroupView(block=block, table=table, slots=slots)
