"""One request as its client sees it: sends a body, follows the stream, keeps times, token counts and the answer."""

import time
from dataclasses import dataclass, field

import msgspec

from inkcap.bench.http import Connection
from inkcap.bench.workload import Message


class Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: Function = msgspec.field(default_factory=Function)


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct):
    """The fields of a streamed chunk that a measurement needs."""

    choices: list[Choice] = msgspec.field(default_factory=list)
    usage: Usage | None = None
    error: object = None


decode = msgspec.json.Decoder(Chunk).decode


@dataclass
class Reply:
    """What was answered, for a client that goes on with it."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, CallDelta] = field(default_factory=dict)

    def add(self, delta: Delta) -> None:
        if delta.content:
            self.content.append(delta.content)
        if thought := delta.reasoning or delta.reasoning_content:
            self.reasoning.append(thought)
        for part in delta.tool_calls or ():
            call = self.calls.setdefault(part.index, CallDelta(part.index, part.id, Function("", "")))
            call.function.name = (call.function.name or "") + (part.function.name or "")
            call.function.arguments = (call.function.arguments or "") + (part.function.arguments or "")

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": "".join(self.content)}
        if self.reasoning:
            message["reasoning"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": msgspec.to_builtins(c.function)}
                for c in self.calls.values()
            ]
        return message


@dataclass
class Sample:
    """One request as its client saw it. Times are seconds since it was sent."""

    started: float = 0.0  # seconds since the run started
    first: float = 0.0  # first chunk with text
    last: float = 0.0  # last chunk with text
    total: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between chunks with text
    chunks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, as the server tells
    output_tokens: int = 0
    session: int = 0
    turn: int = 0
    failure: str | None = None
    reply: Reply = field(default_factory=Reply)

    def figures(self) -> dict[str, object]:
        """For a file of results: what happened, in milliseconds, without the text."""
        return {
            "session": self.session,
            "turn": self.turn,
            "started_s": round(self.started, 4),
            "first_token_ms": round(self.first * 1e3, 3),
            "request_ms": round(self.total * 1e3, 3),
            "chunks": self.chunks,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "failure": self.failure,
        }


class Events:
    """Splits a body into SSE events and keeps what matters."""

    def __init__(self, sample: Sample, sent: float) -> None:
        self.sample = sample
        self.sent = sent
        self.rest = b""
        self.ended = False

    def feed(self, data: bytes, arrived: float) -> None:
        *events, self.rest = (self.rest + data).split(b"\n\n")
        texts = 0
        for event in events:
            if not event.startswith(b"data: "):
                continue
            payload = event[6:]
            if payload == b"[DONE]":
                self.ended = True
            else:
                try:
                    texts += self.chunk(decode(payload))
                except msgspec.DecodeError as error:
                    self.sample.failure = f"an event is no chunk: {error}"
        if texts:
            sample, now = self.sample, arrived - self.sent
            if sample.chunks:
                sample.gaps.append(now - sample.last)
            else:
                sample.first = now
            sample.last = now
            sample.chunks += 1

    def chunk(self, chunk: Chunk) -> bool:
        sample = self.sample
        if chunk.error is not None:
            sample.failure = f"error event: {chunk.error!r:.200}"
        if chunk.usage is not None:
            sample.prompt_tokens = chunk.usage.prompt_tokens
            sample.output_tokens = chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            sample.cached_tokens = (details.cached_tokens or 0) if details else 0
        found = False
        for choice in chunk.choices:
            if choice.text:
                sample.reply.content.append(choice.text)
                found = True
            if (delta := choice.delta) is not None:
                sample.reply.add(delta)
                found = found or bool(delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)
        return found


async def measure(connection: Connection, path: str, body: bytes, timeout_s: float, run_started: float) -> Sample:
    """Send one request and follow its stream to the end. A failure is part of the sample."""
    sent = time.perf_counter()
    sample = Sample(started=sent - run_started)
    events = Events(sample, sent)
    try:
        status = await connection.request("POST", path, body, events.feed, timeout_s)
    except (OSError, TimeoutError) as error:
        sample.failure = f"{type(error).__name__}: {error}"
    else:
        if status != 200:
            sample.failure = f"status {status}{told(events.rest)}"
        elif not events.ended:
            sample.failure = sample.failure or "the stream ended without [DONE]"
        elif not sample.chunks:
            sample.failure = sample.failure or "the stream had no text"
    sample.total = time.perf_counter() - sent
    if not sample.output_tokens:
        sample.output_tokens = sample.chunks
    return sample


def told(body: bytes) -> str:
    """What an error reply says, for a line in a report; nothing when it is no JSON that we know."""
    try:
        error = decode(body).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    message = error.get("message") if isinstance(error, dict) else error
    return f": {message!s:.200}" if message else ""
