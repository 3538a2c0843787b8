"""Messages between an engine core and its client, and their framing: one version byte, then msgpack, over ZeroMQ."""

import os
from collections.abc import Sequence

import msgspec
import zmq
from msgspec import Struct

from inkcap.base import errors
from inkcap.base.config import EngineConfig
from inkcap.base.errors import EngineFault, InkcapError, SetupError
from inkcap.base.request import EngineInfo, EngineStats, GenerateRequest, TokenDelta

VERSION = 1


class Submit(Struct, frozen=True, array_like=True, tag=True):
    """Start one sequence."""

    request: GenerateRequest


class Abort(Struct, frozen=True, array_like=True, tag=True):
    """End one sequence; unknown ids are ignored."""

    request_id: str


class AskStats(Struct, frozen=True, array_like=True, tag=True):
    """Answered with `Stats` of the same number."""

    number: int


class Shutdown(Struct, frozen=True, array_like=True, tag=True):
    """Stop at once; open sequences are dropped."""


ToEngine = Submit | Abort | AskStats | Shutdown


class Ready(Struct, frozen=True, array_like=True, tag=True):
    """The model is loaded; the first message of an engine that starts well."""

    info: EngineInfo


class SetupFailed(Struct, frozen=True, array_like=True, tag=True):
    """The engine could not start. `kind` names a SetupError of base.errors."""

    kind: str
    message: str


class Deltas(Struct, frozen=True, array_like=True, tag=True):
    """What one step gave, over all sequences."""

    deltas: list[TokenDelta]


class Stats(Struct, frozen=True, array_like=True, tag=True):
    """Counters and gauges of the moment of asking."""

    number: int
    stats: EngineStats


class Drains(Struct, frozen=True, array_like=True, tag=True):
    """The engine takes no new sequences, finishes the open ones and ends."""


class Fault(Struct, frozen=True, array_like=True, tag=True):
    """The engine can serve no more; its last message."""

    message: str


FromEngine = Ready | SetupFailed | Deltas | Stats | Drains | Fault

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytearray:
    """One frame."""
    frame = bytearray((VERSION,))
    _encoder.encode_into(message, frame, 1)
    return frame


def to_engine(frame: bytes) -> ToEngine:
    """Decode a frame sent to an engine. Raises EngineFault when the other side speaks another version."""
    return _to_engine.decode(_payload(frame))


def from_engine(frame: bytes) -> FromEngine:
    """Decode a frame sent by an engine. Raises EngineFault when the other side speaks another version."""
    return _from_engine.decode(_payload(frame))


def _payload(frame: bytes) -> memoryview:
    if not frame or frame[0] != VERSION:
        found = frame[0] if frame else "none"
        raise EngineFault(f"wire version {found} where {VERSION} was expected: server and engine are of two releases")
    return memoryview(frame)[1:]


def pair_socket(context: zmq.Context, address: str, *, bind: bool) -> zmq.Socket:
    """One end of the only connection between two processes. Nothing is ever dropped: what is queued is bounded by the
    requests that are open."""
    socket = context.socket(zmq.PAIR)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    if bind:
        socket.bind(address)
    else:
        socket.connect(address)
    return socket


class EngineSetup(Struct, frozen=True, kw_only=True):
    """What an engine process is told over stdin."""

    config: EngineConfig
    address: str  # the client's socket
    folder: str  # where it lies; removed by whoever ends last


def sent(socket: zmq.Socket, frame: bytes | bytearray) -> bool:
    """Queue one frame without ever blocking; False when there is no peer, or no more."""
    try:
        socket.send(frame, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def described(error: BaseException) -> tuple[str, str]:
    """Kind and message with which an exception crosses to another process."""
    if isinstance(error, InkcapError):
        return type(error).__name__, str(error)
    return EngineFault.__name__, f"{type(error).__name__}: {error}"


def raised(kind: str, message: str) -> InkcapError:
    """What another process raised: its SetupError, or else an EngineFault."""
    found = vars(errors).get(kind)
    if isinstance(found, type) and issubclass(found, SetupError):
        return found(message)
    return EngineFault(message)


class SocketPort:
    """The core's end of the connection. `wake` may be called from a signal handler; the rest from one thread."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = pair_socket(self._context, address, bind=False)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def receive(self, block: bool) -> Sequence[ToEngine]:
        """All messages that have come; with `block`, waits for one or for `wake`."""
        if block:
            ready = dict(self._poller.poll())
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
        messages = []
        while True:
            try:
                messages.append(to_engine(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def wake(self) -> None:
        """End a blocking `receive`."""
        os.write(self._wake_write, b"w")

    def send(self, message: FromEngine) -> None:
        """Queue one message; never blocks."""
        self._socket.send(encode(message), copy=True)

    def close(self, linger_ms: int = 2000) -> None:
        """Give queued messages `linger_ms` to leave, then close."""
        self._socket.close(linger=linger_ms)
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)
