"""Ids, positions and slots against a loop over tokens."""

from random import Random

import pytest
import torch

from inkcap.base.request import SamplingParams
from inkcap.base.sampling import TokenRules
from inkcap.base.step import BlockEntry, Chunk, Continue, RowSetup, StepPlan
from inkcap.runner.build import build
from inkcap.runner.table import RowTable

GROUPS = {"full": 64, "sconv": 4}


def table(lengths: dict[int, int]) -> RowTable:
    made = RowTable(8, GROUPS, 1000, TokenRules(), torch.device("cpu"))
    made.open(
        [
            RowSetup(
                row=row,
                tokens=[row * 100 + i % 97 for i in range(length)],
                prompt_length=length,
                params=SamplingParams(),
                seed=0,
            )
            for row, length in lengths.items()
        ]
    )
    return made


def test_a_mixed_step_is_what_a_loop_makes_of_it():
    for seed in range(20):
        random = Random(seed)
        lengths = {row: random.randrange(1, 400) for row in random.sample(range(8), 5)}
        rows = table(lengths)
        held: dict[str, dict[tuple[int, int], int]] = {"full": {}, "sconv": {}}
        for group, block in GROUPS.items():
            ids = iter(random.sample(range(1, 5000), 2000))
            for row, length in lengths.items():
                for index in range(-(-length // block)):
                    if random.random() < 0.7:
                        held[group][row, index] = next(ids)
        rows.place({g: [BlockEntry(*place, block) for place, block in entries.items()] for g, entries in held.items()})
        work: list[Chunk | Continue] = []
        for row, length in lengths.items():
            if random.random() < 0.4:
                work.append(Continue(row))
                continue
            start = random.randrange(length)
            stop = random.randrange(start, length) + 1
            work.append(Chunk(row, start, stop, stop == length and random.random() < 0.5))
        step = build(StepPlan(step=1, work=work), rows, [])
        batch, packing = step.batch, step.batch.packing
        at, sampled = 0, []
        for number, entry in enumerate(work):
            length = lengths[entry.row]
            start, stop = (length - 1, length) if isinstance(entry, Continue) else (entry.start, entry.stop)
            assert packing.spans[number] == (at, at + stop - start, entry.row, start)
            assert packing.starts[number] == at
            assert packing.rows[number] == entry.row
            assert packing.first[number] == start
            for position in range(start, stop):
                assert batch.ids[at] == entry.row * 100 + position % 97
                assert packing.row_of[at] == entry.row
                assert packing.positions[at] == position
                for group, block in GROUPS.items():
                    owned = held[group].get((entry.row, position // block))
                    slot = -1 if owned is None else owned * block + position % block
                    assert batch.views[group].slots[at] == slot
                at += 1
            if isinstance(entry, Continue) or entry.samples:
                sampled.append((number, at - 1))
        assert packing.starts.tolist()[-1] == at == len(batch.ids)
        assert step.sampling == [number for number, _ in sampled]
        assert batch.sampled.tolist() == [index for _, index in sampled]


def test_dtypes_are_those_that_ops_expect():
    step = build(StepPlan(step=1, work=[Continue(2)]), table({2: 5}), [])
    packing, view = step.batch.packing, step.batch.views["full"]
    assert step.batch.ids.dtype == packing.positions.dtype == view.slots.dtype == torch.int64
    assert packing.starts.dtype == packing.rows.dtype == packing.first.dtype == packing.row_of.dtype == torch.int32
    assert view.table.dtype == torch.int32


def test_a_continue_runs_the_token_that_only_the_table_knows():
    rows = table({2: 5, 3: 5})
    rows.append([3], torch.tensor([777]))
    step = build(StepPlan(step=1, work=[Continue(3), Continue(2)]), rows, [])
    assert step.batch.ids.tolist() == [777, 204]
    assert step.batch.packing.positions.tolist() == [5, 4]


def test_block_tables_cover_every_position_of_a_growing_row():
    rows = table({1: 1})
    for _ in range(300):
        rows.append([1], torch.tensor([9]))
        step = build(StepPlan(step=1, work=[Continue(1)]), rows, [])
        for group, block in GROUPS.items():
            assert step.batch.views[group].table.shape[1] * block >= int(step.batch.packing.positions[0]) + 1


@pytest.mark.parametrize(
    ("work", "message"),
    [
        ([Chunk(2, 0, 6, False)], "row of 5 tokens"),
        ([Chunk(2, 3, 3, False)], "chunk"),
        ([Chunk(2, 0, 4, True)], "samples at 4"),
        ([Continue(4)], "row 4 is closed"),
        ([Continue(2, 3)], "3 drafts"),
        ([Chunk(2, 0, 2, False), Continue(2)], "two entries"),
    ],
)
def test_plans_that_only_a_bug_can_make_are_refused(work, message):
    with pytest.raises(AssertionError, match=message):
        build(StepPlan(step=1, work=work), table({2: 5}), [])
