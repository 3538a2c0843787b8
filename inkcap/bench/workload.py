"""What clients ask for: sessions of one or more turns, drawn at random or read from a trace. Nothing is sent here.

Texts are common words, one token each in most vocabularies. The same seed gives the same texts.
"""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

COMMON_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city"
)
WORDS = COMMON_WORDS.split()
TRACE_BLOCK = 512  # tokens that one entry of a trace's `hash_ids` stands for
Message = dict[str, object]


class WorkloadInvalid(ValueError):
    """A flag or a trace that cannot be followed; the message is for the user."""


@dataclass(frozen=True)
class Lengths:
    """Numbers drawn evenly from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """`128` or `64-256`. Raises WorkloadInvalid."""
        low, _, high = text.partition("-")
        if not (low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low)):
            raise WorkloadInvalid(f"{text!r} is no length; write 128, or 64-256 for a range, from 1 up")
        return cls(int(low), int(high or low))

    def draw(self, dice: random.Random) -> int:
        return dice.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class Turn:
    """One request: a message more, and so many tokens of answer."""

    message: Message
    output_tokens: int


@dataclass(frozen=True)
class Session:
    """A conversation that grows: what it begins with, and its turns."""

    turns: list[Turn]
    opening: list[Message] = field(default_factory=list)
    arrival_s: float | None = None  # seconds after the start of the run; None: when a stream is free


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How sessions are drawn. Lengths are in words."""

    requests: int = 256
    prompt_tokens: Lengths = Lengths(128, 128)
    output_tokens: Lengths = Lengths(128, 128)
    prefixes: int = 8  # beginnings that prompts share
    prefix_tokens: Lengths = Lengths(1024, 1024)
    turns: Lengths = Lengths(8, 8)
    tool_tokens: Lengths = Lengths(256, 256)
    trace: str | None = None
    speed: float = 1.0  # of a trace's clock


def words(dice: random.Random, count: int) -> str:
    return " ".join(dice.choices(WORDS, k=count))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def plain(shape: Shape, dice: random.Random) -> Iterator[Session]:
    """Independent prompts, none like another."""
    while True:
        text = words(dice, shape.prompt_tokens.draw(dice))
        yield Session([Turn(user(text), shape.output_tokens.draw(dice))])


def shared(shape: Shape, dice: random.Random) -> Iterator[Session]:
    """Each prompt begins with one of `prefixes` texts, drawn evenly, as with few system messages and many questions."""
    prefixes = [words(dice, shape.prefix_tokens.draw(dice)) for _ in range(shape.prefixes)]
    while True:
        opening: list[Message] = [{"role": "system", "content": dice.choice(prefixes)}]
        text = words(dice, shape.prompt_tokens.draw(dice))
        yield Session([Turn(user(text), shape.output_tokens.draw(dice))], opening)


def agent(shape: Shape, dice: random.Random) -> Iterator[Session]:
    """A task under a shared system message, then turn after turn the answer and a tool's output are appended."""
    prefixes = [words(dice, shape.prefix_tokens.draw(dice)) for _ in range(shape.prefixes)]
    while True:
        opening: list[Message] = [{"role": "system", "content": dice.choice(prefixes)}]
        turns = [Turn(user(words(dice, shape.prompt_tokens.draw(dice))), shape.output_tokens.draw(dice))]
        for _ in range(shape.turns.draw(dice) - 1):
            output: Message = {"role": "tool", "content": words(dice, shape.tool_tokens.draw(dice))}
            turns.append(Turn(output, shape.output_tokens.draw(dice)))
        yield Session(turns, opening)


DATASETS: dict[str, Callable[[Shape, random.Random], Iterator[Session]]] = {
    "random": plain,
    "shared": shared,
    "agent": agent,
}


