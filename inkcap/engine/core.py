"""The loop: take requests, plan, submit, apply, emit. One step is planned while the last one runs. No torch."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from inkcap.base.config import EngineConfig
from inkcap.base.errors import EngineFault, InkcapError
from inkcap.base.log import logger
from inkcap.base.request import EngineInfo, Finish, GenerateRequest, TokenDelta
from inkcap.engine.executor import Executor, RankFacts, Underway
from inkcap.engine.wire import Abort, AskStats, Deltas, Drains, Fault, FromEngine, Shutdown, Stats, Submit, ToEngine
from inkcap.sched.scheduler import Scheduler, build_scheduler


class Port(Protocol):
    """The core's end of its connection to a client."""

    def receive(self, block: bool) -> Sequence[ToEngine]:
        """What has come; with `block`, waits for a message or for `wake`."""
        ...

    @property
    def send(self) -> Callable[[FromEngine], None]:
        """Hands one message on; never blocks."""
        ...

    def wake(self) -> None: ...


class Core:
    """A scheduler, an executor and a connection. All but `drain` and `end` belongs to the thread of `run`."""

    def __init__(self, scheduler: Scheduler, executor: Executor, port: Port) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.port = port
        self.in_flight: deque[Underway] = deque()
        self.outbox: list[TokenDelta] = []
        self.stopping = False
        self.draining = False
        self.ending = False
        self.announced = False  # the client knows that it drains

    def run(self) -> None:
        """Work until told to stop, or drained. Raises EngineFault after telling the client, when a step fails."""
        try:
            while not self.stopping:
                self._turn()
        except Exception as error:  # whatever it was, no open sequence may wait for ever
            cause = str(error) if isinstance(error, InkcapError) else f"{type(error).__name__}: {error}"
            logger.error("a step failed; %d open sequences end with it", self.scheduler.unfinished, exc_info=error)
            self.port.send(Fault(cause))
            raise EngineFault(cause) from error

    def drain(self) -> None:
        """Take no new sequences. Safe in a signal handler and in any thread."""
        self.draining = True
        self.port.wake()

    def end(self) -> None:
        """Take no new sequences, finish the open ones, then end `run`. Safe in a signal handler and in any thread."""
        self.ending = True
        self.drain()

    def _turn(self) -> None:
        """One round of the loop. Blocks only while there is nothing to do at all, or for the oldest step in flight."""
        self._take(block=False)
        self._emit()  # aborts and refusals need not wait for a step
        plan = None if self.stopping else self.scheduler.plan()
        if plan is not None:
            self.in_flight.append(self.executor.submit(plan))
        if self.in_flight and (len(self.in_flight) > self.executor.depth or plan is None):
            self._finish_oldest()
        elif plan is None and not self.stopping:
            if self.scheduler.unfinished:
                raise EngineFault(f"{self.scheduler.unfinished} sequences are open but none can run: a bug of ours")
            self._take(block=True)
        self._emit()

    def _take(self, block: bool) -> None:
        if self.executor.fault is not None:
            raise EngineFault(self.executor.fault)
        for message in self.port.receive(block and not self.ending):
            match message:
                case Submit(request):
                    self._open(request)
                case Abort(request_id):
                    if (delta := self.scheduler.abort(request_id)) is not None:
                        self.outbox.append(delta)
                case AskStats(number):
                    self.port.send(Stats(number, self.scheduler.stats()))
                case Shutdown():
                    self.stopping = True
        if self.draining and not self.announced:
            self.announced = True
            self.port.send(Drains())
        if self.ending and not self.scheduler.unfinished and not self.in_flight:
            self.stopping = True

    def _open(self, request: GenerateRequest) -> None:
        if self.draining:
            self.outbox.append(failed(request.request_id, "the engine is shutting down"))
            return
        try:
            self.scheduler.add(request)
        except InkcapError as error:
            self.outbox.append(failed(request.request_id, str(error)))

    def _finish_oldest(self) -> None:
        self.outbox += self.scheduler.apply(self.in_flight.popleft().result())

    def _emit(self) -> None:
        if self.outbox:
            self.port.send(Deltas(self.outbox))
            self.outbox = []


def failed(request_id: str, why: str) -> TokenDelta:
    """The last delta of a sequence that cannot go on."""
    return TokenDelta(request_id, [], finish=Finish.ERROR, error=why)


def build_core(config: EngineConfig, port: Port, executor: Executor, facts: RankFacts) -> tuple[Core, EngineInfo]:
    """A core over loaded ranks. Closes the executor when that fails."""
    sched = config.sched.on(facts.device)
    # The client counts what is open and refuses the surplus: all of it may wait here before the first step is planned.
    sched = replace(sched, waiting=sched.waiting + sched.rows)
    try:
        scheduler = build_scheduler(
            config.cache,
            sched,
            facts.layout.groups,
            facts.layout.pools(),
            stop_ids=tuple(facts.stop_ids),
            max_length=facts.max_length,
        )
    except BaseException:
        executor.close()
        raise
    info = EngineInfo(
        max_length=facts.max_length,
        vocab_size=facts.vocab_size,
        rows=sched.rows,
        step_tokens=sched.step_tokens,
        dtype=facts.dtype,
        cache_dtype=facts.dtype if config.cache.dtype == "auto" else config.cache.dtype,
        device=facts.device,
        family=facts.family,
        cache_groups={group.name: facts.layout.most(group) for group in facts.layout.groups},
    )
    logger.info(
        "ready: %s, %s on %s, %d ranks, %d tokens of context, cache blocks up to %s",
        *(info.family, info.dtype, info.device, config.parallel.tp, info.max_length, info.cache_groups),
    )
    return Core(scheduler, executor, port), info
