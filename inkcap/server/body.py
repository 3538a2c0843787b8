"""Routes whose JSON bodies are parsed strictly: UTF-8 only, no NaN or Infinity, bounded depth and size.

Parsing holds the interpreter, and with it every stream. So large bodies are counted first and then parsed in pieces,
between which others get their turn.
"""

import asyncio
import gc
import re
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from inkcap.base.vocabulary import VOCAB

PIECE_BYTES = 64 << 10  # of JSON that is parsed at once: 2 ms at worst
PIECE_LEVELS = 16  # that may have more than a piece inside
VALUE_BYTES = 8  # that a value counts for besides its own
# Of larger bodies, counted in their text, also inside strings. Code or JSON of a million tokens has less, and a prompt
# of a million ids nearly all of the commas.
MOST = {b"[": 120_000, b"{": 120_000, b'"': 400_000, b",": 1_100_000}

_FIRST = re.compile(rb"[ \t\r\n]*([\[{])")
_anything = msgspec.json.Decoder()
_objects = msgspec.json.Decoder(dict[str, msgspec.Raw])
_arrays = msgspec.json.Decoder(list[msgspec.Raw])


Parsed = TypeVar("Parsed")


def deeper(value: object, limit: int) -> bool:
    """Whether arrays and objects stand inside each other more than `limit` deep."""
    level = [value]
    for _ in range(limit):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node if isinstance(node, list) else ())
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


async def count(data: bytes) -> None:
    """Raise 400 for a body of more values than a prompt can have."""
    found = dict.fromkeys(MOST, 0)
    for start in range(0, len(data), PIECE_BYTES):
        for sign, most in MOST.items():
            found[sign] += data.count(sign, start, start + PIECE_BYTES)
            if found[sign] > most:
                raise HTTPException(400, f"the body has more than {most:,} {sign.decode()}, too many for one request")
        await asyncio.sleep(0)


def parse(data: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[Parsed]) -> Parsed:
    """Decode without garbage collections in between, which would look at all that was made so far, again and again."""
    gc.disable()
    try:
        return decoder.decode(data)
    finally:
        gc.enable()


class Pieces:
    """Parses JSON piece by piece. Raises msgspec.DecodeError, UnicodeDecodeError, RecursionError or HTTPException."""

    def __init__(self, context: int | None = None) -> None:
        """`context`: tokens that a prompt must have fewer of; None: not known yet."""
        self.context = context
        self.parsed = 0  # bytes, since others had their turn

    async def value(self, data: bytes | msgspec.Raw, levels: int = PIECE_LEVELS) -> Any:
        """What `data` says. Arrays and objects of more than a piece are taken apart, `levels` deep."""
        size = memoryview(data).nbytes
        self.parsed += size + VALUE_BYTES
        if self.parsed > PIECE_BYTES:
            self.parsed = 0
            await asyncio.sleep(0)
        if size <= PIECE_BYTES:
            return _anything.decode(data)
        data = bytes(data)
        first = _FIRST.match(data)
        if first is None:
            return _anything.decode(data)
        if not levels:
            raise HTTPException(400, f"the body's JSON is nested too deeply: {size:,} bytes at level {PIECE_LEVELS}")
        if first[1] == b"{":
            return {key: await self.value(part, levels - 1) for key, part in parse(data, _objects).items()}
        if b'"' not in data and b"{" not in data and data.count(b"[") == 1 and data.endswith(b"]"):
            return await self.numbers(data)
        return [await self.value(part, levels - 1) for part in parse(data, _arrays)]

    async def numbers(self, data: bytes) -> list[Any]:
        """A flat array without strings, cut at commas."""
        values: list[Any] = []
        start, end = data.index(b"[") + 1, data.rindex(b"]")
        while start < end:
            stop = data.find(b",", min(start + PIECE_BYTES, end), end)
            stop = end if stop < 0 else stop
            values += _anything.decode(b"[" + data[start:stop] + b"]")
            start = stop + 1
            if self.context is not None and len(values) > (most := max(self.context, VOCAB)):
                raise HTTPException(
                    400,
                    f"an array has more than {most:,} numbers, and a prompt here has less than {self.context:,} tokens "
                    "(model.max_length)",
                )
            await asyncio.sleep(0)
        return values


class JsonRequest(Request):
    """A request whose `json()` answers 400 for what is no JSON. `size` is the body's, in bytes, once it is read."""

    size = 0

    async def json(self) -> Any:
        data = await self.body()
        self.size = len(data)
        large = self.size > PIECE_BYTES
        service = self.app.state.service
        limit, info = service.config.server.json_depth, service.engine.info
        context = None if info is None else info.max_length
        try:
            if large:
                await count(data)
            value = await Pieces(context).value(data) if large else _anything.decode(data)
        except UnicodeDecodeError as error:
            raise HTTPException(400, f"the body is not UTF-8: byte {error.start} is wrong") from None
        except msgspec.DecodeError as error:
            raise HTTPException(400, f"the body is not JSON: {error}") from None
        except RecursionError:
            raise HTTPException(400, "the body's JSON is nested too deeply") from None
        if await asyncio.to_thread(deeper, value, limit) if large else deeper(value, limit):
            raise HTTPException(
                400, f"the body's JSON is nested too deeply; this server takes {limit} levels (server.json_depth)"
            )
        return value


class JsonRoute(APIRoute):
    """A FastAPI route over `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle


def body_size(request: Request) -> int:
    """Bytes of the body, which must have been read."""
    assert isinstance(request, JsonRequest), "only routes of JsonRoute have a body to measure"
    return request.size
