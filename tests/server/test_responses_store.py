"""What is kept, what is forgotten first, and what never is."""

from dataclasses import dataclass, field

import pytest

from inkcap.server.responses_store import NoSuchResponse, ResponseStore


@dataclass
class Fake:
    identity: str
    size_bytes: int = 10
    running: bool = False
    ended: list[str] = field(default_factory=list)

    def reply(self):
        raise AssertionError("nobody asks")

    def conversation(self):
        return []

    def cancel(self):
        self.ended.append(self.identity)


def kept(store):
    return list(store.entries)


def test_the_oldest_go_when_there_are_too_many_or_they_are_too_large():
    store = ResponseStore(3, 100)
    for name in "abcd":
        store.keep(Fake(name))
    assert kept(store) == ["b", "c", "d"]
    store.keep(Fake("large", size_bytes=85))
    assert kept(store) == ["d", "large"]
    store.keep(Fake("huge", size_bytes=1000))
    assert kept(store) == ["huge"]  # the newest stays, whatever its size


def test_one_that_runs_is_not_forgotten():
    store = ResponseStore(2, 100)
    store.keep(Fake("runs", running=True))
    for name in "abc":
        store.keep(Fake(name))
    assert kept(store) == ["runs", "c"]


def test_none_is_kept_where_none_may_be():
    store = ResponseStore(0, 100)
    store.keep(Fake("a"))
    with pytest.raises(NoSuchResponse, match="keeps the newest 0"):
        store.get("a")


def test_forgetting_ends_it():
    store = ResponseStore(2, 100)
    one = Fake("a", running=True)
    store.keep(one)
    store.forget("a")
    assert one.ended == ["a"]
    with pytest.raises(NoSuchResponse) as caught:
        store.forget("a")
    assert (caught.value.status, caught.value.param) == (404, "response_id")
