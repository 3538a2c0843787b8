"""What rules cost, and whether they hold: masks per row and per batch, and answers sampled from a random model.

    python bench/grammar.py cost MODEL [20]     time of masks, in this process
    python bench/grammar.py step MODEL [3]      time of a step of 64 rows with rules and without, of the whole engine
    python bench/grammar.py sample MODEL [200]  answers at temperature 1.5 under each kind of rule, judged

Each prints JSON lines. MODEL is a checkpoint with the published vocabulary, such as `inkcap demo-checkpoint` writes.
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

import jsonschema_rs
import torch

from inkcap import LLM, SamplingParams
from inkcap.base.matching import Compiler, json_grammar
from inkcap.base.step import RowSetup
from inkcap.base.turn import Start, TurnRules
from inkcap.base.vocabulary import CALL_JSON, END_MESSAGE, END_TURN, KINDS, MODEL, ORDINARY, TEXT, THINKING
from inkcap.chat.grammar import read_wish
from inkcap.chat.tokens import Tokenizer
from inkcap.llm import CompletionOutput
from inkcap.runner.guides import Guides
from inkcap.sampling.sampler import Sampler

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "email": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 16},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "save_person", "parameters": PERSON}},
]
WORDS = ["Ann", "O'Neil", "Zoë", "Maria", "Ng", "Ivanova", "Łukasz", "Smith-Jones", "Qi", "Björk", "van", "Dyke"]
STRING = {"type": "string"}
ROWS = 64
STEPS = 200
BOUND = {"bounded": PERSON}
FREE = {"unbounded": {**PERSON, "properties": {**PERSON["properties"], "name": STRING, "email": STRING}}}
SCHEMAS = {"get_weather": PLACE, "save_person": PERSON}
THINKING_TOKENS = 8  # budget of a sampled answer
ASKED: dict[str, dict[str, Any]] = {
    "required": {"tools": TOOLS, "tool_choice": "required"},
    "named": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "save_person"}}},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}},
}


def cost(path: str, rounds: int) -> None:
    """Print times of masks for a schema whose strings have any length, and for one whose strings are bounded."""
    tokenizer, compiler = Tokenizer.load(path), Compiler.load(path)
    for kind, schema in (FREE | BOUND).items():
        wish = read_wish(formats={"guided_json": schema})
        rules = wish.rules(Start.BETWEEN, {})
        assert rules is not None, "a format is a rule"
        lines = [[MODEL, TEXT, *tokenizer.encode_text(text), END_MESSAGE, END_TURN] for text in people(STEPS)]
        began = time.perf_counter()
        compiler.matcher(rules.text)
        compiled = 1e3 * (time.perf_counter() - began)
        one = alone(lines[:rounds], rules, compiler)
        many = together(lines, rules, compiler)
        line = {
            "compile_ms": round(compiled, 2),
            "one_row_us": quantiles([1e6 * t for t in one]),
            "rows_ms": quantiles([1e3 * t for t in many]),
        }
        print(json.dumps({"bench": "grammar.cost", "strings": kind, "rows": ROWS, **line, **where()}))


def people(count: int) -> list[str]:
    """Texts of PERSON that differ in everything that may differ, half of them with blanks."""
    draw = random.Random(0)
    found = []
    for i in range(count):
        person = {"name": " ".join(draw.sample(WORDS, 2))[:12], "age": draw.randrange(151)}
        if draw.random() < 0.7:
            person["tags"] = draw.sample(["red", "green", "blue"], draw.randrange(4))
        if draw.random() < 0.7:
            person["email"] = f"{draw.choice(WORDS)[:8]}@example.org"
        found.append(json.dumps(person, ensure_ascii=False, separators=(", ", ": ") if i % 2 else (",", ":")))
    return found


def alone(lines: list[list[int]], rules: TurnRules, compiler: Compiler) -> list[float]:
    """Seconds of each mask of one row."""
    found = []
    for line in lines:
        guides = Guides(compiler, torch.device("cpu"))
        guides.open([setup_of(0, [], rules)])
        for token in line:
            began = time.perf_counter()
            masks = guides.masks([0])
            found.append(time.perf_counter() - began)
            assert masks is not None, "every state of a strict turn has a mask"
            assert int(masks[0, token // 32]) >> (token % 32) & 1, f"token {token} must be allowed"
            guides.drawn([0], torch.tensor([token]))
    return found


def together(lines: list[list[int]], rules: TurnRules, compiler: Compiler) -> list[float]:
    """Seconds of the masks of each of STEPS steps of ROWS rows, each of which says one line after another.

    They begin together, in a grammar of which nothing is known yet.
    """
    found = []
    rows = [*range(ROWS)]
    guides = Guides(compiler, torch.device("cpu"))
    coming = itertools.cycle(lines)
    left: dict[int, list[int]] = {row: [] for row in rows}  # last token first
    for _ in range(STEPS):
        for row in rows:
            if not left[row]:
                guides.close([row])
                guides.open([setup_of(row, [], rules)])
                left[row] = next(coming)[::-1]
        began = time.perf_counter()
        masks = guides.masks(rows)
        found.append(time.perf_counter() - began)
        assert masks is not None, "every state of a strict turn has a mask"
        guides.drawn(rows, torch.tensor([left[row].pop() for row in rows]))
    return found


def setup_of(row: int, said: list[int], rules: TurnRules) -> RowSetup:
    """A row that has said something."""
    return RowSetup(row=row, tokens=[1, *said], prompt_length=1, params=SamplingParams(), seed=0, rules=rules)


def quantiles(values: list[float]) -> dict[str, float]:
    """The middle and the tail."""
    values = sorted(values)
    return {"p50": round(statistics.median(values), 2), "p90": round(values[int(len(values) * 0.9)], 2)}


def step(path: str, rounds: int, steps: int = 16) -> None:
    """Print what rules cost in steps of 64 rows of the whole engine: free rows, and rows with bounded strings or not.

    masks_ms is the time of all masks of a step, draw_ms that of drawing; on a GPU, masks are made while the forward
    pass runs. step_ms is the difference of two runs, one `steps` steps longer, so that prompts do not count; it has
    the forward pass in it, which reads more experts the more the rows differ, and free rows of a random model hardly
    do. No row ends. The best of each step time counts: whatever else the machine does only adds time.
    """
    endless = {kind: {"type": "array", "items": schema, "minItems": 500} for kind, schema in (BOUND | FREE).items()}
    asked: dict[str, dict[str, Any]] = {"free": {}}
    for kind, schema in endless.items():
        # a random model would fill its texts with blanks
        asked[kind] = {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}
    prompts = [[{"role": "user", "content": f"Number {i}, please."}] for i in range(ROWS)]
    with LLM(path, dtype="float32", max_model_len=512, max_num_seqs=ROWS, enable_prefix_caching=False) as llm:

        def seconds(kind: str, temperature: float, tokens: int) -> float:
            params = [
                SamplingParams(temperature=temperature, max_tokens=tokens, seed=i, ignore_eos=True) for i in range(ROWS)
            ]
            began = time.perf_counter()
            outputs = llm.chat(prompts, params, **asked[kind], use_tqdm=False)
            assert all(len(output.outputs[0].token_ids) == tokens for output in outputs), "a row ended"
            return time.perf_counter() - began

        for temperature in (1.0, 0.0):
            short, long = ({kind: [seconds(kind, temperature, 2)] for kind in asked} for _ in range(2))
            masks, draws = ({kind: [] for kind in asked} for _ in range(2))
            for kind in [*asked] * rounds:
                short[kind].append(seconds(kind, temperature, 4))
                with watched(Guides, "masks", masks[kind]), watched(Sampler, "draw", draws[kind]):
                    long[kind].append(seconds(kind, temperature, 4 + steps))
            best = {kind: round(1e3 * (min(long[kind][1:]) - min(short[kind][1:])) / steps, 2) for kind in asked}
            line = {"bench": "grammar.step", "rows": ROWS, "temperature": temperature, "step_ms": best}
            line["masks_ms"] = {kind: quantiles(masks[kind]) for kind in endless}
            line["draw_ms"] = {kind: quantiles(draws[kind]) for kind in asked}
            print(json.dumps(line | where()), flush=True)


@contextlib.contextmanager
def watched(owner: type, name: str, found: list[float]) -> Iterator[None]:
    """Note how long a method takes, in ms, whenever it is called for ROWS rows."""
    method = getattr(owner, name)

    def timed(self: object, rows: Any, *more: Any) -> Any:
        began = time.perf_counter()
        result = method(self, rows, *more)
        if len(rows) == ROWS:
            found.append(1e3 * (time.perf_counter() - began))
        return result

    setattr(owner, name, timed)
    try:
        yield
    finally:
        setattr(owner, name, method)


def sample(path: str, count: int, kinds: Sequence[str], seed: int = 1, tokens: int = 100) -> None:
    """Sample `count` answers of each kind and judge them; a wrong one raises AssertionError. Prints a JSON line each.

    The random model would call tools for ever and never think, so ending the turn, where rules allow it, is made
    likelier, and in every second answer thinking, too.
    """
    judge = Judge(path)
    with LLM(path, dtype="float32", max_model_len=1024, max_num_seqs=16) as llm:
        for kind in kinds:
            began = time.perf_counter()
            biases = ({END_TURN: 60.0}, {END_TURN: 60.0, THINKING: 60.0})
            params = [
                SamplingParams(temperature=1.5, max_tokens=tokens, seed=seed * 1000 + i, logit_bias=biases[i % 2])
                for i in range(count)
            ]
            messages = [[{"role": "user", "content": f"Number {i}, please."}] for i in range(count)]
            answers = llm.chat(messages, params, **ASKED[kind], thinking_token_budget=THINKING_TOKENS, use_tqdm=False)
            outputs = [answer.outputs[0] for answer in answers]
            found = Counter(judge.judged(kind, output) for output in outputs)
            line = {
                "bench": "grammar.sample",
                "kind": kind,
                "samples": count,
                "temperature": 1.5,
                "thinking_budget": THINKING_TOKENS,
                "max_tokens": tokens,
                "valid": found["valid"],
                "cut_valid_prefix": found["cut"],
                "thought": sum(bool(output.reasoning) for output in outputs),
                "calls": sum(len(output.tool_calls) for output in outputs),
                "tokens": sum(len(output.token_ids) for output in outputs),
                **where(),
            }
            print(json.dumps(line), flush=True)
            print(f"{kind}: {dict(found)} in {time.perf_counter() - began:.0f} s", flush=True)


class Judge:
    """Judges answers by their tokens, apart from the guide that held them: frames, grammars, schemas."""

    def __init__(self, path: str) -> None:
        self.compiler = Compiler.load(path)
        calls = read_wish(tools=TOOLS).tools
        self.calls = {name: tool.grammar for name, tool in calls.items()}
        self.text = json_grammar(PERSON)

    def judged(self, kind: str, output: CompletionOutput) -> str:
        """valid, or cut: ended by its length, after a beginning that is valid."""
        ids = output.token_ids
        messages, rest = split(ids)
        thinking = sum(len(payload) for _, of, payload in messages if of == THINKING)
        assert thinking <= THINKING_TOKENS, f"{thinking} tokens of thinking"
        if output.finish_reason == "length":
            for message in messages[:-1]:
                self._message(kind, *message, whole=True)
            if messages:
                self._message(kind, *messages[-1], whole=rest is not None)
            if rest:
                name = b"".join(self.compiler.pieces[token] for token in rest[1:]).decode()
                assert rest[0] == MODEL, rest
                assert any(tool.startswith(name) for tool in self.calls), rest
            return "cut"
        assert rest == [END_TURN], rest
        for message in messages:
            self._message(kind, *message, whole=True)
        answers = [of for _, of, _ in messages if of != THINKING]
        if kind == "json_schema":
            assert answers == [TEXT], answers
            assert not output.tool_calls, output.tool_calls
            jsonschema_rs.validate(PERSON, json.loads(output.text))
            return "valid"
        assert answers == [CALL_JSON] * len(output.tool_calls), answers
        assert not output.text, output.text
        for call in output.tool_calls:
            jsonschema_rs.validate(SCHEMAS[call.name], json.loads(call.arguments))
        if kind == "named":
            assert [call.name for call in output.tool_calls] == ["save_person"], output.tool_calls
        assert output.tool_calls, "a call is asked for"
        return "valid"

    def _message(self, kind: str, header: list[int], of: int, payload: list[int], whole: bool) -> None:
        """One message: without control tokens, and by a fresh matcher a text of its grammar or the beginning of one."""
        assert all(token < ORDINARY for token in (*header, *payload)), (header, payload)
        if of == THINKING:
            assert not header, header
            return
        if of == CALL_JSON:
            assert kind != "json_schema", "no tools were given"
            name = b"".join(self.compiler.pieces[token] for token in header).decode()
            grammar = self.calls[name]
        else:
            assert (of, kind, header) == (TEXT, "json_schema", [])
            grammar = self.text
        matcher = self.compiler.matcher(grammar)
        for token in payload:
            matcher.consume(token)
        assert not matcher.error, matcher.error
        assert matcher.accepting or not whole, "a whole message is a whole text"


def split(ids: Sequence[int]) -> tuple[list[tuple[list[int], int, list[int]]], list[int] | None]:
    """Messages of an answer as (header, kind, payload), and what follows the last; None if that is still open."""
    messages: list[tuple[list[int], int, list[int]]] = []
    rest: list[int] | None = []
    for token in ids:
        if rest is None:
            if token == END_MESSAGE:
                rest = []
            else:
                messages[-1][2].append(token)
        elif token in KINDS:
            assert rest[:1] == [MODEL], rest
            messages.append((rest[1:], token, []))
            rest = None
        else:
            rest.append(token)
    return messages, rest


def where() -> dict[str, object]:
    """What figures depend on."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "load": round(os.getloadavg()[0], 1),
        "llguidance": version("llguidance"),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "commit": commit,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "step", "sample"])
    parser.add_argument("model")
    parser.add_argument("count", type=int, nargs="?", help="rounds, or answers of each kind")
    parser.add_argument("--kinds", nargs="+", choices=[*ASKED], help="of answers")
    given = parser.parse_args()
    if given.what == "cost":
        cost(given.model, given.count or 20)
    elif given.what == "step":
        step(given.model, given.count or 3)
    else:
        sample(given.model, given.count or 200, given.kinds or [*ASKED])