def sessions(dataset: str, shape: Shape, seed: int, rate: float | None = None) -> list[Session]:
    """Sessions of `shape.requests` turns in all; the last one may be cut short.

    `rate`: sessions a second, arriving as a Poisson process. Raises WorkloadInvalid, OSError.
    """
    if dataset == "trace":
        if shape.trace is None:
            raise WorkloadInvalid("dataset trace needs a file: --trace FILE")
        if rate is not None:
            raise WorkloadInvalid("a trace brings its own arrival times; --rate cannot be given too, --speed can")
        return read_trace(Path(shape.trace), shape)
    dice = random.Random(seed)
    made: list[Session] = []
    left, clock = shape.requests, 0.0
    for session in DATASETS[dataset](shape, dice):
        if left <= 0:
            break
        if rate is not None:
            clock += dice.expovariate(rate)
        made.append(Session(session.turns[:left], session.opening, clock if rate is not None else None))
        left -= len(made[-1].turns)
    return made


def read_trace(path: Path, shape: Shape) -> list[Session]:
    """One request a line, `shape.requests` lines at most, in order of arrival. Raises WorkloadInvalid, OSError."""
    made: list[Session] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(itertools.islice(lines, shape.requests), 1):
            if line.strip():
                try:
                    made.append(traced(json.loads(line), number, shape))
                except (ValueError, TypeError, KeyError) as error:
                    raise WorkloadInvalid(f"{path}, line {number}: {error}") from None
    if not made:
        raise WorkloadInvalid(f"{path} has no request")
    first = min(session.arrival_s or 0.0 for session in made)
    shifted = [Session(s.turns, s.opening, ((s.arrival_s or 0.0) - first) / shape.speed) for s in made]
    return sorted(shifted, key=lambda session: session.arrival_s or 0.0)


def traced(entry: dict[str, object], number: int, shape: Shape) -> Session:
    """A session of one line.

    When: `arrival` in seconds, or `timestamp` in milliseconds. What: `messages`, or `prompt`, or `input_length` with
    `hash_ids` (equal ids at the start are equal text, 512 tokens each, as in Mooncake's traces). How much:
    `output_length`, `max_tokens` or `output_tokens`, else as the shape says.
    """
    if not isinstance(entry, dict):
        raise WorkloadInvalid("a line is an object")
    arrival = number_in(entry, "arrival")
    if arrival is None:
        arrival = (number_in(entry, "timestamp") or 0.0) / 1000
    asked = [number_in(entry, name) for name in ("output_length", "max_tokens", "output_tokens")]
    wanted = next((int(value) for value in asked if value is not None), shape.output_tokens.low)
    if wanted < 1:
        raise WorkloadInvalid(f"{wanted} tokens of output; ask for 1 or more")
    messages = entry.get("messages")
    if isinstance(messages, list) and messages:
        if not all(isinstance(message, dict) and "role" in message for message in messages):
            raise WorkloadInvalid("each of messages is an object with a role")
        return Session([Turn(messages[-1], wanted)], messages[:-1], arrival)
    prompt = entry.get("prompt")
    if isinstance(prompt, str):
        return Session([Turn(user(prompt), wanted)], [], arrival)
    length = number_in(entry, "input_length")
    if length is None or length < 1:
        raise WorkloadInvalid("give messages, prompt, or input_length of 1 or more")
    ids = entry.get("hash_ids")
    ids = ids if isinstance(ids, list) else [f"line {number} block {i}" for i in range(int(length) // TRACE_BLOCK + 1)]
    if len(ids) * TRACE_BLOCK < length:
        raise WorkloadInvalid(f"{len(ids)} hash_ids stand for less than the {int(length)} tokens of input_length")
    blocks = (random.Random(f"block {block}").choices(WORDS, k=TRACE_BLOCK) for block in ids)
    text = " ".join(itertools.islice(itertools.chain.from_iterable(blocks), int(length)))
    return Session([Turn(user(text), wanted)], [], arrival)


def number_in(entry: dict[str, object], name: str) -> float | None:
    value = entry.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise WorkloadInvalid(f"{name} is {value!r:.40}; it must be a number from 0 up")
    return float(value)
