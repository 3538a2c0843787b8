"""Random conversations and turns against the official renderer and its parser."""

import json
import random

import pytest

from inkcap.base.turn import Start
from inkcap.chat.parse import Parser
from inkcap.chat.render import RenderOptions, render
from inkcap.chat.tokens import CALL_JSON, END_MESSAGE, END_TURN, MODEL, TEXT, THINKING
from inkcap.chat.tools import Call

PIECES = [
    *"aZ1 \n\t'\r/!é中😀\u00a0\u2028\u0301\x00",
    *("The ", "answer", " 1234", "<|end_message|>", "<|message_user|>", "}}", '":{"', '"', "\\", "   ", "é", "&quot;"),
]
NAMES = ("get_weather", "f", "search.web", "read_file", "a-b", "x1")
NUMBERS = (0, -1, 1.5, 1e30, 1e-7, -0.0, 1e16, 123456789.125, 2**63, 2**64 - 1, -(2**63), 2**64, 0.00001)


def text(rng: random.Random, most: int = 12) -> str:
    return "".join(rng.choices(PIECES, k=rng.randrange(most)))


def words(rng: random.Random) -> str:
    return text(rng) + rng.choice("xyz")  # not empty


def value(rng: random.Random, depth: int = 0) -> object:
    kind = rng.randrange(7 if depth < 3 else 5)
    if kind < 5:
        return (rng.choice(NUMBERS), text(rng), True, None, rng.randrange(-1000, 1000))[kind]
    if kind == 5:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return mapping(rng, depth + 1)


def mapping(rng: random.Random, depth: int = 0) -> dict[str, object]:
    return {text(rng, 4): value(rng, depth) for _ in range(rng.randrange(4))}


def tools(rng: random.Random) -> list[dict]:
    made = []
    for name in rng.sample(NAMES, rng.randrange(len(NAMES))):
        function: dict[str, object] = {"name": name}
        if rng.random() < 0.7:
            function["description"] = text(rng)
        if rng.random() < 0.7:
            function["parameters"] = mapping(rng)
        if rng.random() < 0.3:
            function["strict"] = True
        made.append({"type": "function", "function": function})
    return made


def content(rng: random.Random) -> str | list[dict]:
    if rng.random() < 0.7:
        return text(rng)
    return [{"type": "text", "text": text(rng)} for _ in range(rng.randrange(1, 4))]


def conversation(rng: random.Random) -> tuple[list[dict], list[dict], int]:
    """The same messages in our form and in the oracle's, and the number of turns."""
    ours: list[dict] = []
    theirs: list[dict] = []
    turns = rng.randrange(1, 6)
    for _ in range(rng.randrange(3)):
        ours.append({"role": rng.choice(("system", "developer")), "content": content(rng)})
        theirs.append({"role": "system", "content": ours[-1]["content"]})
    for turn in range(turns):
        ours.append({"role": rng.choice(("user", "user", "user", "system")), "content": content(rng)})
        theirs.append(ours[-1])
        parts = [{"type": "text", "text": words(rng)} for _ in range(rng.randrange(1, 3))]
        ours.append({"role": "assistant", "content": parts})
        if rng.random() < 0.5:
            ours[-1][rng.choice(("reasoning", "reasoning_content"))] = thought = words(rng)
            parts = [{"type": "thinking", "thinking": thought}, *parts]
        theirs.append({"role": "assistant", "content": parts})
        if rng.random() < 0.4:
            calls = [
                {
                    "id": f"c{turn}.{i}",
                    "type": "function",
                    "function": {
                        "name": rng.choice(NAMES),
                        "arguments": json.dumps(mapping(rng), ensure_ascii=rng.random() < 0.5),
                    },
                }
                for i in range(rng.randrange(1, 4))
            ]
            ours[-1]["tool_calls"] = theirs[-1]["tool_calls"] = calls
            for call in calls:
                ours.append({"role": "tool", "tool_call_id": call["id"], "content": content(rng)})
                theirs.append({**ours[-1], "name": call["function"]["name"]})
    return ours, theirs, turns


