"""`inkcap bench serve`: drives any OpenAI-compatible server with concurrent streams and reports what a client sees.

Datasets: random prompts, prompts that share beginnings, agents whose conversations grow turn by turn, and traces with
arrival times. Lengths are in common words; the counts reported are the server's own.
"""

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import uvloop

from inkcap.bench.http import Connection, Target
from inkcap.bench.measure import Reply, Sample, measure
from inkcap.bench.plot import Panel, cumulative, figure
from inkcap.bench.workload import DATASETS, Lengths, Message, Session, Shape, Turn, WorkloadInvalid, sessions

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
BINS = 60  # of a plot over time
Result = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Load:
    """What to send, and how."""

    url: str
    model: str | None = None  # None: the first one the server lists
    api: str = "chat"
    api_key: str | None = None
    dataset: str = "random"
    shape: Shape = field(default_factory=Shape)
    rate: float | None = None  # sessions a second; None: as fast as `concurrency` streams take them
    concurrency: int = 64
    warmup: int = 1  # requests before the clock starts, with texts of their own
    temperature: float = 1.0
    extra_body: dict[str, object] = field(default_factory=dict)  # of every request
    seed: int = 0
    timeout_s: float = 600.0


class Conversation:
    """The messages of one session so far, as its client sends them."""

    def __init__(self, load: Load, model: str, session: Session) -> None:
        self.load = load
        self.model = model
        self.messages = list(session.opening)

    def body(self, turn: Turn) -> bytes:
        """The next request, with the turn's message in it."""
        self.add(turn.message)
        if self.load.api == "completions":
            prompt: Message = {"prompt": "\n".join(str(message.get("content") or "") for message in self.messages)}
        else:
            prompt = {"messages": self.messages}
        return msgspec.json.encode(
            {
                "model": self.model,
                **prompt,
                "max_tokens": turn.output_tokens,
                "min_tokens": turn.output_tokens,
                "ignore_eos": True,
                "temperature": self.load.temperature,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self.load.extra_body,
            }
        )

    def add(self, message: Message) -> None:
        """A tool's output answers the calls that the model made; when it made none, the user brings the output."""
        if message["role"] != "tool" or "tool_call_id" in message:
            self.messages.append(message)
            return
        calls = self.messages[-1].get("tool_calls")
        if not isinstance(calls, list):
            self.messages.append({**message, "role": "user"})
            return
        for index, call in enumerate(calls):
            self.messages.append(
                {**message, "tool_call_id": call["id"], "content": "" if index else message["content"]}
            )

    def answered(self, reply: Reply) -> None:
        self.messages.append(reply.message())


async def first_model(load: Load) -> str:
    """The first model the server lists. Raises ConnectionError when it does not answer as expected."""
    parts: list[bytes] = []
    connection = Connection(Target.parse(load.url), load.api_key)
    status = await connection.request("GET", "/v1/models", b"", lambda data, _: parts.append(data), 30.0)
    connection.close()
    if status != 200:
        raise ConnectionError(f"{load.url} answers /v1/models with status {status}")
    return msgspec.json.decode(b"".join(parts))["data"][0]["id"]


