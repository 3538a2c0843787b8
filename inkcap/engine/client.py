"""The engine as an asyncio program sees it: a process of its own, behind `engine.api.Engine`. No torch."""

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace

import zmq

from inkcap.base.config import EngineConfig
from inkcap.base.errors import BadRequest, Draining, EngineFault, InkcapError, Overloaded, QueueFull, SetupError
from inkcap.base.log import logger
from inkcap.base.request import EngineInfo, EngineStats, GenerateRequest, TokenDelta
from inkcap.engine.child import ENGINE_PROGRAM, FAULT, SETUP, Child
from inkcap.engine.wire import (
    Abort,
    AskStats,
    Deltas,
    Drains,
    EngineSetup,
    Fault,
    FromEngine,
    Ready,
    SetupFailed,
    Shutdown,
    Stats,
    Submit,
    ToEngine,
    encode,
    from_engine,
    pair_socket,
    raised,
    sent,
)

READ_AT_ONCE = 64  # messages taken before other tasks get a turn
LAST_WORDS_SECONDS = 2.0


class Stream:
    """What has come of one sequence and was not taken yet."""

    __slots__ = ("deltas", "error", "finished", "waiter")

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []
        self.finished = False
        self.error: InkcapError | None = None
        self.waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Reader:
    """The caller's end of a sequence. Closing it, dropping it, or cancelling the task that waits on it aborts."""

    __slots__ = ("_client", "_future", "_id", "_stream")

    def __init__(self, client: "EngineClient", request_id: str, stream: Stream) -> None:
        self._client = client
        self._future = client.loop.create_future  # to ask for the running loop would cost a system call each time
        self._id = request_id
        self._stream = stream

    def __aiter__(self) -> "Reader":
        return self

    async def __anext__(self) -> list[TokenDelta]:
        stream = self._stream
        if not stream.deltas:
            if stream.error is not None:
                raise stream.error
            if stream.finished:
                raise StopAsyncIteration
            stream.waiter = self._future()
            try:
                await stream.waiter
            except asyncio.CancelledError:
                self._client.leave(self._id)
                raise
            finally:
                stream.waiter = None
            if not stream.deltas:
                return await self.__anext__()
        deltas, stream.deltas = stream.deltas, []
        return deltas

    async def aclose(self) -> None:
        """Abort the sequence unless it has finished."""
        self._client.leave(self._id)

    def __del__(self) -> None:
        if not self._stream.finished:
            self._client.leave_soon(self._id)


