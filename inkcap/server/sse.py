"""Server-sent events, written straight to the socket; and work that ends the moment its client leaves."""

import asyncio
from collections.abc import Coroutine
from typing import Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inkcap.base.errors import InkcapError
from inkcap.base.log import logger
from inkcap.server.errors import ErrorBody, describe
from inkcap.server.generation import Arrived, Run
from inkcap.server.replies import encode

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
IDLE_SECONDS = 10.0  # without an event, after which a stream that has a sign of life gives it
Result = TypeVar("Result")


class ClientLeft(Exception):
    """The client closed its connection; nobody reads an answer."""


def event(value: object) -> bytes:
    """One event with a JSON payload."""
    return b"data: " + encode(value) + b"\n\n"


def named_event(name: str, value: object) -> bytes:
    """One event with a name and a JSON payload."""
    return b"event: " + name.encode() + b"\ndata: " + encode(value) + b"\n\n"


async def unless_gone(receive: Receive, work: Coroutine[None, None, Result]) -> Result:
    """The result of `work`, which is cancelled at once when the client leaves: then ClientLeft is raised.

    The request's body must have been read.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientLeft
    finally:
        watcher.cancel()
        if not worker.done():
            worker.cancel()
            await asyncio.wait((worker,))


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Telling(Protocol):
    """A streamed answer: what its tokens become. All of it gives whole events, any number of them."""

    run: Run
    idle: bytes  # told while nothing comes; empty: nothing is

    def opening(self) -> bytes:
        """Before the first token."""
        ...

    def tell(self, arrived: Arrived) -> bytes:
        """What came since the last call."""
        ...

    def closing(self) -> bytes:
        """After the last token."""
        ...

    def failure(self, error: ErrorBody) -> bytes:
        """In place of `closing` where something went wrong."""
        ...

    def close(self) -> None:
        """Called once at the end, whatever happened; also when the client left before the first event."""
        ...


class EventStream(Response):
    """Sends what is told of an answer, each time in one write.

    A write waits while the socket is behind, and what comes meanwhile is told together, so a slow reader costs the
    socket's buffer and its own tokens. An error becomes an event, since the status has been sent.
    """

    def __init__(self, telling: Telling) -> None:
        super().__init__(None, 200)
        self.telling = telling
        self.silent = True  # since the last look
        self.over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            write = scope["state"]["send"]  # past the layers that have seen the start and do nothing more
            beating = asyncio.ensure_future(self.beat(write)) if self.telling.idle else None
            try:
                await unless_gone(receive, self.write(write))
            finally:
                if beating is not None:
                    beating.cancel()
        except ClientLeft:
            logger.debug("client left: %s", scope["state"]["request_id"])
        finally:
            self.telling.close()

    async def write(self, send: Send) -> None:
        """The body."""
        telling, arrivals = self.telling, self.telling.run.arrivals()
        try:
            if data := telling.opening():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            async for arrived in arrivals:
                if data := telling.tell(arrived):
                    self.silent = False
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            tail = telling.closing()
        except InkcapError as error:
            tail = telling.failure(describe(error))
        except Exception as error:  # the border of the process: the client gets an event, the log the reason
            logger.exception("stream failed: %s", type(error).__name__)
            tail = telling.failure(describe(error))
        finally:
            await arrivals.aclose()
        self.over = True
        await send({"type": "http.response.body", "body": tail, "more_body": False})

    async def beat(self, send: Send) -> None:
        """Signs of life while nothing else is told."""
        while not self.over:
            self.silent = True
            await asyncio.sleep(IDLE_SECONDS)
            if self.silent and not self.over:
                await send({"type": "http.response.body", "body": self.telling.idle, "more_body": True})
