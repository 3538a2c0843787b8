"""The HTTP parser's side of a connection: a bound on what may stand before a body, and one crowd holds up no stream."""

import asyncio
from collections import deque
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

REFUSAL = b"the request line and headers are too large for this server"
HEARD_AT_ONCE = 4  # connections in one round of the event loop


class Speaker(Protocol):
    """A connection that has something to say."""

    def speak(self) -> bool:
        """Say it; False: it has gone, and nothing was done."""
        ...


class Turnstile:
    """Hears connections, a few in one round of the event loop: between rounds, streams get their tokens."""

    def __init__(self) -> None:
        self.heard = 0  # in this round
        self.waiting: deque[Speaker] = deque()

    def enter(self, speaker: Speaker) -> bool:
        """Whether it may speak now; else it is told to when its turn comes."""
        if not self.heard and not self.waiting:
            asyncio.get_running_loop().call_soon(self.next_round)
        if self.heard < HEARD_AT_ONCE and not self.waiting:
            self.heard += 1
            return True
        self.waiting.append(speaker)
        return False

    def next_round(self) -> None:
        self.heard = 0
        while self.waiting and self.heard < HEARD_AT_ONCE:
            self.heard += self.waiting.popleft().speak()
        if self.heard or self.waiting:
            asyncio.get_running_loop().call_soon(self.next_round)


def limited_protocol(most_bytes: int, most_headers: int) -> type[HttpToolsProtocol]:
    """A protocol for uvicorn that answers 431 to a head of more than `most_bytes` or `most_headers`, and hangs up."""
    turnstile = Turnstile()

    class LimitedProtocol(HttpToolsProtocol):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.pending_bytes = 0  # of a head that has begun and not ended
            self.heading = False
            self.refused = False
            self.held: list[bytes] = []  # what came and waits for its turn

        def data_received(self, data: bytes) -> None:
            if self.refused:
                return
            if self.held:
                self.held.append(data)
            elif turnstile.enter(self):
                self.hear(data)
            else:
                self.held.append(data)
                self.transport.pause_reading()

        def speak(self) -> bool:
            data = b"".join(self.held)
            self.held.clear()
            if self.transport.is_closing():
                return False
            self.transport.resume_reading()
            self.hear(data)
            return True

        def hear(self, data: bytes) -> None:
            was_heading = self.heading
            super().data_received(data)
            # a head that began in these bytes counts from the next ones on: other requests may stand before it
            self.pending_bytes = self.pending_bytes + len(data) if was_heading and self.heading else 0
            if self.pending_bytes > most_bytes:
                self.refuse()

        def on_message_begin(self) -> None:
            self.heading = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self.heading = False
            size = len(self.url) + sum([len(name) + len(value) for name, value in self.headers])
            if self.refused or size > most_bytes or len(self.headers) > most_headers:
                self.refuse()
            else:
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if not self.refused:
                super().on_body(body)

        def on_message_complete(self) -> None:
            if not self.refused:
                super().on_message_complete()

        def refuse(self) -> None:
            """Tell the client, unless an answer is on its way, and hang up."""
            if not self.refused and (self.cycle is None or self.cycle.response_complete):
                head = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\n"
                head += b"connection: close\r\ncontent-length: " + str(len(REFUSAL)).encode() + b"\r\n\r\n"
                self.transport.write(head + REFUSAL)
            self.refused = True
            self.transport.close()

    return LimitedProtocol