class EngineClient:
    """A running engine process; see `engine.api.Engine`. All methods belong to the event loop that called `start`."""

    def __init__(self, config: EngineConfig, loop: asyncio.AbstractEventLoop, child: Child) -> None:
        self.info: EngineInfo | None = None
        self.fault: str | None = None
        self.draining = False  # the engine was told to end (SIGTERM) and takes no new sequences
        self._config = config
        self.loop = loop
        self._streams: dict[str, Stream] = {}
        self._asked: dict[int, asyncio.Future[EngineStats]] = {}
        self._questions = 0
        self._ready: asyncio.Future[EngineInfo] = loop.create_future()
        self._closed = False
        self.folder = tempfile.mkdtemp(prefix="inkcap-")  # of the socket; mode 0700: nobody else reaches the engine
        self._context = zmq.Context()
        address = f"ipc://{self.folder}/engine"
        try:
            self._socket = pair_socket(self._context, address, bind=True)
        except zmq.ZMQError as error:
            self._context.term()
            shutil.rmtree(self.folder, ignore_errors=True)
            child.close(0)
            raise SetupError(f"cannot listen at {address}: {error}; set TMPDIR to a short, writable path") from None
        told = replace(config, server=replace(config.server, api_key=None))  # not the engine's business
        self._child = child
        child.tell(EngineSetup(config=told, address=address, folder=self.folder))
        loop.add_reader(self._socket.fileno(), self._read)
        loop.add_reader(self._child.alive, self._died)
        loop.call_soon(self._read)

    @classmethod
    async def start(
        cls, config: EngineConfig, program: Sequence[str] = ENGINE_PROGRAM, child: Child | None = None
    ) -> "EngineClient":
        """Start the engine process, or take `child`, which runs it; returns before the model is loaded."""
        return cls(config, asyncio.get_running_loop(), child or Child(program))

    async def ready(self) -> EngineInfo:
        """Wait until the model is loaded. Raises the SetupError that stopped it, or EngineFault."""
        return await asyncio.shield(self._ready)

    def submit(self, request: GenerateRequest) -> Reader:
        """Start one sequence; see `engine.api.Engine.submit`. Raises Overloaded while the model loads."""
        if self.fault is not None:
            raise EngineFault(f"the engine stopped: {self.fault}")
        if self.draining or self._closed:
            raise Draining("the engine is shutting down and takes no new requests")
        if self.info is None:
            raise Overloaded("the model is still loading", retry_after=5)
        limit = self.info.rows + self._config.sched.waiting
        if len(self._streams) >= limit:
            raise QueueFull(
                f"{len(self._streams)} sequences are running or waiting, which is the limit (sched.rows "
                f"{self.info.rows} + sched.waiting {self._config.sched.waiting}); try again soon"
            )
        if request.request_id in self._streams:
            raise BadRequest(f"request id {request.request_id!r} is in use; choose another", "request_id")
        stream = self._streams[request.request_id] = Stream()
        self._send(Submit(request))
        return Reader(self, request.request_id, stream)

    def abort(self, request_id: str) -> None:
        """End a sequence; its iterator ends with Finish.ABORT. Unknown ids are ignored."""
        if request_id in self._streams:
            self._send(Abort(request_id))

    def leave(self, request_id: str) -> None:
        """Abort a sequence that nobody reads any more."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.finished = True
            stream.wake()
            self._send(Abort(request_id))

    def leave_soon(self, request_id: str) -> None:
        """`leave`, from whatever thread collects garbage."""
        if request_id in self._streams and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.leave, request_id)

    async def stats(self) -> EngineStats:
        """Counters and gauges of now; zeros while the model loads. Raises EngineFault when the engine is gone."""
        if self.fault is not None:
            raise EngineFault(f"the engine stopped: {self.fault}")
        if self.info is None:
            return EngineStats()
        self._questions += 1
        answer = self._asked[self._questions] = self.loop.create_future()
        self._send(AskStats(self._questions))
        return await answer

    async def close(self) -> None:
        """End the engine process; open sequences end with EngineFault. May be called again."""
        if self._closed:
            return
        self._closed = True
        if self.info is not None and self.fault is None:
            self._send(Shutdown())
        self.loop.remove_reader(self._child.alive)
        await asyncio.to_thread(self._child.close, 5.0 if self.info is not None else 0.0)
        self._stop("it was closed")
        self.loop.remove_reader(self._socket.fileno())
        self._socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        """Of the engine process."""
        return self._child.process.pid

    @property
    def open_count(self) -> int:
        """Sequences that wait or run."""
        return len(self._streams)

    @property
    def exit_code(self) -> int | None:
        """Of the engine process; None while it runs."""
        return self._child.process.poll()

    def _send(self, message: ToEngine) -> None:
        if self.fault is not None or self._socket.closed:
            return
        if not sent(self._socket, encode(message)):
            return  # the engine has just died, which `_died` will tell
        # Sending may swallow the edge that announces a message: ZeroMQ's descriptor is edge-triggered.
        if self._socket.poll(0):
            self.loop.call_soon(self._read)

    def _read(self) -> None:
        if self._socket.closed:
            return
        for _ in range(READ_AT_ONCE):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(from_engine(frame))
        self.loop.call_soon(self._read)

    def _take(self, message: FromEngine) -> None:
        match message:
            case Deltas(deltas):
                self._deliver(deltas)
            case Stats(number, stats):
                answer = self._asked.pop(number)
                if not answer.done():
                    answer.set_result(stats)
            case Ready(info):
                self.info = info
                self._ready.set_result(info)
            case Drains():
                self.draining = True
            case SetupFailed(kind, text):
                self._ready.set_exception(raised(kind, text))
                self._ready.exception()  # seen: nobody needs to wait for it
                self._stop(text)
            case Fault(text):
                self._stop(text)

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue  # left a moment ago
            stream.deltas.append(delta)
            if delta.finish is not None:
                stream.finished = True
                del self._streams[delta.request_id]
            stream.wake()

    def _died(self) -> None:
        self.loop.remove_reader(self._child.alive)
        why = self._child.ended()
        if self._child.process.returncode in (FAULT, SETUP):
            # It said why before it ended; that may still be on its way.
            self.loop.call_later(LAST_WORDS_SECONDS, self._stop, f"the engine process {why}")
            self._read()
        else:
            self._read()
            self._stop(f"the engine process {why}")

    def _stop(self, why: str) -> None:
        """Nothing comes any more: say so to everyone who waits."""
        if self.fault is not None:
            return
        self.fault = why
        if not self._closed:
            logger.error("the engine stopped: %s; %d open requests end with it", why, len(self._streams))
        text = f"the engine stopped: {why}"
        if not self._ready.done():
            self._ready.set_exception(EngineFault(text))
            self._ready.exception()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(EngineFault(text))
                answer.exception()
        self._asked.clear()
        for stream in self._streams.values():
            stream.error = EngineFault(text)
            stream.wake()
        self._streams.clear()
