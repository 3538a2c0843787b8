"""Runs plans on ranks: one in a thread of this process, or several in processes of their own."""

import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import msgspec
import zmq
from msgspec import Struct

from inkcap.base.config import EngineConfig
from inkcap.base.errors import EngineFault
from inkcap.base.step import StepPlan, StepResult
from inkcap.cache.plan import Layout
from inkcap.engine.child import Child
from inkcap.engine.wire import raised, sent


class RankFacts(Struct, frozen=True, kw_only=True):
    """What a rank knows once its model is loaded; the same on every rank."""

    family: str
    vocab_size: int
    max_length: int  # tokens
    dtype: str
    device: str
    stop_ids: list[int]  # that end a sequence unless it ignores them
    layout: Layout  # of the cache


class Runs(Protocol):
    """One rank, loaded."""

    facts: RankFacts

    def run(self, plan: StepPlan) -> StepResult: ...


class Begun(Protocol):
    """A step that a device may still work on."""

    def finish(self) -> StepResult:
        """Wait for it. Raises what failed in it."""
        ...


class Launches(Runs, Protocol):
    """A rank on a device of its own: it can begin a step behind those it has begun before."""

    def launch(self, plan: StepPlan) -> Begun: ...


class Underway(Protocol):
    """A submitted step."""

    def result(self) -> StepResult:
        """Wait for it. Raises what failed in it."""
        ...


class Executor(Protocol):
    """Runs plans on the ranks, in order."""

    depth: int  # plans that may be in flight besides the one waited for

    @property
    def fault(self) -> str | None:
        """Why no more plans can be run, even between steps; None while they can."""
        ...

    def submit(self, plan: StepPlan) -> Underway: ...

    def close(self) -> None: ...


class LocalExecutor:
    """One rank in a thread of this process. Constructing it loads the model and raises what loading raises."""

    depth = 1
    fault: str | None = None

    def __init__(self, load: Callable[[], Runs]) -> None:
        self._plans: SimpleQueue[tuple[StepPlan, Future[StepResult]] | None] = SimpleQueue()
        loaded: Future[RankFacts] = Future()
        self._thread = threading.Thread(target=self._work, args=(load, loaded), name="rank", daemon=True)
        self._thread.start()
        self.facts = loaded.result()

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Run `plan` after those before it."""
        future: Future[StepResult] = Future()
        self._plans.put((plan, future))
        return future

    def close(self) -> None:
        """Run what was submitted, then let the model go."""
        self._plans.put(None)
        self._thread.join()

    def _work(self, load: Callable[[], Runs], loaded: Future[RankFacts]) -> None:
        try:
            rank = load()
        except BaseException as error:
            loaded.set_exception(error)
            return
        loaded.set_result(rank.facts)
        while (item := self._plans.get()) is not None:
            plan, future = item
            try:
                result = rank.run(plan)
            except BaseException as error:
                future.set_exception(error)
                return
            future.set_result(result)


class Unfinished:
    """A step that is begun in the rank's thread and finished by whoever asks for its result."""

    def __init__(self) -> None:
        self.begun: Future[Begun] = Future()
        self.ended = False

    def result(self) -> StepResult:
        """Wait for the step. Raises what failed in it."""
        result = self.begun.result().finish()
        self.ended = True
        return result


class DeviceExecutor:
    """One rank on a GPU. A step is begun in the rank's thread while the device works on the one before.

    So planning a step, preparing it and the device's work overlap. A step that finds the device idle is begun before
    `submit` returns: planning the next one would take the interpreter from the rank's thread, and the device would
    wait. Constructing it loads the model, as LocalExecutor does.
    """

    depth = 1
    fault: str | None = None

    def __init__(self, load: Callable[[], Launches]) -> None:
        self._plans: SimpleQueue[tuple[StepPlan, Unfinished] | None] = SimpleQueue()
        self._latest: Unfinished | None = None
        loaded: Future[RankFacts] = Future()
        self._thread = threading.Thread(target=self._work, args=(load, loaded), name="rank", daemon=True)
        self._thread.start()
        self.facts = loaded.result()

    def submit(self, plan: StepPlan) -> Underway:
        """Begin `plan` behind those before it."""
        step, idle = Unfinished(), self._latest is None or self._latest.ended
        self._latest = step
        self._plans.put((plan, step))
        if idle:
            step.begun.exception()
        return step

    def close(self) -> None:
        """Begin what was submitted, then let the model go."""
        self._plans.put(None)
        self._thread.join()

    def _work(self, load: Callable[[], Launches], loaded: Future[RankFacts]) -> None:
        try:
            rank = load()
        except BaseException as error:
            loaded.set_exception(error)
            return
        loaded.set_result(rank.facts)
        while (item := self._plans.get()) is not None:
            plan, step = item
            try:
                begun = rank.launch(plan)
            except BaseException as error:
                step.begun.set_exception(error)
                return
            step.begun.set_result(begun)


class RankSetup(Struct, frozen=True, kw_only=True):
    """What a rank process is told over stdin."""

    config: EngineConfig
    rank: int
    size: int
    folder: str  # private to this engine: the sockets, and the file at which the ranks meet


class RankReady(Struct, frozen=True, array_like=True, tag=True):
    """The rank has loaded its part."""

    rank: int
    facts: RankFacts


