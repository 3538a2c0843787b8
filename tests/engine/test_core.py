"""The loop over a rank that the test holds back step by step."""

import threading
from queue import SimpleQueue

import pytest
from conftest import DEADLINE, config
from fakes import FakeRank, token_at

from inkcap.base.errors import EngineFault
from inkcap.base.request import Finish, GenerateRequest, SamplingParams, TokenDelta
from inkcap.engine.core import build_core
from inkcap.engine.executor import LocalExecutor
from inkcap.engine.local import QueuePort
from inkcap.engine.wire import Abort, AskStats, Deltas, Drains, Fault, Shutdown, Stats, Submit


class HeldRank(FakeRank):
    """Runs a step only when the test lets it; `plans` are those that have reached it."""

    def __init__(self, settings):
        super().__init__(settings)
        self.go = threading.Semaphore(0)
        self.arrived = SimpleQueue()
        self.plans = []

    def run(self, plan):
        self.plans.append(plan)
        self.arrived.put(plan)
        assert self.go.acquire(timeout=DEADLINE), "the test let no step run"
        return super().run(plan)


class Bench:
    """A core in a thread, its rank and its messages."""

    def __init__(self, behaviour="{}", **sched):
        settings = config(behaviour, **sched)
        self.sent = SimpleQueue()
        self.port = QueuePort(self.sent.put)
        self.rank = None

        def load():
            self.rank = HeldRank(settings)
            return self.rank

        executor = LocalExecutor(load)
        self.core, _ = build_core(settings, self.port, executor, executor.facts)
        self.error = None
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self):
        try:
            self.core.run()
        except EngineFault as error:
            self.error = error
        self.core.executor.close()

    def submit(self, name, max_tokens=4, stop=(), prompt=(1, 2, 3)):
        params = SamplingParams(stop_token_ids=list(stop))
        self.port.post(
            Submit(
                GenerateRequest(request_id=name, token_ids=list(prompt), params=params, seed=5, max_tokens=max_tokens)
            )
        )

    def step(self, count=1):
        self.rank.go.release(count)

    def next_plan(self):
        return self.rank.arrived.get(timeout=DEADLINE)

    def message(self):
        return self.sent.get(timeout=DEADLINE)

    def end(self):
        self.port.post(Shutdown())
        self.rank.go.release(1000)
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive()


def test_a_step_is_planned_while_the_one_before_runs():
    bench = Bench()
    bench.submit("a", max_tokens=4)
    assert bench.next_plan().step == 1
    while not bench.core.executor._plans.qsize():  # step 2 is there before step 1 has a result
        assert not bench.thread.join(0.005)
    assert bench.sent.empty()
    bench.step()
    assert bench.message().deltas[0].tokens == [token_at(5, 3)]
    bench.end()


def test_a_row_that_finishes_while_its_next_step_is_in_flight_gives_nothing_more():
    bench = Bench()
    bench.submit("a", max_tokens=50, stop=[token_at(5, 4)])
    bench.submit("b", max_tokens=7)
    bench.step(1000)
    tokens, finishes = {"a": [], "b": []}, {}
    while len(finishes) < 2:
        for delta in bench.message().deltas:
            assert delta.request_id not in finishes, "a delta after the finish"
            tokens[delta.request_id] += delta.tokens
            if delta.finish:
                finishes[delta.request_id] = delta.finish
    assert finishes == {"a": Finish.STOP, "b": Finish.LENGTH}
    assert tokens == {"a": [token_at(5, 3), token_at(5, 4)], "b": [token_at(5, 3 + i) for i in range(7)]}
    wasted = sum(len(plan.work) for plan in bench.rank.plans) - len(tokens["a"]) - len(tokens["b"])
    assert wasted == 1, "the stop token is known one step late, the length in time"
    bench.end()


def test_a_row_is_taken_again_after_a_wasted_step():
    bench = Bench(rows=1)
    for name in "abc":
        bench.submit(name, max_tokens=9, stop=[token_at(5, 5)])
    bench.step(1000)
    tokens = {}
    finished = 0
    while finished < 3:
        for delta in bench.message().deltas:
            tokens.setdefault(delta.request_id, []).extend(delta.tokens)
            finished += delta.finish is Finish.STOP
    assert tokens == {name: [token_at(5, 3), token_at(5, 4), token_at(5, 5)] for name in "abc"}
    bench.end()