class Run:
    """One load on its way: what was measured so far."""

    def __init__(self, load: Load, model: str) -> None:
        self.load = load
        self.model = model
        self.target = Target.parse(load.url)
        self.samples: list[Sample] = []
        self.skipped = 0  # turns that were not sent, since one before them failed
        self.started = 0.0

    async def follow(self, connection: Connection, number: int, session: Session) -> None:
        """All turns of a session, one after another."""
        load = self.load
        conversation = Conversation(load, self.model, session)
        for index, turn in enumerate(session.turns):
            body = conversation.body(turn)
            sample = await measure(connection, PATHS[load.api], body, load.timeout_s, self.started)
            sample.session, sample.turn = number, index
            self.samples.append(sample)
            if sample.failure is not None:
                self.skipped += len(session.turns) - index - 1
                return
            conversation.answered(sample.reply)
            sample.reply = Reply()  # a long run need not keep every text

    async def closed(self, todo: list[Session]) -> None:
        """`concurrency` streams, each taking the next session when it is through with one."""
        left = iter(enumerate(todo))

        async def worker() -> None:
            connection = Connection(self.target, self.load.api_key)
            for number, session in left:
                await self.follow(connection, number, session)
            connection.close()

        await asyncio.gather(*(worker() for _ in range(min(self.load.concurrency, len(todo)))))

    async def timed(self, todo: list[Session]) -> None:
        """Each session when its time comes, however many are open: a slow server must not slow its clients."""

        async def one(number: int, session: Session, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            connection = Connection(self.target, self.load.api_key)
            await self.follow(connection, number, session)
            connection.close()

        await asyncio.gather(*(one(number, session, session.arrival_s or 0.0) for number, session in enumerate(todo)))


async def drive(load: Load) -> Result:
    """Run the load and summarise it; see `measured`."""
    return summarize(load, *await measured(load))


async def measured(load: Load) -> tuple[Run, float]:
    """Run the load; what was measured, and the seconds it took.

    Raises OSError when the server cannot be reached at all, WorkloadInvalid.
    """
    todo = sessions(load.dataset, load.shape, load.seed, load.rate)
    run = Run(load, load.model or await first_model(load))
    warm = Shape(requests=load.warmup, prompt_tokens=load.shape.prompt_tokens, output_tokens=load.shape.output_tokens)
    connection = Connection(run.target, load.api_key)
    for session in sessions("random", warm, load.seed + 1):
        await run.follow(connection, 0, session)
    connection.close()
    run.samples.clear()
    run.started = time.perf_counter()
    await (run.closed(todo) if todo[0].arrival_s is None else run.timed(todo))
    return run, time.perf_counter() - run.started


def quantiles(values: list[float]) -> dict[str, float]:
    """Mean, p50, p90 and p99 in milliseconds; nearest rank."""
    if not values:
        return {}
    ordered = sorted(values)
    at = {f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in (50, 90, 99)}
    return {name: round(value * 1e3, 3) for name, value in {"mean": sum(ordered) / len(ordered), **at}.items()}


def summarize(load: Load, run: Run, seconds: float) -> Result:
    """The figures of one run, ready for JSON."""
    samples = run.samples
    good = [sample for sample in samples if sample.failure is None]
    failures: dict[str, int] = {}
    for sample in samples:
        if sample.failure is not None:
            failures[sample.failure] = failures.get(sample.failure, 0) + 1
    output = sum(sample.output_tokens for sample in good)
    prompt = sum(sample.prompt_tokens for sample in good)
    per_token = [(s.last - s.first) / (s.output_tokens - 1) for s in good if s.output_tokens > 1]
    return {
        "model": run.model,
        "api": load.api,
        "dataset": load.dataset,
        "concurrency": load.concurrency,
        "rate": load.rate,
        "sessions": len({sample.session for sample in samples}),
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "failures": failures,
        "skipped": run.skipped,
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(good) / seconds, 3),
        "output_tokens_per_s": round(output / seconds, 2),
        "total_tokens_per_s": round((output + prompt) / seconds, 2),
        "prompt_tokens": prompt,
        "cached_prompt_tokens": sum(sample.cached_tokens for sample in good),
        "output_tokens": output,
        "chunks": sum(sample.chunks for sample in good),
        "first_token_ms": quantiles([sample.first for sample in good]),
        "between_chunks_ms": quantiles([gap for sample in good for gap in sample.gaps]),
        "per_token_ms": quantiles(per_token),
        "request_ms": quantiles([sample.total for sample in good]),
    }


def table(result: Result) -> str:
    """The result for people."""
    names = ("model", "api", "dataset", "concurrency", "requests", "failed", "seconds", "requests_per_s")
    names += ("output_tokens_per_s", "total_tokens_per_s", "prompt_tokens", "cached_prompt_tokens", "output_tokens")
    rows = [f"{name:22} {result[name]}" for name in names]
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
    if result["skipped"]:
        rows.append(f"not sent: {result['skipped']} turns after a failed one")
    return "\n".join(rows)


