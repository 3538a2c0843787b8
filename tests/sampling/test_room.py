"""Bounded strings: the quick masks are the grammar's own, for whatever is said, and no grammar gets them wrongly."""

import numpy as np
import pytest

from inkcap.base.masks import PUT_OFF, Filler
from inkcap.base.matching import json_grammar
from inkcap.base.room import WORDS, Rooms, steady, witness
from inkcap.base.vocabulary import VOCAB
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
    "long": of(a=text(150), b=text(300, minLength=20)),
    "unbounded, too": of(a={"type": "string"}, b=text(9), c={"type": "string", "minLength": 4}),
    "keys": of(closed=False, name={"type": "integer"}, a=text(9)) | {"additionalProperties": {"type": "string"}},
    "values of any key": {"type": "object", "additionalProperties": text(20)},
    "one of alternatives": of(a={"anyOf": [text(14), {"type": "null"}]}, b={"type": "array", "items": text(3)}),
    "numbers": of(a={"type": "integer"}, b={"type": "number"}, c=text(3), d={"type": "integer", "maximum": 120}),
    "numbers in keys": of(closed=False, **{"a1,b": {"type": "integer"}, "a2,c": text(5)}),
    "literal objects": {"type": "array", "items": {"enum": [{"a": 1, "b": 2}, {"a": 3, "b": 4}, [1, 2], [3, 4]]}},
    "alternatives that differ": {"anyOf": [of(a=text(3), b=text(3)), of(a=text(9), c=text(3))]},
}


def masks(compiler, *matchers):
    out = np.zeros((len(matchers), WORDS), np.uint32)
    compiler.fill([(matcher, row) for row, matcher in enumerate(matchers)], out)
    return out


class Walked:
    """A matcher whose masks llguidance makes alone."""

    def __init__(self, compiler, grammar):
        self.inner = compiler.matcher(grammar).inner

    def mask(self):
        return np.frombuffer(self.inner.compute_bitmask(), np.uint32)


def fill(compiler, matcher):
    out = np.zeros((1, WORDS), np.uint32)
    compiler.fill([(matcher, 0)], out)
    return out[0]


def bits(mask):
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]


def differences(compiler, got, wanted):
    """The tokens in which masks differ, and up to five of them as text."""
    tokens = np.flatnonzero(bits(got ^ wanted))
    return len(tokens), [compiler.pieces[token] for token in tokens[:5]]


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("name", SCHEMAS)
def test_quick_masks_are_those_of_the_whole_grammar(compiler, name, compact):
    grammar = call_grammar("f", SCHEMAS[name]) if compact else json_grammar(SCHEMAS[name])
    assert witness(grammar) is not None
    rng = np.random.default_rng(sum(name.encode()) + compact)
    quoted = np.array([token for piece, token in compiler.ids.items() if b'"' in piece])
    digits = np.array([token for piece, token in compiler.ids.items() if not piece.strip(b"0123456789,]} ")])
    inside = 0
    for _ in range(2):
        quick, whole = compiler.matcher(grammar), Walked(compiler, grammar)
        for _ in range(40):
            kept = quick.inside is not None
            got, wanted = fill(compiler, quick), whole.mask()
            assert (got == wanted).all(), (name, kept, quick.room, differences(compiler, got, wanted))
            inside += kept
            may = bits(wanted).astype(bool)
            allowed = np.flatnonzero(may)
            if not len(allowed) or whole.inner.is_stopped():
                break
            # every kind of token gets its turn, not only those of which there are many
            short = [token for token in allowed[rng.integers(len(allowed), size=8)] if len(compiler.pieces[token]) < 4]
            kinds = (quoted[may[quoted]], digits[may[digits]], short, allowed)
            token = int(rng.choice(next(kind for kind in kinds[rng.integers(4) :] if len(kind))))
            assert quick.consume(token)
            assert whole.inner.consume_token(token)
        assert not quick.error
    assert not inside or steady(grammar)


@pytest.mark.parametrize("least", [0, 3])
def test_every_room_has_its_own_mask_down_to_none(compiler, least):
    grammar = json_grammar(of(a=text(140, minLength=least), b=text(2)))
    quick, whole, owed = compiler.matcher(grammar), Walked(compiler, grammar), 0
    for i, token in enumerate(compiler.ids[piece] for piece in [b'{"', b"a", b'":"', *[b"x"] * 140]):
        assert (quick.inside is not None) == (i > 3 + least), "from where the string may end"
        assert (fill(compiler, quick) == whole.mask()).all()
        assert quick.consume(token)
        owed = max(owed, len(quick.owed))
        assert whole.inner.consume_token(token)
    assert owed == PUT_OFF, "letters are put off, and not for ever"
    assert (fill(compiler, quick) == whole.mask()).all()
    assert quick.full
    assert quick.inside is None, "the end may be forced"
    assert not bits(whole.mask())[compiler.ids[b"x"]]


def test_what_follows_a_string_must_not_depend_on_its_length():
    assert not steady(json_grammar(SCHEMAS["alternatives"]))
    assert not steady(json_grammar(SCHEMAS["alternatives that differ"]))
    assert steady(json_grammar(SCHEMAS["one of alternatives"]))
    assert not steady(json_grammar(SCHEMAS["literal objects"]))
    assert steady(json_grammar(of(a=text(3), anyOf=text(4))))


