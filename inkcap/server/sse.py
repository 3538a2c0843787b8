"""Server-sent events, written straight to the socket; and work that ends the moment its client leaves."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inkcap.base.errors import InkcapError
from inkcap.base.log import logger
from inkcap.server.errors import ErrorBody, describe

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
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


class EventStream(Response):
    """Sends each item of `events`, whole events already, in one write; then `done`.

    A write waits while the socket is behind, and the source coalesces meanwhile, so a slow reader costs the socket's
    buffer and its own tokens. An error becomes an event, since the status has been sent.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        *,
        failure: Callable[[ErrorBody], bytes] = event,
        done: bytes = DONE,
    ) -> None:
        """`close` is called at the end, whatever happened; also when the client left before the first event.

        `failure` makes the event, or events, that tell of an error.
        """
        super().__init__(None, 200)
        self.events = events
        self.close = close
        self.failure = failure
        self.done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self.write(send))
        except ClientLeft:
            logger.debug("client left: %s", scope["state"]["request_id"])
        finally:
            self.close()

    async def write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        try:
            async for data in self.events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            tail = self.done
        except InkcapError as error:
            tail = self.failure(describe(error)) + self.done
        except Exception as error:  # the border of the process: the client gets an event, the log the reason
            logger.exception("stream failed: %s", type(error).__name__)
            tail = self.failure(describe(error)) + self.done
        finally:
            await self.events.aclose()
        await send({"type": "http.response.body", "body": tail, "more_body": False})
