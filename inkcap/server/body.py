"""Routes whose JSON bodies are parsed strictly: UTF-8 only, no NaN or Infinity, bounded depth."""

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response


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


class JsonRequest(Request):
    """A request whose `json()` answers 400 for what is no JSON. `size` is the body's, in bytes, once it is read."""

    size = 0

    async def json(self) -> Any:
        data = await self.body()
        self.size = len(data)
        try:
            value = msgspec.json.decode(data)
        except UnicodeDecodeError as error:
            raise HTTPException(400, f"the body is not UTF-8: byte {error.start} is wrong") from None
        except msgspec.DecodeError as error:
            raise HTTPException(400, f"the body is not JSON: {error}") from None
        except RecursionError:
            raise HTTPException(400, "the body's JSON is nested too deeply") from None
        limit = self.app.state.service.config.server.json_depth
        if data.count(b"[") + data.count(b"{") > limit and deeper(value, limit):
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
