"""The checking of grammars: each once, in a process that can be lost, and never more of them than there is room for."""

import asyncio

import pytest

from inkcap.base.errors import Overloaded
from inkcap.server import grammars
from inkcap.server.grammars import Grammars

GOOD = [(f'start: "{letter}"', "field") for letter in "abcd"]
BAD = ("start: nothing", "field")


@pytest.fixture
def checked():
    """Runs coroutines with one Grammars, and counts what its process is asked."""
    with asyncio.Runner() as runner:
        found = Grammars()
        asked = []
        ask = found._ask

        async def counted(process, grammar, seconds):
            asked.append(grammar)
            return await ask(process, grammar, seconds)

        found._ask = counted
        yield lambda *given: runner.run(found.errors(given)), asked, found
        runner.run(found.close())


def test_a_grammar_is_checked_once(checked):
    errors, asked, found = checked
    for _ in range(2):
        assert errors(GOOD[0], BAD, GOOD[0]) == {BAD[0]: pytest.approx(errors(BAD)[BAD[0]])}
    assert asked == [GOOD[0][0], BAD[0]]
    assert found.rejected == 4, "every request that came with one counts"


def test_verdicts_are_bounded_and_the_oldest_goes(checked, monkeypatch):
    errors, asked, _ = checked
    monkeypatch.setattr(grammars, "KEPT", 2)
    for one in (*GOOD[:3], GOOD[2], GOOD[0]):
        assert errors(one) == {}
    assert asked == [text for text, _ in (*GOOD[:3], GOOD[0])]


def test_what_takes_too_long_is_refused_and_the_next_is_checked_by_a_new_process(checked, monkeypatch):
    errors, _, found = checked
    assert errors(GOOD[0]) == {}
    first = found._process.pid
    monkeypatch.setattr(grammars, "GRAMMAR_SECONDS", 0.0)
    assert "takes longer than" in errors(GOOD[1])[GOOD[1][0]]
    monkeypatch.undo()
    assert errors(GOOD[2]) == {}
    assert found._process.pid != first


def test_all_grammars_of_a_request_share_a_deadline(checked, monkeypatch):
    errors, asked, _ = checked
    assert errors(GOOD[0]) == {}
    monkeypatch.setattr(grammars, "REQUEST_SECONDS", 0.0)
    assert "take longer than 0 s" in errors(GOOD[1])[GOOD[1][0]]
    assert asked == [GOOD[0][0]]


def test_requests_that_wait_are_bounded(checked, monkeypatch):
    errors, asked, _ = checked
    monkeypatch.setattr(grammars, "WAITING", 0)
    with pytest.raises(Overloaded, match="wait for their grammars"):
        errors(GOOD[0])
    assert asked == []
