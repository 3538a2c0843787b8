"""Errors as HTTP replies, in the shape OpenAI clients read. Never a traceback, never the caller's input at length."""

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from inkcap.base.errors import BadRequest, InkcapError, Overloaded
from inkcap.base.log import logger

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailable",
}
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
MOST_REPORTED = 10  # mistakes of one body that are named
ECHOED = 80  # characters of an input that are repeated to the caller


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong. `code` is the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct, frozen=True):
    """The envelope; also the payload of an error event inside a stream."""

    error: ErrorDetail


def describe(error: Exception) -> ErrorBody:
    """The body for an error. What is not ours becomes a 500 that says nothing about the inside."""
    if isinstance(error, InkcapError):
        param = error.param if isinstance(error, BadRequest) else None
        return body(str(error), error.status, param)
    return body("the server failed on this request; its log has the reason", 500)


def body(message: str, status: int, param: str | None = None) -> ErrorBody:
    return ErrorBody(ErrorDetail(message, TYPES.get(status, "Error"), param, status))


def anthropic(content: ErrorBody) -> dict[str, object]:
    """The same error in the shape that clients of `/v1/messages` read."""
    detail = content.error
    kind = ANTHROPIC_TYPES.get(detail.code, "invalid_request_error" if detail.code < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": detail.message}}


def path_of(scope: Scope) -> str:
    """The path below the prefix that a proxy strips."""
    root, path = scope.get("root_path", ""), scope["path"]
    return path[len(root) :] if root and path.startswith(root + "/") else path


def reply(content: ErrorBody, scope: Scope, headers: dict[str, str] | None = None) -> Response:
    """The response, in the shape of the API that the path belongs to."""
    shaped = anthropic(content) if path_of(scope).startswith(ANTHROPIC_PATH) else content
    return Response(msgspec.json.encode(shaped), content.error.code, headers, "application/json")


def shorten(value: object) -> str:
    """An input as it may be repeated to the caller: one line, `ECHOED` characters at most."""
    text = repr(value[: 2 * ECHOED]) if isinstance(value, str | bytes | list) else repr(value)
    return text if len(text) <= ECHOED else f"{text[:ECHOED]}…"


def summarize(mistakes: list[dict]) -> tuple[str, str | None]:
    """One message for what pydantic found, and the path of the first field."""
    parts = []
    for mistake in mistakes[:MOST_REPORTED]:
        path = ".".join(str(step) for step in mistake["loc"] if step != "body") or "body"
        given = "" if mistake["type"] == "missing" else f" (got {shorten(mistake.get('input'))})"
        parts.append(f"{path}: {mistake['msg']}{given}")
    if len(mistakes) > MOST_REPORTED:
        parts.append(f"and {len(mistakes) - MOST_REPORTED} more")
    first = [str(step) for step in mistakes[0]["loc"] if step != "body"]
    return "; ".join(parts), ".".join(first) or None


async def on_inkcap_error(request: Request, error: Exception) -> Response:
    headers = {"Retry-After": str(error.retry_after)} if isinstance(error, Overloaded) else None
    return reply(describe(error), request.scope, headers)


async def on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    message, param = summarize(list(error.errors()))
    return reply(body(message, 400, param), request.scope)


async def on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404 and message == "Not Found":  # nothing of ours said so
        message = f"no such path: {shorten(request.url.path)}; /docs lists what there is"
    if error.status_code == 405:
        message = f"{request.method} is not allowed on {shorten(request.url.path)}"
    return reply(body(message, error.status_code), request.scope, dict(error.headers or {}))


async def on_any_error(request: Request, error: Exception) -> Response:
    logger.error("%s %r failed: %s: %.500r", request.method, request.scope["path"], type(error).__name__, str(error))
    return reply(describe(error), request.scope)


def install(app: FastAPI) -> None:
    """Register the handlers; the last one catches what nothing else did."""
    app.add_exception_handler(InkcapError, on_inkcap_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_any_error)
