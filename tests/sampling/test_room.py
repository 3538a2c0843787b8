"""Bounded strings: the quick masks are the grammar's own, for whatever is said, and no grammar gets them wrongly."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from inkcap.base.matching import WORDS, Compiler, Matcher, json_grammar
from inkcap.base.room import MOST_ROOM, fitting, letters, witness
from inkcap.base.vocabulary import VOCAB, read_rank_file
from inkcap.chat.grammar import call_grammar


def text(most, **more):
    return {"type": "string", "maxLength": most, **more}


def of(closed=True, **properties):
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": not closed,
    }


SCHEMAS = {
    "one": of(a=text(9)),
    "several": of(a=text(5, minLength=3), b=text(0), c={"type": "array", "items": text(7)}, d=text(40)),
    "open": of(closed=False, a=text(4)),
    "alternatives": of(
        a={"anyOf": [text(3), text(12), {"type": "null"}]}, b={"type": ["string", "integer"], "maxLength": 6}
    ),
    "beside literals": of(a={"enum": ["alpha", "beta"]}, b=text(6), c={"const": "§"}),
    "nested": of(a=of(b=of(c=text(8)))),
    "referred to": {"$defs": {"short": text(6)}, **of(a={"$ref": "#/$defs/short"}, b={"$ref": "#/$defs/short"})},
    "both": of(a={"allOf": [text(9), text(5)]}),
}


@pytest.fixture(scope="module")
def compiler():
    spec = find_spec("tml_renderers")
    return Compiler(read_rank_file(Path(spec.origin).parent / "data" / "o200k_base.tiktoken"))


def masks(compiler, *matchers):
    out = np.zeros((len(matchers), WORDS), np.uint32)
    compiler.fill([(matcher, row) for row, matcher in enumerate(matchers)], out)
    return out


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("name", SCHEMAS)
def test_quick_masks_are_those_of_the_whole_grammar(compiler, name, compact):
    grammar = call_grammar("f", SCHEMAS[name]) if compact else json_grammar(SCHEMAS[name])
    assert witness(grammar) is not None
    rng = np.random.default_rng(sum(name.encode()) + compact)
    rooms = set()
    for _ in range(3):
        quick = compiler.matcher(grammar)
        whole = Matcher(compiler.matcher(grammar).inner, None, 0)
        for _ in range(60):
            rooms.add(quick.room)
            got, wanted = masks(compiler, quick, whole)
            assert (got == wanted).all(), (name, quick.room)
            bits = np.unpackbits(wanted.view(np.uint8), bitorder="little")[:VOCAB]
            allowed = np.flatnonzero(bits)
            if not len(allowed) or quick.inner.is_stopped():
                break
            # every kind of token gets its turn, not only those of which there are many
            short = [token for token in allowed[rng.integers(len(allowed), size=8)] if len(compiler.pieces[token]) < 4]
            token = int(rng.choice(short or allowed))
            quick.consume(token)
            whole.consume(token)
    assert rooms - {0}, "the quick way was gone"
    assert not quick.error


WALKED = {
    "unbounded": of(a={"type": "string"}),
    "a pattern": of(a=text(5, pattern="^[a-z]+$")),
    "a format": of(a=text(20, format="date")),
    "names of properties": {**of(a=text(5)), "propertyNames": {"maxLength": 3}},
    "a literal beside it": of(a={"anyOf": [text(5), {"const": "a longer text"}]}),
    "no witness left": of(a=text(5), b={"enum": list("¶§ЖλФщ")}),
}


@pytest.mark.parametrize("name", WALKED)
def test_other_strings_are_walked(compiler, name):
    grammar = json_grammar(WALKED[name])
    assert witness(grammar) is None
    assert compiler.matcher(grammar).rest is None
    assert witness(f"{json_grammar(SCHEMAS['one'])}X: /a+/\n") is None, "only grammars of a schema and nothing else"


def test_what_fits_is_plain_and_no_longer_than_the_room(compiler):
    counts = {b"a": 1, b"ab c": 4, "Ж€".encode(): 2, b'a"': 0, b"\\": 0, b"\n": 0, b"\xd0": 0, b"\x7f": 0}
    assert {piece: letters(piece) for piece in counts} == counts
    lengths = np.zeros(WORDS * 32, np.int64)
    lengths[compiler.ids[b" the"]] = 4
    lengths[compiler.ids[b"Hello"]] = 5
    bits = np.unpackbits(fitting(lengths).view(np.uint8), axis=1, bitorder="little")
    assert not bits[0].any()
    for room in range(1, MOST_ROOM + 1):
        assert set(np.flatnonzero(bits[room])) == {
            compiler.ids[piece] for piece in (b" the", b"Hello")[: max(0, room - 3)]
        }
