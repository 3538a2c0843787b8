"""Ranks in processes of their own: results, failures, death."""

import os
import signal
import threading
import time

import pytest
from conftest import DEADLINE, config
from fakes import RANK, token_at
from test_client import alive

from inkcap.base.errors import CheckpointMismatch, EngineFault
from inkcap.base.request import SamplingParams
from inkcap.base.step import Chunk, Continue, RowSetup, StepPlan
from inkcap.engine.executor import ProcessExecutor


def plan(step, work, opened=()):
    return StepPlan(step=step, work=work, opened=list(opened))


OPENED = RowSetup(row=0, tokens=[1, 2, 3], prompt_length=3, params=SamplingParams(), seed=5)


@pytest.fixture
def start():
    """Start executors that are closed when the test ends."""
    made = []

    def make(behaviour="{}", size=2):
        woken = threading.Event()
        executor = ProcessExecutor(config(behaviour), size, woken.set, RANK)
        made.append(executor)
        return executor, woken

    yield make
    for executor in made:
        executor.close()
        assert not executor.folder.exists()


def test_plans_run_on_all_ranks_and_rank_0_answers_in_order(start):
    executor, _ = start()
    assert executor.facts.family == "fake"
    futures = [executor.submit(plan(1, [Chunk(0, 0, 3, True)], [OPENED]))]
    futures += [executor.submit(plan(step, [Continue(0)])) for step in range(2, 30)]
    results = [future.result(DEADLINE) for future in futures]
    assert [result.step for result in results] == list(range(1, 30))
    assert [result.rows[0].tokens for result in results] == [[token_at(5, 3 + i)] for i in range(29)]


def test_a_step_begins_before_the_one_before_ends(start):
    executor, _ = start('{"waits_at": 1}')
    first = executor.submit(plan(1, [Chunk(0, 0, 3, True)], [OPENED]))
    second = executor.submit(plan(2, [Continue(0)]))
    assert [first.result(DEADLINE).step, second.result(DEADLINE).step] == [1, 2]


def test_a_step_that_fails_once_it_is_waited_for_says_why(start):
    executor, woken = start('{"lost_at": 1, "only_rank": 1}')
    executor.submit(plan(1, [Chunk(0, 0, 3, True)], [OPENED]))
    assert woken.wait(DEADLINE)
    assert "rank 1 failed: RuntimeError: the device lost it" in executor.fault


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_in_a_step_fails_what_is_in_flight(start, rank):
    executor, woken = start(f'{{"die_at": 2, "only_rank": {rank}}}')
    executor.submit(plan(1, [Chunk(0, 0, 3, True)], [OPENED])).result(DEADLINE)
    executor.submit(plan(2, [Continue(0)]))
    assert woken.wait(DEADLINE)
    assert executor.fault == f"rank {rank} was killed by SIGKILL"
    with pytest.raises(EngineFault, match="SIGKILL"):
        executor.submit(plan(3, [Continue(0)]))


def test_a_rank_that_dies_between_steps_is_noticed(start):
    executor, woken = start()
    os.kill(executor.pids[1], signal.SIGKILL)
    assert woken.wait(DEADLINE)
    assert "rank 1 was killed by SIGKILL" in executor.fault


def test_a_rank_that_fails_says_why(start):
    executor, woken = start('{"fail_at": 1, "only_rank": 1}')
    executor.submit(plan(1, [Chunk(0, 0, 3, True)], [OPENED]))
    assert woken.wait(DEADLINE)
    assert "rank 1 failed: RuntimeError: a planted bug" in executor.fault


def test_a_rank_that_cannot_load_raises_what_it_raised():
    with pytest.raises(CheckpointMismatch, match="lacks 3 tensors"):
        ProcessExecutor(config('{"setup": "mismatch", "only_rank": 1}'), 2, lambda: None, RANK)


def test_ranks_that_disagree_are_refused():
    with pytest.raises(EngineFault, match="disagree"):
        ProcessExecutor(config('{"blocks": 7, "only_rank": 1}'), 2, lambda: None, RANK)


def test_ranks_end_with_their_engine(start):
    executor, _ = start()
    for rank in executor._ranks:
        rank.process.stdin.close()  # what the kernel does when the engine dies
    limit = time.monotonic() + DEADLINE
    while any(alive(pid) for pid in executor.pids):
        assert time.monotonic() < limit, "a rank outlived its engine"
        time.sleep(0.01)
    assert not executor.folder.exists()
