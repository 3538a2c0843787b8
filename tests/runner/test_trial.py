"""Steps that are tried at start: of all kinds, and without a trace."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from toy import Toy

from inkcap.ops.dispatch import bind
from inkcap.runner.trial import LONG, batch_of, spans_of_kinds, try_draws

CPU = torch.device("cpu")


@pytest.mark.parametrize(("rows", "step_tokens"), [(64, 8192), (3, 2), (1, 1), (300, 100)])
def test_steps_of_each_kind_are_steps(rows, step_tokens):
    kinds = [*spans_of_kinds(rows, step_tokens, 1 << 20)]
    for spans in kinds:
        assert spans[0][0] == 0
        assert all(before[1] == after[0] for before, after in pairwise(spans))
        assert all(start < stop for start, stop, _, _ in spans)
        assert len(spans) <= rows
        assert spans[-1][1] <= step_tokens
    assert max(spans[-1][1] for spans in kinds) == step_tokens
    assert max(map(len, kinds)) == min(rows, max(1, step_tokens - 1))
    ends = {first + stop - start for spans in kinds for start, stop, _, first in spans}
    assert max(ends) == LONG


def test_rows_are_no_longer_than_the_longest():
    for rows, step_tokens in ((4, 512), (64, 8192), (1, 8192)):
        kinds = [*spans_of_kinds(rows, step_tokens, 700)]
        assert max((first + stop - start for spans in kinds for start, stop, _, first in spans), default=700) == 700


def test_a_step_runs_and_names_no_block():
    batch = batch_of(Toy(CPU), ((0, 5, 0, 20), (5, 6, 1, 0)), 2, CPU)
    assert batch.packing.positions.tolist() == [20, 21, 22, 23, 24, 0]
    assert batch.packing.row_of.tolist() == [0, 0, 0, 0, 0, 1]
    assert batch.packing.starts.tolist() == [0, 5, 6]
    assert all((view.slots == -1).all() and not view.table.any() for view in batch.views.values())
    assert len(Toy(CPU).forward(batch)) == 6
    assert batch.sampled.tolist() == [0, 1]


def test_draws_of_all_kinds_run():
    bind(CPU)
    try_draws(500, CPU)


@pytest.mark.parametrize("family", ["inkling", "inkling2"])
def test_no_step_compiles_what_none_of_the_kinds_did(hopper, family):
    program = Path(__file__).with_name("compiling.py").read_text()
    done = hopper.run(program, family)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+ kernels\n", done.stdout), done.stdout