def test_limits_of_the_quick_way_leave_the_slow_one(compiler):
    grammar = json_grammar(SCHEMAS["one"])
    quick, whole = compiler.matcher(grammar), Walked(compiler, grammar)
    quick.rest = quick.grammar.rest.deep_copy()
    quick.rest.consume_token(compiler.ids[b"}"])  # an error, as limits make one
    for token in (compiler.ids[piece] for piece in (b'{"', b"a", b'":"', b"x", b"\\", b"n")):
        assert (fill(compiler, quick) == whole.mask()).all()
        assert quick.consume(token)
        assert whole.inner.consume_token(token)
    assert (fill(compiler, quick) == whole.mask()).all()


def test_texts_in_one_place_share_its_mask(compiler, monkeypatch):
    grammar = json_grammar(of(a=text(20), b={"type": "string"}, c=text(3)))

    def masks_of(*pieces):
        quick, whole = compiler.matcher(grammar), Walked(compiler, grammar)
        for token in (compiler.ids[piece] for piece in pieces):
            assert (fill(compiler, quick) == whole.mask()).all()
            assert quick.consume(token)
            assert whole.inner.consume_token(token)
        assert (fill(compiler, quick) == whole.mask()).all()

    masks_of(b'{"', b"a", b'":"', b"Hello", b'","', b"b", b'":"', b"x", b'","', b"c", b'":"')
    masks_of(b'{"', b"a", b'":"', b'","', b"b", b'":"', b" the", b"\\n", b'","', b"c", b'":"', b"ab")
    monkeypatch.setattr(Filler, "_walk", lambda *_: pytest.fail("it was walked before"))
    masks_of(b'{"', b"a", b'":"', b" the", b"a", b'","', b"b", b'":"', b"x", b"x", b'","', b"c", b'":"', b"\\n")


WALKED = {
    "a pattern": of(a=text(5, pattern="^[a-z]+$")),
    "a format": of(a=text(20, format="date")),
    "names of properties": {**of(a=text(5)), "propertyNames": {"maxLength": 3}},
    "a literal beside it": of(a={"anyOf": [text(5), {"const": "a longer text"}]}),
    "no witness left": of(a=text(5), b={"enum": list("¶§ЖλФщ")}),
}


@pytest.mark.parametrize("name", WALKED)
def test_other_strings_are_walked(name):
    assert witness(json_grammar(WALKED[name])) is None
    assert witness(f"{json_grammar(SCHEMAS['one'])}X: /a+/\n") is None, "only grammars of a schema and nothing else"


def test_what_tokens_are_inside_a_string():
    pieces = [
        b" the",
        b"Hello",
        b'ab"',
        b'",\n',
        b"a\n",
        b'a\n"',
        b"x\\n",
        b'y\\"}"',
        b"z\\u00e9",
        b"\\u0",
        "Ж".encode() + b"\xd0",
    ]
    ranks = {bytes((byte,)): byte for byte in range(256)} | {piece: 300 + i for i, piece in enumerate(pieces)}
    rooms = Rooms(ranks)
    fitting = [bits(row) for row in rooms.fitting]
    needs = {piece: min(r for r in range(6) if fitting[r][ranks[piece]]) for piece in pieces}
    assert [*needs.values()] == [4, 5, 2, 0, 2, 2, 2, 3, 2, 1, 2], "a letter or an escape that is begun counts"
    assert rooms.longest == 5
    assert {piece for piece in pieces if rooms.letters[ranks[piece]]} == {b" the", b"Hello", b"x\\n"}
    assert {piece for piece in pieces if bits(rooms.plain)[ranks[piece]]} == {b" the", b"Hello"}
    assert {pieces[token - 300]: tail for token, tail in rooms.tails.items() if token >= 300} == {
        b'ab"': b'"', b'",\n': b'",\n', b'y\\"}"': b'"'
    }  # fmt: skip
    assert not {b" the", b"Hello", b"a\n", b'a\n"'} & rooms.rest.keys(), "plain text, and what no string can have"


def test_slow_walks_are_shared_by_threads(compiler, monkeypatch):
    grammars = [json_grammar(of(a=text(40, pattern=f"^[A-Za-z{more} ]{{1,30}}$"))) for more in "&-*"]
    quick = [compiler.matcher(grammar) for grammar in grammars]
    whole = [Walked(compiler, grammar) for grammar in grammars]
    monkeypatch.setattr("inkcap.base.masks.SLOW_S", 0.0)
    for token in (compiler.ids[piece] for piece in (b'{"', b"a", b'":"', b"A", b" the")):
        masks = np.zeros((4, WORDS), np.uint32)
        compiler.fill([*zip(quick, (2, 0, 3), strict=True)], masks)
        for matcher, row, alone in zip(quick, (2, 0, 3), whole, strict=True):
            assert (masks[row] == alone.mask()).all()
            assert matcher.consume(token)
            assert alone.inner.consume_token(token)
        assert all(matcher.slow for matcher in quick)
    assert [matcher.slow for matcher in quick] == [8 - 4] * 3
