"""Bodies of JSON: parsed in pieces as in one, refused when too many values are in them, without holding up others."""

import asyncio
import json
import random

import msgspec
import pytest
from starlette.exceptions import HTTPException

from inkcap.server.body import MOST, PIECE_BYTES, Pieces, count


def made(draw: random.Random, depth: int = 0) -> object:
    kind = draw.randrange(7 if depth < 6 else 4)
    if kind == 4:
        return [made(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 5:
        return {f"k{i}": made(draw, depth + 1) for i in range(draw.randrange(4))}
    return [1, -2.5e-3, 'é"\\x\n[{,', None, 0, 0, True][kind]


def turns(data: bytes) -> tuple[object, int]:
    """What the pieces make of `data`, and how often others had a turn meanwhile."""
    seen = 0

    async def both() -> object:
        async def beside() -> None:
            nonlocal seen
            while True:
                await asyncio.sleep(0)
                seen += 1

        task = asyncio.ensure_future(beside())
        try:
            return await Pieces().value(data)
        finally:
            task.cancel()

    return asyncio.run(both()), seen


@pytest.mark.parametrize("indent", [None, 1])
def test_pieces_give_what_the_whole_gives(indent):
    draw = random.Random(5)
    value = {
        "mixed": [made(draw) for _ in range(9000)],
        "long": "é" * PIECE_BYTES,
        "ids": list(range(60_000)),
        "floats": [-1.5e-7] * 20_000,
        "deep": [[[made(draw) for _ in range(5000)]], {"a": {"b": [made(draw) for _ in range(5000)]}}],
    }
    data = json.dumps(value, indent=indent, ensure_ascii=False).encode()
    found, seen = turns(b" \n" + data + b"\n")
    assert found == value
    assert seen > len(data) // PIECE_BYTES // 2  # others had a turn for every piece or two


@pytest.mark.parametrize(
    "wrong",
    [
        b"[" + b"1," * 90_000 + b",1]",
        b"[" + b"1," * 90_000 + b"]",
        b"[" + b"1," * 90_000 + b"1]x",
        b"[" + b"1," * 90_000 + b"1",
        b"[" + b"1," * 90_000 + b"NaN]",
        b'{"a":[' + b'"x",' * 90_000 + b"Infinity]}",
        b'{"a":"' + b"x" * PIECE_BYTES + b'\xff"}',
        b'{"a":' + b" " * PIECE_BYTES + b"}",
    ],
)
def test_what_is_no_json_is_none_in_pieces_either(wrong):
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
        turns(wrong)


def test_large_values_may_stand_some_levels_deep_and_no_deeper():
    inner = b'"' + b"a" * PIECE_BYTES + b'"'
    found, _ = turns(b"[" * 15 + inner + b"]" * 15)
    for _ in range(15):
        (found,) = found
    assert found == "a" * PIECE_BYTES
    with pytest.raises(HTTPException, match="nested too deeply"):
        turns(b"[" * 17 + inner + b"]" * 17)


@pytest.mark.parametrize("sign", MOST)
def test_too_many_values_are_refused_before_they_are_made(call, sign):
    most = MOST[sign]
    asyncio.run(count(sign * most))
    with pytest.raises(HTTPException, match="too many for one request"):
        asyncio.run(count(b" " * PIECE_BYTES + sign * (most + 1)))
    reply = call("POST", "/v1/completions", content=sign * (most + 1), headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert f"more than {most:,} {sign.decode()}" in reply.json()["error"]["message"]


def test_a_large_body_that_is_right_is_answered(call, engine):
    ids = [token % 1000 for token in range(40_000)]
    reply = call("POST", "/v1/completions", json={"prompt": ids, "truncate_prompt_tokens": 50, "max_tokens": 2})
    assert reply.status_code == 200
    assert engine.requests[0].token_ids == ids[-50:]


def test_more_ids_than_any_prompt_has_are_refused_before_they_are_looked_at(call, engine):
    reply = call("POST", "/v1/completions", json={"prompt": [[1] * (engine.info.vocab_size + 20_000)]})
    assert reply.status_code == 400
    assert f"more than {engine.info.vocab_size:,} numbers" in reply.json()["error"]["message"]
    assert not engine.requests