def plot(result: Result, samples: list[Sample], seconds: float) -> str:
    """The run as SVG: tokens over time, two distributions, and first tokens by length of prompt."""
    good = [sample for sample in samples if sample.failure is None]
    bins = [0.0] * BINS
    for sample in good:
        when = sample.started + sample.first
        for gap in (0.0, *sample.gaps):
            when += gap
            bins[min(BINS - 1, int(when / seconds * BINS))] += sample.output_tokens / sample.chunks
    width = seconds / BINS
    first = [sample.first * 1e3 for sample in good]
    gaps = sorted(gap * 1e3 for sample in good for gap in sample.gaps)
    panels = [
        Panel("Output tokens per second", "seconds", [((i + 0.5) * width, n / width) for i, n in enumerate(bins)]),
        Panel("Share of requests with their first token", "milliseconds", cumulative(first), top=1.0),
        Panel("Share of chunks that came within", "milliseconds, to p99.9",
              cumulative(gaps[: max(1, len(gaps) * 999 // 1000)]), top=1.0),
        Panel("First token, milliseconds", "prompt tokens not in the cache",
              [(s.prompt_tokens - s.cached_tokens, s.first * 1e3) for s in good], dots=True),
    ]  # fmt: skip
    title = f"{result['model']}, {result['dataset']}: {result['requests']} requests, {result['failed']} failed, "
    return figure(f"{title}{result['output_tokens_per_s']} output tokens per second", panels)


def lengths(text: str) -> Lengths:
    """For argparse, which shows the message of this error only."""
    try:
        return Lengths.parse(text)
    except WorkloadInvalid as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def fields(text: str) -> dict[str, object]:
    """For argparse."""
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no JSON object: {error}") from None


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too few; 1 or more")
    return value


def above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `inkcap bench serve`."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("--model", help="model to ask for; default: the first one the server lists")
    parser.add_argument("--api", choices=sorted(PATHS), default="chat")
    parser.add_argument("--api-key")
    parser.add_argument("--dataset", choices=[*DATASETS, "trace"], default="random", help="what is asked")
    parser.add_argument("--concurrency", type=positive, default=64, help="streams that are open at once")
    parser.add_argument("--rate", type=above_zero, help="sessions a second instead, however many are open")
    parser.add_argument("--requests", type=positive, default=256, help="requests in all; of a trace: at most")
    parser.add_argument("--warmup", type=int, default=1, help="requests before the clock starts")
    one, several = "128", "64-256"
    parser.add_argument("--prompt-tokens", type=lengths, default=one, help=f"words of a prompt: {one} or {several}")
    parser.add_argument("--output-tokens", type=lengths, default=one, help="tokens of an answer, with ignore_eos")
    parser.add_argument("--prefixes", type=positive, default=8, help="shared, agent: different beginnings")
    parser.add_argument("--prefix-tokens", type=lengths, default="1024", help="shared, agent: words of a beginning")
    parser.add_argument("--turns", type=lengths, default="8", help="agent: requests of a session")
    parser.add_argument("--tool-tokens", type=lengths, default="256", help="agent: words that a tool puts out")
    parser.add_argument("--trace", metavar="FILE", help="trace: JSON lines with arrival times")
    parser.add_argument("--speed", type=above_zero, default=1.0, help="trace: of its clock; 2 is twice the load")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--extra-body", type=fields, default={}, metavar="JSON", help="fields of every request")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--timeout", type=float, default=600.0, dest="timeout_s", help="seconds for one request")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write figures of every request")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="write a plot")
    parser.add_argument("--quiet", action="store_true", help="the JSON line only")


def load_of(args: argparse.Namespace) -> Load:
    given = vars(args)
    shape = Shape(**{name: given[name] for name in Shape.__dataclass_fields__})
    names = set(Load.__dataclass_fields__) - {"shape"}
    return Load(shape=shape, **{name: given[name] for name in names})


def described(load: Load) -> dict[str, object]:
    """The load as its flags say it, without the key."""
    shown = {name: value for name, value in (vars(load) | vars(load.shape)).items() if name not in ("shape", "api_key")}
    return {name: str(value) if isinstance(value, Lengths) else value for name, value in shown.items()}


def run(args: argparse.Namespace) -> int:
    """Print a table to stderr and one JSON line to stdout.

    The exit code is 1 when a request failed, 2 without a server or with flags that contradict each other.
    """
    load = load_of(args)
    try:
        done, seconds = uvloop.run(measured(load))
        result = summarize(load, done, seconds)
        if args.output:
            requests = [sample.figures() for sample in done.samples]
            content = {"load": described(load), "result": result, "requests": requests}
            args.output.write_text(json.dumps(content, indent=1) + "\n")
        if args.plot:
            args.plot.write_text(plot(result, done.samples, seconds))
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
