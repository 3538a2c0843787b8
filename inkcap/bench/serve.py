"""`inkcap bench serve`: drives any OpenAI-compatible server with concurrent streams and reports what a client sees.

Prompts are drawn from common words, one token each in most vocabularies; the counts reported are the server's own.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field

import msgspec
import uvloop

from inkcap.bench.http import Connection, Target

COMMON_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city"
)
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[object] | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(msgspec.Struct):
    """The fields of a streamed chunk that a measurement needs."""

    choices: list[Choice] = msgspec.field(default_factory=list)
    usage: Usage | None = None
    error: object = None


decode = msgspec.json.Decoder(Chunk).decode


@dataclass(frozen=True, kw_only=True)
class Load:
    """What to send."""

    url: str
    model: str | None = None  # None: the first one the server lists
    api: str = "chat"
    api_key: str | None = None
    concurrency: int = 64
    requests: int = 256
    warmup: int = 1  # requests before the clock starts
    prompt_tokens: int = 128
    output_tokens: int = 128
    temperature: float = 1.0
    seed: int = 0
    timeout_s: float = 600.0


@dataclass
class Sample:
    """One request as its client saw it. Times are seconds since it was sent."""

    first: float = 0.0  # first chunk with text
    last: float = 0.0  # last chunk with text
    total: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between chunks with text
    chunks: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    failure: str | None = None


class Events:
    """Splits a body into SSE events and keeps the times that matter."""

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
        if chunk.error is not None:
            self.sample.failure = f"error event: {chunk.error!r:.200}"
        if chunk.usage is not None:
            self.sample.prompt_tokens = chunk.usage.prompt_tokens
            self.sample.output_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            delta = choice.delta
            if choice.text or (
                delta and (delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)
            ):
                return True
        return False


def request_body(load: Load, model: str, draw: random.Random) -> bytes:
    """One request, as bytes."""
    text = " ".join(draw.choices(COMMON_WORDS.split(), k=load.prompt_tokens))
    prompt = {"prompt": text} if load.api == "completions" else {"messages": [{"role": "user", "content": text}]}
    return msgspec.json.encode(
        {
            "model": model,
            **prompt,
            "max_tokens": load.output_tokens,
            "min_tokens": load.output_tokens,
            "ignore_eos": True,
            "temperature": load.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


async def measure(connection: Connection, load: Load, body: bytes) -> Sample:
    """Send one request and follow its stream to the end. A failure is part of the sample."""
    sample = Sample()
    sent = time.perf_counter()
    events = Events(sample, sent)
    try:
        status = await connection.request("POST", PATHS[load.api], body, events.feed, load.timeout_s)
    except (OSError, TimeoutError) as error:
        sample.failure = f"{type(error).__name__}: {error}"
    else:
        if status != 200:
            sample.failure = f"status {status}"
        elif not events.ended:
            sample.failure = sample.failure or "the stream ended without [DONE]"
        elif not sample.chunks:
            sample.failure = sample.failure or "the stream had no text"
    sample.total = time.perf_counter() - sent
    if not sample.output_tokens:
        sample.output_tokens = sample.chunks
    return sample


async def first_model(load: Load) -> str:
    """The first model the server lists. Raises ConnectionError when it does not answer as expected."""
    parts: list[bytes] = []
    connection = Connection(Target.parse(load.url), load.api_key)
    status = await connection.request("GET", "/v1/models", b"", lambda data, _: parts.append(data), 30.0)
    connection.close()
    if status != 200:
        raise ConnectionError(f"{load.url} answers /v1/models with status {status}")
    return msgspec.json.decode(b"".join(parts))["data"][0]["id"]


async def drive(load: Load) -> dict[str, object]:
    """Run the load and summarise it. Raises OSError when the server cannot be reached at all."""
    model = load.model or await first_model(load)
    draw = random.Random(load.seed)
    bodies = [request_body(load, model, draw) for _ in range(load.warmup + load.requests)]
    connections = [Connection(Target.parse(load.url), load.api_key) for _ in range(load.concurrency)]
    for body in bodies[: load.warmup]:
        await measure(connections[0], load, body)
    left = iter(bodies[load.warmup :])
    samples: list[Sample] = []

    async def worker(connection: Connection) -> None:
        samples.extend([await measure(connection, load, body) for body in left])

    started = time.perf_counter()
    await asyncio.gather(*(worker(connection) for connection in connections))
    seconds = time.perf_counter() - started
    for connection in connections:
        connection.close()
    return summarize(load, model, samples, seconds)


def quantiles(values: list[float]) -> dict[str, float]:
    """Mean, p50, p90 and p99 in milliseconds; nearest rank."""
    if not values:
        return {}
    ordered = sorted(values)
    at = {f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in (50, 90, 99)}
    return {name: round(value * 1e3, 3) for name, value in {"mean": sum(ordered) / len(ordered), **at}.items()}


def summarize(load: Load, model: str, samples: list[Sample], seconds: float) -> dict[str, object]:
    """The figures of one run, ready for JSON."""
    good = [sample for sample in samples if sample.failure is None]
    failures: dict[str, int] = {}
    for sample in samples:
        if sample.failure is not None:
            failures[sample.failure] = failures.get(sample.failure, 0) + 1
    output = sum(sample.output_tokens for sample in good)
    prompt = sum(sample.prompt_tokens for sample in good)
    per_token = [(s.last - s.first) / (s.output_tokens - 1) for s in good if s.output_tokens > 1]
    return {
        "model": model,
        "api": load.api,
        "concurrency": load.concurrency,
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "failures": failures,
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(good) / seconds, 3),
        "output_tokens_per_s": round(output / seconds, 2),
        "total_tokens_per_s": round((output + prompt) / seconds, 2),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "chunks": sum(sample.chunks for sample in good),
        "first_token_ms": quantiles([sample.first for sample in good]),
        "between_chunks_ms": quantiles([gap for sample in good for gap in sample.gaps]),
        "per_token_ms": quantiles(per_token),
        "request_ms": quantiles([sample.total for sample in good]),
    }


def table(result: dict[str, object]) -> str:
    """The result for people."""
    rows = [
        f"{name:22} {result[name]}"
        for name in ("model", "api", "concurrency", "requests", "failed", "seconds", "requests_per_s")
    ]
    rows += [f"{name:22} {result[name]}" for name in ("output_tokens_per_s", "total_tokens_per_s")]
    rows.append(f"{'milliseconds':22} {'mean':>10} {'p50':>10} {'p90':>10} {'p99':>10}")
    for name in ("first_token_ms", "between_chunks_ms", "per_token_ms", "request_ms"):
        values = result[name]
        assert isinstance(values, dict)
        if values:
            cells = " ".join(f"{values[column]:10.2f}" for column in ("mean", "p50", "p90", "p99"))
            rows.append(f"{name[:-3].replace('_', ' '):22} {cells}")
    failures = result["failures"]
    assert isinstance(failures, dict)
    rows += [f"failed {count}x: {reason}" for reason, count in failures.items()]
    return "\n".join(rows)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `inkcap bench serve`."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("--model", help="model to ask for; default: the first one the server lists")
    parser.add_argument("--api", choices=sorted(PATHS), default="chat")
    parser.add_argument("--api-key")
    parser.add_argument("--concurrency", type=int, default=64, help="streams that are open at once")
    parser.add_argument("--requests", type=int, default=256, help="requests in all")
    parser.add_argument("--warmup", type=int, default=1, help="requests before the clock starts")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="words of a prompt, about one token each")
    parser.add_argument("--output-tokens", type=int, default=128, help="tokens of an answer, with ignore_eos")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--timeout", type=float, default=600.0, dest="timeout_s", help="seconds for one request")
    parser.add_argument("--quiet", action="store_true", help="the JSON line only")


def run(args: argparse.Namespace) -> int:
    """Print a table to stderr and one JSON line to stdout. Exit code 1 when a request failed, 2 without a server."""
    names = Load.__dataclass_fields__
    load = Load(**{name: value for name, value in vars(args).items() if name in names})
    try:
        result = uvloop.run(drive(load))
    except (OSError, ValueError) as error:
        print(f"inkcap bench serve: {error}", file=sys.stderr)
        return 2
    if not args.quiet:
        print(table(result), file=sys.stderr)
    print(json.dumps(result))
    return 1 if result["failed"] else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="inkcap bench serve", description=__doc__)
    add_flags(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
