"""A sequence's status makes legal moves only."""

import pytest

from inkcap.base.request import Finish, GenerateRequest, SamplingParams
from inkcap.cache.manager import Holding
from inkcap.sched.sequence import Sequence, Status


def sequence() -> Sequence:
    request = GenerateRequest(request_id="r", token_ids=[1, 2], params=SamplingParams(), seed=0, max_tokens=5)
    return Sequence(request, frozenset(), None, 1)


def stay(of: Sequence, start: int = 0) -> Holding:
    return Holding(of.tokens, None, start, 3)


def test_it_waits_runs_waits_again_and_ends() -> None:
    one = sequence()
    one.start(3, stay(one))
    assert (one.status, one.row, one.limit) == (Status.RUNNING, 3, 7)
    one.tokens += [8, 9]
    one.preempt()
    assert (one.status, one.holding) == (Status.WAITING, None)
    one.start(1, stay(one, 1))
    assert (one.row, one.low, one.high, one.generated) == (1, 1, 1, 2)
    one.end(Finish.STOP)
    assert (one.status, one.finish) == (Status.FINISHED, Finish.STOP)


def test_illegal_moves_are_refused() -> None:
    one = sequence()
    with pytest.raises(AssertionError, match="r cannot be preempted: waiting"):
        one.preempt()
    one.start(0, stay(one))
    with pytest.raises(AssertionError, match="r cannot start: it is running"):
        one.start(0, stay(one))
    one.end(Finish.ABORT)
    with pytest.raises(AssertionError, match="r cannot end twice"):
        one.end(Finish.STOP)
    with pytest.raises(AssertionError, match="r cannot start: it is finished"):
        one.start(0, stay(one))