@pytest.mark.parametrize("position", ["first", "after-system"])
def test_random_conversations_render_alike(tokenizer, oracle, position):
    rng = random.Random(position)
    done = 0
    while done < 1500:
        ours, theirs, turns = conversation(rng)
        declared = tools(rng)
        effort = rng.choice((None, 0.0, 0.9, rng.random()))
        if declared:
            declare = {"role": "tool_declare", "content": json.dumps(declared)}
            leading = next(i for i, message in enumerate(theirs) if message["role"] != "system")
            theirs.insert(leading if position == "after-system" else 0, declare)
        rendered = render(tokenizer, ours, declared, effort, RenderOptions(tools_position=position))
        assert rendered.token_ids == oracle.ids(theirs, effort), (ours, declared, effort)
        done += turns


def block(rng: random.Random, tokenizer) -> tuple[list[int], tuple]:
    """One message of a turn, and what must be read from it."""
    kind = rng.choice((THINKING, TEXT, CALL_JSON))
    if kind != CALL_JSON:
        written = text(rng, 30)
        return [MODEL, kind, *tokenizer.encode_text(written), END_MESSAGE], ("", written)
    name, arguments = rng.choice(NAMES), mapping(rng)
    payload = json.dumps(
        {"name": name, "args": arguments}, ensure_ascii=False, separators=rng.choice([(",", ":"), (", ", ": ")])
    )
    ids = [MODEL, *tokenizer.encode_text(name), CALL_JSON, *tokenizer.encode_text(payload), END_MESSAGE]
    return ids, (name, arguments)


def official(oracle, ids: list[int]) -> list[tuple]:
    found = []
    for message in oracle.parse(ids):
        content = message.content
        if isinstance(content, oracle.chat.InvokeTool):
            found.append(("call", content.name, {arg.name: json.loads(arg.value) for arg in content.args}))
        elif isinstance(content, oracle.chat.Thinking):
            found.append(("thought", content.text))
        elif isinstance(content, oracle.chat.Text):
            found.append(("content", content.text))
    return joined(found)


def joined(found: list[tuple]) -> list[tuple]:
    """Neighbours of one kind joined, empty texts left out."""
    out: list[tuple] = []
    for item in found:
        if item[0] != "call" and out and out[-1][0] == item[0]:
            out[-1] = (item[0], out[-1][1] + item[1])
        elif item[0] == "call" or item[1]:
            out.append(item)
    return out


def read(parser: Parser, ids: list[int], rng: random.Random) -> list[tuple]:
    events = []
    while ids:
        cut = rng.choice((1, 1, 2, 3, 8, 100))
        events += parser.feed(ids[:cut])
        ids = ids[cut:]
    events += parser.finish()
    return joined(
        [
            ("call", event.name, json.loads(event.arguments))
            if isinstance(event, Call)
            else (type(event).__name__.lower(), event.text)
            for event in events
        ]
    )


def rounded(item: object) -> object:
    """Integers beyond 64 bits are floats to the oracle; ours keeps their digits."""
    if isinstance(item, dict):
        return {key: rounded(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return type(item)(rounded(value) for value in item)
    return float(item) if isinstance(item, int) and not isinstance(item, bool) else item


def test_three_thousand_random_turns_parse_alike(tokenizer, oracle):
    rng = random.Random(11)
    kinds = set()
    for _ in range(3000):
        ids: list[int] = []
        for _ in range(rng.randrange(1, 5)):
            ids += block(rng, tokenizer)[0]
        ids.append(END_TURN)
        expected = official(oracle, ids)
        kinds |= {item[0] for item in expected}
        start, given = rng.choice(((Start.BETWEEN, ids), (Start.HEADER, ids[1:]), (Start.BETWEEN, ids[1:])))
        found = read(Parser(tokenizer, start, NAMES), given, rng)
        assert rounded(found) == rounded(expected), ids
    assert kinds == {"call", "thought", "content"}
