"""A lean HTTP/1.1 client for measuring: the time of each piece of a response is taken where the bytes arrive.

One connection carries one request at a time and is kept for the next. No redirects, no proxies, no compression.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

OnBody = Callable[[bytes, float], None]


@dataclass(frozen=True)
class Target:
    """Where to send requests."""

    host: str
    port: int
    tls: bool
    prefix: str  # path before /v1

    @classmethod
    def parse(cls, url: str) -> "Target":
        """`http://host:port[/prefix]`; a trailing `/v1` is dropped. Raises ValueError."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a server; write http://host:port")
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1"))


class Exchange(asyncio.Protocol):
    """The receiving half of a connection: httptools calls back, `done` resolves at the end of a response."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.done: asyncio.Future[int] | None = None
        self.on_body_part: OnBody | None = None
        self.arrived = 0.0
        self.begin()

    def begin(self) -> None:
        self.parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.done is not None and not self.done.done():
            self.done.set_exception(ConnectionResetError(f"the server closed the connection ({exc or 'end of file'})"))

    def data_received(self, data: bytes) -> None:
        self.arrived = time.perf_counter()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self.done is not None and not self.done.done():
                self.done.set_exception(ConnectionError(f"the response is no HTTP: {error}"))

    def on_body(self, body: bytes) -> None:
        if self.on_body_part is not None:
            self.on_body_part(body, self.arrived)

    def on_message_complete(self) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_result(self.parser.get_status_code())
        if self.transport is not None and not self.parser.should_keep_alive():
            self.transport.close()
            self.transport = None


class Connection:
    """Sends requests one after another, reconnecting when the server closed."""

    def __init__(self, target: Target, api_key: str | None = None) -> None:
        self.target = target
        self.api_key = api_key
        self.exchange: Exchange | None = None

    async def request(self, method: str, path: str, body: bytes, on_body: OnBody, timeout_s: float) -> int:
        """The status, after the whole response went through `on_body`. Raises OSError or TimeoutError."""
        exchange = await self.connected()
        assert exchange.transport is not None
        target = self.target
        lines = [
            f"{method} {target.prefix}{path} HTTP/1.1",
            f"host: {target.host}:{target.port}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "accept: */*",
        ]
        if self.api_key:
            lines.append(f"authorization: Bearer {self.api_key}")
        exchange.begin()
        exchange.on_body_part = on_body
        exchange.done = asyncio.get_running_loop().create_future()
        exchange.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        try:
            return await asyncio.wait_for(exchange.done, timeout_s)
        except BaseException:
            self.close()
            raise

    async def connected(self) -> Exchange:
        if self.exchange is None or self.exchange.transport is None or self.exchange.transport.is_closing():
            context = ssl.create_default_context() if self.target.tls else None
            loop = asyncio.get_running_loop()
            _, self.exchange = await loop.create_connection(Exchange, self.target.host, self.target.port, ssl=context)
        return self.exchange

    def close(self) -> None:
        if self.exchange is not None and self.exchange.transport is not None:
            self.exchange.transport.abort()
        self.exchange = None
