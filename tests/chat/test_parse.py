"""The parser: worked example, every malformed turn, the hold rule; cutting the stream changes nothing."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inkcap.base.turn import Start
from inkcap.chat.parse import Content, Event, Parser, Thought
from inkcap.chat.tokens import (
    CALL_JSON,
    CALL_TEXT,
    END_MESSAGE,
    END_OF_TEXT,
    END_TURN,
    MODEL,
    ORDINARY,
    SYSTEM,
    TEXT,
    THINKING,
    TOOL,
    USER,
    VOCAB,
    Tokenizer,
)
from inkcap.chat.tools import Call

TOOLS = ("get_weather", "f", "g")
CALL_F = '{"name":"f","args":{"x":1}}'


def flat(tokenizer: Tokenizer, *parts: int | str) -> list[int]:
    """Control tokens by id, text as text."""
    return [token for part in parts for token in ([part] if isinstance(part, int) else tokenizer.encode_text(part))]


def merged(events: list[Event]) -> list[tuple[str, ...]]:
    """Events without call ids, neighbours of one kind joined."""
    out: list[tuple[str, ...]] = []
    for event in events:
        if isinstance(event, Call):
            out.append(("call", str(event.index), event.name, event.arguments))
        elif out and out[-1][0] == type(event).__name__.lower():
            out[-1] = (out[-1][0], out[-1][1] + event.text)
        else:
            out.append((type(event).__name__.lower(), event.text))
    return out


def parse(parser: Parser, ids: list[int], cuts: list[int] | None = None) -> list[tuple[str, ...]]:
    """The whole stream, in pieces of the sizes in `cuts`, then the rest."""
    events: list[Event] = []
    for cut in cuts or ():
        events += parser.feed(ids[:cut])
        ids = ids[cut:]
    return merged([*events, *parser.feed(ids), *parser.finish()])


def test_example_h(tokenizer):
    parser = Parser(tokenizer)
    ids = [200001, 200008, 49631, 3479, 200010, 200001, 200004, 17021, 200010, 200006]
    assert parse(parser, ids) == [("thought", "think hard"), ("content", "answer")]
    assert parser.ended
    assert parser.reasoning_tokens == 2


# Every turn that the official parser refuses, cuts short or reads its own way. Text is kept wherever there is some.
MALFORMED = [
    (
        "headerless thinking",
        (THINKING, "a", END_MESSAGE, MODEL, TEXT, "b", END_MESSAGE),
        [("thought", "a"), ("content", "b")],
    ),
    ("headerless text", (TEXT, "a", END_MESSAGE, END_TURN), [("content", "a")]),
    ("headerless call", ("f", CALL_JSON, CALL_F, END_MESSAGE), [("call", "0", "f", '{"x":1}')]),
    ("control token in text", (MODEL, TEXT, "a", USER, "b", END_MESSAGE), [("content", "a<|message_user|>b")]),
    ("control token in thinking", (MODEL, THINKING, "a", TEXT, "b"), [("thought", "a<|content_text|>b")]),
    ("control token in a call", (MODEL, "f", CALL_JSON, "{", MODEL, END_MESSAGE), [("content", "{<|message_model|>")]),
    ("end of turn in text", (MODEL, TEXT, "a", END_TURN), [("content", "a")]),
    ("end of text in thinking", (MODEL, THINKING, "a", END_OF_TEXT), [("thought", "a")]),
    ("end of turn in a call", (MODEL, "f", CALL_JSON, CALL_F, END_TURN), [("call", "0", "f", '{"x":1}')]),
    ("no end of the first message", (MODEL, TEXT, "a"), [("content", "a")]),
    ("no end of a later message", (MODEL, TEXT, "a", END_MESSAGE, MODEL, TEXT, "b"), [("content", "ab")]),
    ("no kind", (MODEL, "bare words"), [("content", "bare words")]),
    ("no kind and ended", (MODEL, "bare words", END_MESSAGE, END_TURN), [("content", "bare words")]),
    ("nothing but text", ("bare words", END_TURN), [("content", "bare words")]),
    ("bare text that looks like a tool", ("f", END_TURN), [("content", "f")]),
    ("bare text, then a message", ("get", MODEL, TEXT, "b", END_MESSAGE), [("content", "getb")]),
    ("a name before text", (MODEL, "f", TEXT, "b", END_MESSAGE), [("content", "fb")]),
    ("two roles", (MODEL, MODEL, TEXT, "a", END_MESSAGE), [("content", "a")]),
    ("two ends", (MODEL, TEXT, "a", END_MESSAGE, END_MESSAGE, MODEL, TEXT, "b", END_MESSAGE), [("content", "ab")]),
    ("after the end of turn", (MODEL, TEXT, "a", END_MESSAGE, END_TURN, MODEL, TEXT, "b"), [("content", "a")]),
    ("the user's part", (MODEL, TEXT, "a", END_MESSAGE, USER, TEXT, "b", END_MESSAGE), [("content", "a")]),
    (
        "a tool's part",
        (MODEL, "f", CALL_JSON, CALL_F, END_MESSAGE, TOOL, "f", TEXT, "1"),
        [("call", "0", "f", '{"x":1}')],
    ),
    ("the system's part", (SYSTEM, TEXT, "b", END_MESSAGE), []),
    ("another name in front", (MODEL, "g", CALL_JSON, CALL_F, END_MESSAGE), [("call", "0", "f", '{"x":1}')]),
    ("an undeclared name", (MODEL, "h", CALL_JSON, '{"name":"h","args":{}}', END_MESSAGE), [("call", "0", "h", "{}")]),
    (
        "arguments for args",
        (MODEL, "f", CALL_JSON, '{"name":"f","arguments":{}}', END_MESSAGE),
        [("call", "0", "f", "{}")],
    ),
    ("further keys", (MODEL, "f", CALL_JSON, '{"id":1,"name":"f","args":{}}', END_MESSAGE), [("call", "0", "f", "{}")]),
    ("no name", (MODEL, "f", CALL_JSON, '{"args":{}}', END_MESSAGE), [("content", '{"args":{}}')]),
    ("no args", (MODEL, "f", CALL_JSON, '{"name":"f"}', END_MESSAGE), [("content", '{"name":"f"}')]),
    (
        "args no object",
        (MODEL, "f", CALL_JSON, '{"name":"f","args":1}', END_MESSAGE),
        [("content", '{"name":"f","args":1}')],
    ),
    ("text after the JSON", (MODEL, "f", CALL_JSON, CALL_F, "!", END_MESSAGE), [("content", CALL_F + "!")]),
    (
        "entities for quotes",
        (MODEL, "f", CALL_JSON, "{&quot;name&quot;:&quot;f&quot;,&quot;args&quot;:{}}"),
        [("call", "0", "f", "{}")],
    ),
    ("a call cut short", (MODEL, "f", CALL_JSON, '{"name":"f","ar'), [("content", '{"name":"f","ar')]),
    ("an empty call", (MODEL, "f", CALL_JSON, END_MESSAGE), [("content", "f")]),
    ("a text call", (MODEL, CALL_TEXT, "look up", END_MESSAGE), [("content", "look up")]),
    ("empty messages", (MODEL, THINKING, END_MESSAGE, MODEL, TEXT, END_MESSAGE, END_TURN), []),
    ("half a character at the end", (MODEL, TEXT, "a", 160, END_MESSAGE), [("content", "a\ufffd")]),
    (
        "half a character in a call",
        (MODEL, "f", CALL_JSON, '{"name":"', 160, END_MESSAGE),
        [("content", '{"name":"\ufffd')],
    ),
    ("an id that does not exist", (MODEL, TEXT, "a", VOCAB, END_MESSAGE), [("content", "a\ufffd")]),
    ("such an id in front", (MODEL, VOCAB, TEXT, "a"), [("content", "\ufffda")]),
    ("a control token in front", (MODEL, 200_028, TEXT, "a"), [("content", "<|begin_of_text|>a")]),
    (
        "bare words after thinking",
        (MODEL, THINKING, "a", END_MESSAGE, MODEL, "bare words", END_MESSAGE),
        [("thought", "a"), ("content", "bare words")],
    ),
    ("a lone end of turn", (END_TURN,), []),
    ("nothing", (), []),
]


@pytest.mark.parametrize(("parts", "expected"), [row[1:] for row in MALFORMED], ids=[row[0] for row in MALFORMED])
def test_a_malformed_turn_loses_nothing_however_it_is_cut(tokenizer, parts, expected):
    assert tokenizer.token_bytes[160] == b"\xe4"  # the first byte of a character
    ids = flat(tokenizer, *parts)
    for size in (1, 2, 3, len(ids) + 1):
        assert parse(Parser(tokenizer, tools=TOOLS), ids, [size] * len(ids)) == expected


@pytest.mark.parametrize("start", [Start.HEADER, Start.BETWEEN])
def test_a_primed_role_changes_nothing(tokenizer, start):
    for parts in (("f", CALL_JSON, CALL_F, END_MESSAGE), (THINKING, "a", END_MESSAGE), ("bare words",)):
        ids = flat(tokenizer, *parts)
        assert parse(Parser(tokenizer, start, TOOLS), ids) == parse(
            Parser(tokenizer, Start.BETWEEN, TOOLS), [MODEL, *ids]
        )


def test_a_continued_message_goes_on(tokenizer):
    ids = flat(tokenizer, " and more", END_MESSAGE, MODEL, TEXT, "!", END_MESSAGE, END_TURN)
    assert parse(Parser(tokenizer, Start.TEXT), ids) == [("content", " and more!")]
    parser = Parser(tokenizer, Start.THINKING)
    assert parse(parser, ids) == [("thought", " and more"), ("content", "!")]
    assert parser.reasoning_tokens == 2


def test_several_calls_are_counted(tokenizer):
    call_g = '{"name":"g","args":{}}'
    ids = flat(
        tokenizer, MODEL, "f", CALL_JSON, CALL_F, END_MESSAGE, MODEL, "g", CALL_JSON, call_g, END_MESSAGE, MODEL,
        "f", CALL_JSON, "broken", END_MESSAGE, MODEL, "h", CALL_JSON, '{"name":"h","args":{}}', END_MESSAGE, END_TURN,
    )  # fmt: skip
    parser = Parser(tokenizer, tools=TOOLS)
    events = parser.feed(ids)
    assert merged(events) == [
        ("call", "0", "f", '{"x":1}'),
        ("call", "1", "g", "{}"),
        ("content", "broken"),
        ("call", "2", "h", "{}"),
    ]
    assert len({event.id for event in events if isinstance(event, Call)}) == 3
    assert (parser.calls, parser.malformed_calls, parser.undeclared_calls) == (3, 1, 1)


def test_bare_text_streams_at_once_without_tools(tokenizer):
    parser = Parser(tokenizer)
    assert [parser.feed((token,)) for token in flat(tokenizer, "Yes, I can")] == [
        [Content("Yes")],
        [Content(",")],
        [Content(" I")],
        [Content(" can")],
    ]
    assert parser.bare_texts == 1


def test_with_tools_bare_text_waits_while_it_may_be_a_name(tokenizer):
    parser = Parser(tokenizer, tools=TOOLS)
    assert parser.feed(flat(tokenizer, "Yes")) == []
    assert parser.feed(flat(tokenizer, ", I")) == [Content("Yes, I")]
    assert parser.feed(flat(tokenizer, "can")) == [Content("can")]
    parser = Parser(tokenizer, tools=TOOLS)
    assert parser.feed(flat(tokenizer, "中")) == [Content("中")]
    parser = Parser(tokenizer, tools=TOOLS)
    assert parser.feed(flat(tokenizer, "a" * 128)) == []
    assert parser.feed(flat(tokenizer, "a")) == [Content("a" * 129)]


def test_a_name_never_shows_in_the_text(tokenizer):
    for name in ("get_weather", "not_declared"):
        parser = Parser(tokenizer, tools=TOOLS)
        payload = json.dumps({"name": name, "args": {}})
        for token in flat(tokenizer, MODEL, name, CALL_JSON, payload):
            assert parser.feed((token,)) == []
        assert [event.name for event in parser.feed((END_MESSAGE,)) if isinstance(event, Call)] == [name]


def test_ignoring_the_end_goes_on_between_messages(tokenizer):
    ids = flat(
        tokenizer, MODEL, TEXT, "a", END_TURN, "b c", END_OF_TEXT, THINKING, "d", END_TURN, END_TURN, MODEL, TEXT, "e"
    )
    parser = Parser(tokenizer, ignore_eos=True)
    assert parse(parser, ids) == [("content", "ab c"), ("thought", "d"), ("content", "e")]


def test_a_character_split_over_feeds_is_whole(tokenizer):
    for kind in (TEXT, THINKING):
        for text in ("é", "中", "😀"):
            parser = Parser(tokenizer)
            parser.feed((MODEL, kind))
            pieces = [parser.feed((tokenizer.token_bytes.index(bytes((byte,))),)) for byte in text.encode()]
            assert pieces[:-1] == [[]] * (len(pieces) - 1)
            assert [event.text for event in pieces[-1] if not isinstance(event, Call)] == [text]


def test_bare_text_after_a_call_streams(tokenizer):
    parser = Parser(tokenizer, tools=TOOLS)
    parser.feed(flat(tokenizer, MODEL, "f", CALL_JSON, CALL_F, END_MESSAGE, MODEL))
    assert parser.feed(flat(tokenizer, "Done, I think")) == [Content("Done, I think")]


def test_reasoning_tokens_are_those_between_the_markers(tokenizer):
    parser = Parser(tokenizer)
    parser.feed(flat(tokenizer, MODEL, THINKING, "a b", END_MESSAGE, MODEL, TEXT, "c d", END_MESSAGE))
    parser.feed(flat(tokenizer, MODEL, THINKING, "e", TEXT, END_MESSAGE, END_TURN))
    assert parser.reasoning_tokens == 4


def test_thinking_and_text_keep_their_order_and_pieces_of_a_feed_are_joined(tokenizer):
    ids = flat(
        tokenizer, MODEL, TEXT, "a b", END_MESSAGE, MODEL, TEXT, "c", END_MESSAGE, MODEL, THINKING, "d e", END_MESSAGE
    )
    assert Parser(tokenizer).feed(ids) == [Content("a bc"), Thought("d e")]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_ids_never_raise_and_cuts_change_nothing(tokenizer, data):
    marks = st.sampled_from([MODEL, TEXT, THINKING, END_MESSAGE, CALL_JSON, END_TURN, END_OF_TEXT])
    bits = st.sampled_from(flat(tokenizer, 'f get_weather {"name":"f","args":{"x":[1]}} é中😀 a b'))
    other = st.integers(0, 255) | st.integers(ORDINARY, VOCAB + 5)
    ids = data.draw(st.lists(marks | bits | other, max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 5), max_size=20))
    options = data.draw(
        st.sampled_from([(Start.BETWEEN, TOOLS, False), (Start.HEADER, (), True), (Start.TEXT, TOOLS, True)])
    )
    assert parse(Parser(tokenizer, *options), ids, cuts) == parse(Parser(tokenizer, *options), ids)


def test_text_is_kept_to_the_byte(tokenizer):
    """All ordinary tokens of a turn that makes no call are shown, in order."""
    rng = random.Random(5)
    for _ in range(500):
        ids = [rng.choice([MODEL, TEXT, THINKING, END_MESSAGE, *([rng.randrange(ORDINARY)] * 6)]) for _ in range(30)]
        shown = "".join(event[1] for event in parse(Parser(tokenizer, tools=TOOLS), ids))
        for token in ids:
            if token < ORDINARY and (text := tokenizer.token_text(token)).isprintable() and "\ufffd" not in text:
                assert text in shown
                shown = shown[shown.index(text) + len(text) :]
