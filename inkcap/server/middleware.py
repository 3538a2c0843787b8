"""What happens to every request before its endpoint: id, metrics, key, content type, body limit. Plain ASGI.

Nothing here runs per streamed chunk: streams write through `send` in the scope's state.
"""

import hashlib
import hmac
import re
import time
import uuid

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inkcap.base import log
from inkcap.server import errors
from inkcap.server.errors import path_of
from inkcap.server.metrics import Metrics
from inkcap.server.spans import Spans

ACCEPTED_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
GUARDED = ("/v1", "/inference", "/tokenize", "/detokenize")


def header(scope: Scope, name: bytes) -> str | None:
    """A request header, decoded as HTTP says; None when absent."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


class Envelope:
    """Gives each request an id, echoes it, and counts the request once its last byte is handed over.

    The id is the caller's `X-Request-Id` if that is 1 to 128 letters, digits or `_.:-`, else a new one.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, tracing: Spans | None = None) -> None:
        self.app = app
        self.metrics = metrics
        self.tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = header(scope, b"x-request-id")
        request_id = given if given and ACCEPTED_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {}).update(request_id=request_id, send=send)
        log.request_id.set(request_id)
        started = time.perf_counter()
        status = 500

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                nonlocal status
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        try:
            if self.tracing is None:
                await self.app(scope, receive, tagged)
            else:
                with self.tracing.span(scope):
                    try:
                        await self.app(scope, receive, tagged)
                    finally:
                        self.tracing.end(status)
        finally:
            route = scope.get("route")
            handler = route.path if route is not None else "none"
            self.metrics.count_http(handler, scope["method"], status, time.perf_counter() - started)
        return None


class KeyCheck:
    """Asks for `Authorization: Bearer KEY`, or `x-api-key: KEY`, on the API's paths.

    The comparison takes the same time for any key, whatever its length.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app = app
        self.expected = hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and path_of(scope).startswith(GUARDED) and scope["method"] != "OPTIONS":
            scheme, _, token = (header(scope, b"authorization") or "").partition(" ")
            given = token if scheme.lower() == "bearer" else header(scope, b"x-api-key") or ""
            if not hmac.compare_digest(hashlib.sha256(given.encode("latin-1")).digest(), self.expected):
                return await self.refusal(scope)(scope, receive, send)
        return await self.app(scope, receive, send)

    def refusal(self, scope: Scope) -> errors.Response:
        if path_of(scope).startswith(errors.ANTHROPIC_PATH):
            return errors.reply(errors.body("the API key is missing or wrong", 401), scope)
        return errors.Response(b'{"error":"Unauthorized"}', 401, {"WWW-Authenticate": "Bearer"}, "application/json")


class BodyCheck:
    """Refuses bodies that are not JSON (415) or larger than the limit (413), the latter before reading them if told."""

    def __init__(self, app: ASGIApp, limit_bytes: int) -> None:
        self.app = app
        self.limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            return await self.app(scope, receive, send)
        length = header(scope, b"content-length")
        if length is not None and length.isdecimal() and int(length) > self.limit_bytes:
            return await errors.reply(self.too_large(int(length)), scope)(scope, receive, send)
        kind = (header(scope, b"content-type") or "application/json").partition(";")[0].strip().lower()
        if length != "0" and kind != "application/json":
            message = f"content type {errors.shorten(kind)} is not supported; send application/json"
            return await errors.reply(errors.body(message, 415), scope)(scope, receive, send)
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.limit_bytes:
                raise HTTPException(413, self.too_large(taken).error.message)
            return message

        return await self.app(scope, counted, send)

    def too_large(self, size: int) -> errors.ErrorBody:
        message = f"the body has {size:,} bytes or more; this server takes {self.limit_bytes:,} (server.body_bytes)"
        return errors.body(message, 413)