def test_an_abort_is_answered_while_a_step_runs():
    bench = Bench(rows=1)
    bench.submit("a", max_tokens=100)
    bench.submit("waits", max_tokens=100)
    bench.next_plan()
    bench.step()
    assert bench.message().deltas[0].request_id == "a"
    bench.port.post(Abort("waits"))
    bench.port.post(Abort("a"))
    bench.step(2)
    found = {}
    while len(found) < 2:
        for delta in bench.message().deltas:
            if delta.finish:
                found[delta.request_id] = delta.finish
    assert found == {"a": Finish.ABORT, "waits": Finish.ABORT}
    bench.step(10)
    bench.port.post(AskStats(7))
    answer = bench.message()
    assert isinstance(answer, Stats)
    assert answer.number == 7
    assert answer.stats.group_usage == {"full": 0.0}
    bench.end()


def test_an_idle_core_waits_and_wakes():
    bench = Bench()
    for name in "ab":
        bench.submit(name, max_tokens=1)
        bench.step()
        assert bench.message() == Deltas([bench_delta(name)])
    bench.end()
    assert [plan.step for plan in bench.rank.plans] == [1, 2]


def bench_delta(name):
    return TokenDelta(name, [token_at(5, 3)], finish=Finish.LENGTH, cached_tokens=0)


@pytest.mark.parametrize("how", ["drain", "end"])
def test_draining_finishes_what_is_open_and_refuses_the_rest(how):
    bench = Bench()
    bench.submit("open", max_tokens=6)
    bench.next_plan()
    getattr(bench.core, how)()
    bench.submit("new")
    bench.step(1000)
    finishes, announced = {}, 0
    while len(finishes) < 2:
        message = bench.message()
        announced += isinstance(message, Drains)
        for delta in message.deltas if isinstance(message, Deltas) else []:
            if delta.finish:
                finishes[delta.request_id] = (delta.finish, delta.error)
    assert announced == 1
    assert finishes == {"open": (Finish.LENGTH, None), "new": (Finish.ERROR, "the engine is shutting down")}
    if how == "drain":
        bench.port.post(AskStats(1))
        assert isinstance(bench.message(), Stats), "it waits to be told to end"
        bench.core.end()
    bench.thread.join(DEADLINE)
    assert not bench.thread.is_alive()
    assert bench.error is None


def test_an_idle_core_ends():
    bench = Bench()
    bench.core.end()
    bench.thread.join(DEADLINE)
    assert not bench.thread.is_alive()
    assert bench.message() == Drains()


def test_a_failing_step_is_the_last_message():
    bench = Bench('{"fail_at": 2}')
    bench.submit("a", max_tokens=100)
    bench.step(1000)
    bench.thread.join(DEADLINE)
    messages = []
    while not bench.sent.empty():
        messages.append(bench.sent.get())
    assert isinstance(messages[-1], Fault)
    assert "a planted bug" in messages[-1].message
    assert "a planted bug" in str(bench.error)


def test_a_stuck_scheduler_is_a_fault_and_not_a_hang(monkeypatch):
    bench = Bench()
    monkeypatch.setattr(bench.core.scheduler, "plan", lambda: None)
    bench.submit("a")
    bench.thread.join(DEADLINE)
    assert "none can run" in str(bench.error)


def test_requests_that_come_during_a_step_join_the_next_plan():
    bench = Bench()
    bench.submit("a", max_tokens=100)
    bench.next_plan()
    bench.submit("b", max_tokens=100)
    bench.step(3)
    plans = [bench.next_plan() for _ in range(3)]
    opened = [len(plan.opened) for plan in plans]
    assert sum(opened) == 1, "b joins as soon as a plan is made after it came"
    bench.end()


@pytest.mark.parametrize("load_error", [RuntimeError("no device"), KeyboardInterrupt()])
def test_what_loading_raises_reaches_the_caller(load_error):
    def load():
        raise load_error

    with pytest.raises(type(load_error)):
        LocalExecutor(load)
