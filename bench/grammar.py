"""What rules cost, and whether they hold: masks per row and per batch, and answers sampled from a random model.

    python bench/grammar.py cost MODEL          time of masks, in this process
    python bench/grammar.py sample MODEL [200]  answers at temperature 1.5 under each kind of rule, judged by jsonschema

MODEL is a checkpoint with the published vocabulary, such as `inkcap demo-checkpoint` writes.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from typing import Any

import jsonschema_rs
import torch

from inkcap import LLM, SamplingParams
from inkcap.base.matching import Compiler
from inkcap.base.step import RowSetup
from inkcap.base.turn import Start
from inkcap.base.vocabulary import END_MESSAGE, END_TURN, KINDS, MODEL, ORDINARY, TEXT
from inkcap.chat.grammar import read_wish
from inkcap.chat.tokens import Tokenizer
from inkcap.llm import CompletionOutput
from inkcap.runner.guides import Guides
from inkcap.sampling.guide import allow

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
    "properties": {"city": {"type": "string", "maxLength": 16}, "days": {"type": "integer", "maximum": 99}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "save_person", "parameters": PERSON}},
]
TEXTS = [
    '{"name":"Ann O\'Neil","age":42,"tags":["red","blue"],"email":"a@b.org"}',
    '{"name": "Zoë", "age": 7}',
    '{"age": 12, "name": "x"}',
]
STRING = {"type": "string"}
ASKED: dict[str, dict[str, Any]] = {
    "required": {"tools": TOOLS, "tool_choice": "required"},
    "named": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "save_person"}}},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}},
}


def cost(path: str, rounds: int) -> None:
    """Print times of masks for a schema whose strings have any length, and for one whose strings are bounded."""
    tokenizer, compiler = Tokenizer.load(path), Compiler.load(path)
    unbounded = {**PERSON, "properties": {**PERSON["properties"], "name": STRING, "email": STRING}}
    for what, schema in (("strings of any length", unbounded), ("strings of bounded length", PERSON)):
        print(what)
        cost_of(schema, tokenizer, compiler, rounds)


def cost_of(schema: dict[str, Any], tokenizer: Tokenizer, compiler: Compiler, rounds: int) -> None:
    """Print times of one row's mask, of a batch of 64, and of setting logits by it."""
    wish = read_wish(formats={"guided_json": schema})
    rules = wish.rules(Start.BETWEEN, {})
    assert rules is not None, "a format is a rule"
    prompt = [1]
    lines = [[MODEL, TEXT, *tokenizer.encode_text(text), END_MESSAGE, END_TURN] for text in TEXTS[:2]]
    ready(compiler, rules.text)
    alone = []
    for _ in range(rounds):
        for line in lines:
            guides = Guides(compiler, torch.device("cpu"))
            guides.open([RowSetup(row=0, tokens=prompt, prompt_length=1, params=SamplingParams(), seed=0, rules=rules)])
            for token in line:
                began = time.perf_counter()
                masks = guides.masks([0])
                alone.append(time.perf_counter() - began)
                assert masks is not None, "every state of a strict turn has a mask"
                assert int(masks[0, token // 32]) >> (token % 32) & 1, f"token {token} must be allowed"
                guides.drawn([0], torch.tensor([token]))
    report("mask of one row, us", [1e6 * t for t in alone])
    together = []
    setting = []
    rows = [*range(64)]
    logits = torch.randn(64, 200058)
    for turn in range(rounds):
        guides = Guides(compiler, torch.device("cpu"))
        setups = []
        for row in rows:
            line = lines[row % len(lines)]
            said = line[: (row * 7 + turn) % (len(line) - 1)]
            setups.append(
                RowSetup(row=row, tokens=prompt + said, prompt_length=1, params=SamplingParams(), seed=0, rules=rules)
            )
        guides.open(setups)
        guides.masks(rows)
        said = [len(setup.tokens) - 1 for setup in setups]
        guides.drawn(rows, torch.tensor([lines[row % len(lines)][said[row]] for row in rows]))
        began = time.perf_counter()
        masks = guides.masks(rows)
        together.append(time.perf_counter() - began)
        assert masks is not None, "every state of a strict turn has a mask"
        began = time.perf_counter()
        allow(logits.clone(), masks)
        setting.append(time.perf_counter() - began)
    report("masks of 64 rows, ms", [1e3 * t for t in together])
    report("64 rows of logits set by them (CPU, with a copy of the logits), ms", [1e3 * t for t in setting])


def ready(compiler: Compiler, grammar: str) -> None:
    """Compile, and say how long it took."""
    began = time.perf_counter()
    compiler.matcher(grammar)
    print(f"{'compiled in, ms':<70} {1e3 * (time.perf_counter() - began):8.2f}")


def report(what: str, values: list[float]) -> None:
    values = sorted(values)
    print(
        f"{what:<70} p50 {statistics.median(values):8.1f}  p90 {values[int(len(values) * 0.9)]:8.1f}  n {len(values)}"
    )


def sample(path: str, count: int, seed: int = 1, tokens: int = 100) -> dict[str, Counter[str]]:
    """Sample `count` answers of each kind and judge them; a wrong one raises AssertionError.

    The random model would call tools for ever, so ending the turn, where rules allow it, is made likelier.
    """
    found: dict[str, Counter[str]] = {}
    with LLM(path, dtype="float32", max_model_len=1024, max_num_seqs=16) as llm:
        for kind, asked in ASKED.items():
            began = time.perf_counter()
            params = [
                SamplingParams(temperature=1.5, max_tokens=tokens, seed=seed * 1000 + i, logit_bias={END_TURN: 60.0})
                for i in range(count)
            ]
            messages = [[{"role": "user", "content": f"Number {i}, please."}] for i in range(count)]
            answers = llm.chat(messages, params, **asked, thinking_token_budget=8, use_tqdm=False)
            found[kind] = Counter(judged(kind, answer.outputs[0]) for answer in answers)
            print(f"{kind:<12} {dict(found[kind])}  {time.perf_counter() - began:.1f} s", flush=True)
    return found


def judged(kind: str, output: CompletionOutput) -> str:
    """valid, or cut by length with a valid beginning."""
    ids = output.token_ids
    schemas = {"get_weather": PLACE, "save_person": PERSON}
    inside = False
    for token in ids:
        if token >= ORDINARY:
            assert not inside or token == END_MESSAGE, f"control token {token} inside a message"
            inside = token in KINDS
    if output.finish_reason == "length":
        return "cut"
    assert ids[-2:] == [END_MESSAGE, END_TURN], ids[-4:]
    if kind == "json_schema":
        jsonschema_rs.validate(PERSON, json.loads(output.text))
        assert not output.tool_calls, output.tool_calls
    else:
        assert output.tool_calls, output.text
        assert not output.text, output.text
        for call in output.tool_calls:
            jsonschema_rs.validate(schemas[call.name], json.loads(call.arguments))
    if kind == "named":
        assert [call.name for call in output.tool_calls] == ["save_person"], output.tool_calls
    return "valid"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "sample"])
    parser.add_argument("model")
    parser.add_argument("count", type=int, nargs="?", default=200)
    given = parser.parse_args()
    if given.what == "cost":
        cost(given.model, given.count)
    else:
        sample(given.model, given.count)