class RankResult(Struct, frozen=True, array_like=True, tag=True):
    """Sent by rank 0 only: all ranks have the same."""

    result: StepResult


class RankFailed(Struct, frozen=True, array_like=True, tag=True):
    """The rank's last message. `kind` names a class of base.errors."""

    rank: int
    kind: str
    message: str


RankMessage = RankReady | RankResult | RankFailed
LAST_WORDS_MS = 200
LOOK_MS = 20
RANK_PROGRAM = ("-m", "inkcap.engine.rank")


class ProcessExecutor:
    """Several ranks in processes of their own, which end with this one.

    Constructing it waits for all ranks to load and raises what loading raised on the first that failed. `wake` is
    called, from another thread, when `fault` is set.
    """

    depth = 1

    def __init__(
        self, config: EngineConfig, size: int, wake: Callable[[], None], program: Sequence[str] = RANK_PROGRAM
    ) -> None:
        self.fault: str | None = None
        self._wake = wake
        self._lock = threading.Lock()  # no future joins `_pending` once `fault` is set
        self._pending: deque[Future[StepResult]] = deque()
        self.folder = Path(tempfile.mkdtemp(prefix="inkcap-ranks-"))  # mode 0700
        self._context = zmq.Context()
        self._ranks = [Child(program) for _ in range(size)]
        for rank, child in enumerate(self._ranks):
            child.tell(RankSetup(config=config, rank=rank, size=size, folder=str(self.folder)))
        # Plans leave by the core's thread, replies come in by the listener's: a socket belongs to one thread.
        self._plans = [bound(self._context, zmq.PUSH, plan_address(self.folder, rank)) for rank in range(size)]
        self._replies = bound(self._context, zmq.PULL, reply_address(self.folder))
        self._closing = threading.Event()
        self._loaded: Future[RankFacts] = Future()
        self._listener = threading.Thread(target=self._listen, name="ranks", daemon=True)
        self._listener.start()
        try:
            self.facts = self._loaded.result()
        except BaseException:
            self.close()
            raise

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Have every rank run `plan` after those before it."""
        future: Future[StepResult] = Future()
        with self._lock:
            if self.fault is not None:
                raise EngineFault(self.fault)
            self._pending.append(future)
        frame = msgspec.msgpack.encode(plan)
        for socket in self._plans:
            # A socket without a peer takes nothing: the rank is still connecting, or it died and `fault` comes soon.
            while not sent(socket, frame):
                if self.fault is not None:
                    return future
                socket.poll(LOOK_MS, zmq.POLLOUT)
        return future

    def close(self) -> None:
        """End the ranks; what they still run is lost."""
        self._closing.set()
        for socket in self._plans:
            socket.close(linger=0)
        for rank in self._ranks:
            rank.process.kill()
        self._listener.join()
        for rank in self._ranks:
            rank.close(seconds=5)
        self._replies.close(linger=0)
        self._context.term()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def pids(self) -> list[int]:
        """Of the rank processes."""
        return [rank.process.pid for rank in self._ranks]

    def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(RankMessage)
        poller = zmq.Poller()
        poller.register(self._replies, zmq.POLLIN)
        for rank in self._ranks:
            poller.register(rank.alive, zmq.POLLIN)
        facts: dict[int, RankFacts] = {}
        while True:
            ready = dict(poller.poll())
            dead = [number for number, rank in enumerate(self._ranks) if rank.alive in ready]
            # Replies first: a rank that fails says why before it dies, and that may still be on its way.
            while self._replies.poll(LAST_WORDS_MS if dead and not self._closing.is_set() else 0):
                match decoder.decode(self._replies.recv()):
                    case RankReady(rank, told):
                        facts[rank] = told
                        if len(facts) == len(self._ranks):
                            self._compare(facts)
                    case RankResult(result):
                        self._pending.popleft().set_result(result)
                    case RankFailed(rank, kind, message):
                        return self._stop(raised(kind, message), f"rank {rank} failed: {message}")
            if dead:
                closed = self._closing.is_set()
                why = "the engine was closed" if closed else f"rank {dead[0]} {self._ranks[dead[0]].ended()}"
                return self._stop(EngineFault(why), why)

    def _compare(self, facts: dict[int, RankFacts]) -> None:
        if all(told == facts[0] for told in facts.values()):
            self._loaded.set_result(facts[0])
        else:
            self._loaded.set_exception(EngineFault(f"ranks disagree about the model: {facts}"))

    def _stop(self, error: Exception, why: str) -> None:
        """Nothing comes from the ranks any more. The others may hang in a collective: `close` kills them."""
        with self._lock:
            self.fault = why
        if not self._loaded.done():
            self._loaded.set_exception(error)
        while self._pending:
            self._pending.popleft().set_exception(EngineFault(why))
        if not self._closing.is_set():
            self._wake()


def plan_address(folder: Path, rank: int) -> str:
    """Where rank `rank` receives its plans."""
    return f"ipc://{folder}/plans-{rank}"


def reply_address(folder: Path) -> str:
    """Where all ranks send their messages."""
    return f"ipc://{folder}/replies"


def bound(context: zmq.Context, kind: int, address: str) -> zmq.Socket:
    """A socket that drops nothing and blocks only without a peer: at most two plans are in flight."""
    socket = context.socket(kind)
    socket.set(zmq.SNDHWM, 0)
    socket.bind(address)
    return socket
