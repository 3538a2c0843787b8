"""The engine in a thread of this process: what `LLM` runs on. No sockets; results go to a callable per sequence."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from queue import Empty, SimpleQueue

from inkcap.base.config import EngineConfig
from inkcap.base.errors import BadRequest, EngineFault
from inkcap.base.request import EngineInfo, EngineStats, GenerateRequest, TokenDelta
from inkcap.engine.assemble import assemble
from inkcap.engine.core import Core, Port
from inkcap.engine.wire import Abort, AskStats, Deltas, Fault, FromEngine, Shutdown, Stats, Submit, ToEngine

Sink = Callable[[list[TokenDelta] | EngineFault], None]  # called in the core's thread: it must not block


class QueuePort:
    """The core's end of a connection within one process."""

    def __init__(self, deliver: Callable[[FromEngine], None]) -> None:
        self._messages: SimpleQueue[ToEngine | None] = SimpleQueue()
        self.send = deliver

    def post(self, message: ToEngine) -> None:
        """The client's half: from any thread."""
        self._messages.put(message)

    def wake(self) -> None:
        """End a blocking `receive`."""
        self._messages.put(None)

    def receive(self, block: bool) -> Sequence[ToEngine]:
        """All messages that have come; with `block`, waits for one or for `wake`."""
        messages = []
        try:
            while True:
                message = self._messages.get(block=block)
                block = False
                if message is not None:
                    messages.append(message)
        except Empty:
            return messages


class LocalEngine:
    """A loaded engine. Constructing it loads the model and raises SetupError. Any thread may call any method."""

    def __init__(
        self, config: EngineConfig, build: Callable[[EngineConfig, Port], tuple[Core, EngineInfo]] = assemble
    ) -> None:
        self.fault: str | None = None
        self._sinks: dict[str, Sink] = {}
        self._asked: dict[int, Future[EngineStats]] = {}
        self._numbers = count()
        self._lock = threading.Lock()  # a sink is either told of the fault or refused
        self._port = QueuePort(self._deliver)
        self._core, self.info = build(config, self._port)
        self._thread = threading.Thread(target=self._run, name="core", daemon=True)
        self._thread.start()

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Start one sequence: `sink` gets its deltas, the last with a finish, or the EngineFault that ends it.

        Raises EngineFault at once when the engine has stopped.
        """
        with self._lock:
            if self.fault is not None:
                raise EngineFault(f"the engine stopped: {self.fault}")
            if request.request_id in self._sinks:
                raise BadRequest(f"request id {request.request_id!r} is in use; choose another", "request_id")
            self._sinks[request.request_id] = sink
        self._port.post(Submit(request))

    def abort(self, request_id: str) -> None:
        """End a sequence; its last delta has Finish.ABORT. Unknown ids are ignored."""
        self._port.post(Abort(request_id))

    def stats(self) -> EngineStats:
        """Counters and gauges of now; waits for the step that runs. Raises EngineFault when the engine has stopped."""
        answer: Future[EngineStats] = Future()
        with self._lock:
            if self.fault is not None:
                raise EngineFault(f"the engine stopped: {self.fault}")
            number = next(self._numbers)
            self._asked[number] = answer
        self._port.post(AskStats(number))
        return answer.result()

    def close(self) -> None:
        """Stop the engine and free the model; open sequences end with EngineFault. May be called again."""
        self._port.post(Shutdown())
        self._thread.join()

    def _run(self) -> None:
        try:
            self._core.run()
            self._stop("it was closed")
        except EngineFault as error:
            self._stop(str(error))
        finally:
            self._core.executor.close()

    def _deliver(self, message: FromEngine) -> None:
        match message:
            case Deltas(deltas):
                self._hand_out(deltas)
            case Stats(number, stats):
                self._asked.pop(number).set_result(stats)
            case Fault(text):
                self._stop(text)

    def _hand_out(self, deltas: list[TokenDelta]) -> None:
        """One call per sink and step."""
        parts: dict[Sink, list[TokenDelta]] = {}
        for delta in deltas:
            finished = delta.finish is not None
            sink = self._sinks.pop(delta.request_id) if finished else self._sinks[delta.request_id]
            parts.setdefault(sink, []).append(delta)
        for sink, part in parts.items():
            sink(part)

    def _stop(self, why: str) -> None:
        with self._lock:
            if self.fault is not None:
                return
            self.fault = why
        error = EngineFault(f"the engine stopped: {why}")
        for sink in dict.fromkeys(self._sinks.values()):
            sink(error)
        self._sinks.clear()
        for answer in self._asked.values():
            answer.set_exception(error)
        self._asked.clear()
