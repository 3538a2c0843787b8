"""The page at `/`: a chat, and a view of the engine at work. Files of this package, and two small JSON endpoints.

The page asks nobody but this server, and its policy says so: no script, style or request from elsewhere, none inline.
It is served without a key, since it holds nothing; what it asks under /v1 needs the key that its reader types.
"""

import contextlib
import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from inkcap.base.errors import EngineFault
from inkcap.base.request import EngineStats
from inkcap.server.admin import json_reply
from inkcap.server.service import VERSION, service_of

router = APIRouter(include_in_schema=False)
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "media-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # text that was assigned as HTML would raise in the browser
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for again each time, and answered 304 while it is the same
}
MEDIA: tuple[str, ...] = ()  # "image", "audio": what a message may hold besides text; the page hides the rest


@dataclass(frozen=True)
class File:
    """A file of the page, held in memory."""

    content: bytes
    headers: dict[str, str]


def read_files() -> dict[str, File]:
    """The page's files by name."""
    files: dict[str, File] = {}
    for path in sorted((Path(__file__).parent / "static").iterdir()):
        content = path.read_bytes()
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        files[path.name] = File(content, {**HEADERS, "Content-Type": KINDS[path.suffix], "ETag": tag})
    return files


FILES = read_files()


def serve(request: Request, name: str) -> Response:
    """One file, or 304 when the reader has it. Raises HTTPException 404."""
    file = FILES.get(name)
    if file is None:
        raise HTTPException(404)
    if request.headers.get("if-none-match") == file.headers["ETag"]:
        return Response(status_code=304, headers=file.headers)
    return Response(file.content, headers=file.headers)


@router.get("/")
async def index(request: Request) -> Response:
    """The page."""
    return serve(request, "index.html")


@router.get("/docs")
async def docs(request: Request) -> Response:
    """The API, from /openapi.json. The framework's own page would load its script from elsewhere."""
    if not service_of(request).config.server.docs:
        raise HTTPException(404)
    return serve(request, "docs.html")


@router.get("/page/info")
async def info(request: Request) -> Response:
    """What the page must know before the first question: names, limits, whether a key is asked for."""
    service = service_of(request)
    engine = service.engine.info
    return json_reply(
        {
            "version": VERSION,
            "models": service.names,
            "key": service.config.server.api_key is not None,
            "max_length": engine.max_length if engine else None,
            "device": engine.device if engine else None,
            "default_effort": service.config.server.default_effort,
            "defaults": service.defaults,
            "media": MEDIA,
        }
    )


@router.get("/page/live")
async def live(request: Request) -> Response:
    """The engine's counters and gauges of now, with the second they were taken; the page makes rates of them."""
    service = service_of(request)
    stats: EngineStats | None = None
    if service.state in ("ready", "draining"):
        with contextlib.suppress(EngineFault):  # it died this moment: the state says so below
            stats = await service.engine.stats()
    return json_reply({"state": service.state, "time": time.monotonic(), "stats": stats})


@router.get("/page/{name}")
async def part(request: Request, name: str) -> Response:
    """A script, the style sheet or the icon."""
    return serve(request, name)
