"""What a row under rules may say next: frames of messages, grammars inside them, budgets, and resuming."""

import numpy as np
import pytest
import torch

from inkcap.base.matching import json_grammar
from inkcap.base.request import SamplingParams
from inkcap.base.room import WORDS
from inkcap.base.step import RowSetup
from inkcap.base.turn import Start, TurnRules
from inkcap.base.vocabulary import (
    CALL_JSON,
    CALL_TEXT,
    END_MESSAGE,
    END_OF_TEXT,
    END_TURN,
    MODEL,
    ORDINARY,
    TEXT,
    THINKING,
    VOCAB,
)
from inkcap.chat.grammar import call_grammar, read_wish, text_rules
from inkcap.chat.tokens import Tokenizer
from inkcap.runner.guides import Guides
from inkcap.sampling.guide import only

SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"], "additionalProperties": False}
CALLS = {"f": call_grammar("f", SCHEMA), "get_it": call_grammar("get_it", SCHEMA)}
REQUIRED = TurnRules(strict=True, texts=False, calls=CALLS, least_calls=1)
FORMAT = TurnRules(strict=True, text=json_grammar(SCHEMA), most_calls=0)


class Row:
    """One guided row. `allowed` gives control tokens that may come next, and whether text may."""

    def __init__(self, compiler, rules, said=()):
        self.guides = Guides(compiler, torch.device("cpu"))
        setup = RowSetup(row=3, tokens=[1, *said], prompt_length=1, params=SamplingParams(), seed=0, rules=rules)
        self.guides.open([setup])

    def bits(self):
        masks = self.guides.masks([3])
        if masks is None:
            return np.ones(VOCAB, bool)
        return np.unpackbits(masks.numpy().view(np.uint8), bitorder="little")[:VOCAB].astype(bool)

    def allowed(self):
        bits = self.bits()
        return {int(t) for t in np.flatnonzero(bits[ORDINARY:]) + ORDINARY}, bool(bits[:ORDINARY].any())

    def say(self, *tokens):
        for token in tokens:
            assert self.bits()[token], f"{token} is not allowed"
            self.guides.drawn([3], torch.tensor([token]))
        return self


def spelled(compiler, text):
    """A text by single bytes: another spelling than the tokenizer's."""
    return [compiler.ids[bytes((byte,))] for byte in text.encode()]


@pytest.fixture(scope="module")
def encode(compiler):
    """The tokenizer's own spelling; where a grammar leaves no choice, only that is allowed."""
    return Tokenizer(compiler.ids).encode_text


def test_a_required_call_is_held_from_the_first_token_to_the_last(compiler, encode):
    row = Row(compiler, REQUIRED)
    assert row.allowed() == ({MODEL}, False)
    assert row.say(MODEL).allowed() == ({THINKING}, True)
    starts = {compiler.pieces[t] for t in np.flatnonzero(row.bits()[:ORDINARY])}
    assert starts == {b"f", b"g", b"ge", b"get", b"get_"} & set(compiler.ids)
    row.say(compiler.ids[b"get"], *spelled(compiler, "_i"))
    assert row.allowed() == (set(), True)
    assert row.say(compiler.ids[b"t"]).allowed() == ({CALL_JSON}, False)
    row.say(CALL_JSON, *encode('{"name":"get_it","args":{"x":"'), *spelled(compiler, "<|end_message|>"))
    assert row.allowed() == (set(), True), "not over yet"
    assert row.say(*spelled(compiler, '"'), *encode("}}")).allowed() == ({END_MESSAGE}, False)
    assert row.say(END_MESSAGE).allowed() == ({MODEL, END_TURN}, False)
    assert row.say(MODEL).allowed()[0] == set(), "no thinking and no text after a call"
    assert Row(compiler, REQUIRED).say(MODEL, compiler.ids[b"f"]).allowed() == ({CALL_JSON}, False)


def test_no_control_token_stands_inside_a_string(compiler):
    row = Row(compiler, FORMAT).say(MODEL, TEXT, *spelled(compiler, '{"x":"'))
    control, text = row.allowed()
    assert control == set()
    assert text
    assert row.bits()[:ORDINARY].sum() > 150_000, "a string is free in what it says"
    assert row.say(*spelled(compiler, 'a"}')).allowed() == ({END_MESSAGE}, False)
    assert row.say(END_MESSAGE).allowed() == ({END_TURN}, False)
    assert row.say(END_TURN).allowed() == ({END_TURN}, False), "with ignore_eos it goes on so"


def test_thinking_is_free_but_for_its_budget(compiler):
    rules = TurnRules(strict=True, text=FORMAT.text, thinking=2, start=Start.HEADER)
    row = Row(compiler, rules)
    assert row.allowed()[0] == {THINKING, TEXT}
    row.say(THINKING)
    assert row.bits()[:ORDINARY].all()
    assert row.say(5, 6).allowed() == ({END_MESSAGE}, False)
    row.say(END_MESSAGE, MODEL)
    assert row.allowed()[0] == {TEXT}, "once is enough"
    none = Row(compiler, TurnRules(strict=True, text=FORMAT.text, thinking=0)).say(MODEL)
    assert none.allowed()[0] == {TEXT}


def test_a_budget_alone_forces_an_answer_and_nothing_else(compiler):
    row = Row(compiler, TurnRules(thinking=1))
    assert row.bits().all()
    row.say(MODEL, THINKING, 9)
    assert row.allowed() == ({END_MESSAGE}, False)
    assert row.say(END_MESSAGE).allowed() == ({MODEL}, False)
    control, text = row.say(MODEL).allowed()
    assert control.isdisjoint({THINKING, END_TURN, END_MESSAGE, END_OF_TEXT})
    assert text
    assert {TEXT, CALL_JSON} <= control
    assert row.say(TEXT, 9).bits().all()


def test_a_free_turn_is_held_inside_calls_only(compiler, encode):
    rules = read_wish(tools=tools("f"), parallel=False).rules(Start.BETWEEN, {})
    row = Row(compiler, rules)
    assert row.bits().all()
    row.say(MODEL, TEXT, 7, END_MESSAGE, MODEL, compiler.ids[b"f"], CALL_JSON)
    assert not row.bits().all()
    row.say(*encode('{"name":"f","args":{"x":"1"}}'))
    assert row.say(END_MESSAGE).allowed() == ({END_TURN}, False), "parallel_tool_calls: false"


def test_a_call_of_no_declared_tool_keeps_the_form(compiler, encode):
    rules = read_wish(tools=tools("f")).rules(Start.BETWEEN, {})
    row = Row(compiler, rules).say(CALL_JSON, *encode('{"name":"other","args":{"a":[1]}}'))
    assert row.allowed() == ({END_MESSAGE}, False)


def test_tools_that_may_not_be_called_are_not(compiler):
    none = Row(compiler, read_wish(tools=tools("f"), tool_choice="none").rules(Start.BETWEEN, {}))
    assert none.allowed()[0].isdisjoint({CALL_JSON, CALL_TEXT})
    only_f = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tools("f")[0]]}}
    row = Row(compiler, read_wish(tools=tools("f", "g"), tool_choice=only_f).rules(Start.BETWEEN, {})).say(MODEL)
    assert CALL_JSON not in row.allowed()[0]
    assert CALL_JSON in row.say(compiler.ids[b"f"]).allowed()[0]


def tools(*names):
    return [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in names]


def test_a_bare_continuation_ends_where_its_grammar_does(compiler):
    row = Row(compiler, text_rules('start: "ab" | "abc"'))
    assert row.say(compiler.ids[b"ab"]).allowed() == ({END_TURN}, True)
    assert row.say(compiler.ids[b"c"]).allowed() == ({END_TURN}, False)


def test_a_resumed_row_is_where_it_was(compiler):
    said = [MODEL, THINKING, 5, END_MESSAGE, MODEL, TEXT, *spelled(compiler, '{"x":"ab')]
    whole = Row(compiler, FORMAT).say(*said)
    for cut in range(len(said) + 1):
        resumed = Row(compiler, FORMAT, said[:cut]).say(*said[cut:])
        assert (resumed.bits() == whole.bits()).all()


def test_rows_without_rules_are_left_alone(compiler):
    guides = Guides(compiler, torch.device("cpu"))
    setups = [
        RowSetup(row=row, tokens=[1], prompt_length=1, params=SamplingParams(), seed=0, rules=rules)
        for row, rules in ((0, None), (1, FORMAT))
    ]
    guides.open(setups)
    masks = guides.masks([1, 0])
    assert masks.shape == (2, WORDS)
    assert (masks[1] == -1).all()
    assert (masks[0].numpy().view(np.uint32) == only([MODEL])).all()
    guides.drawn([1, 0], torch.tensor([MODEL, 5]))
    guides.close([1])
    assert guides.masks([0]) is None


def test_a_grammar_that_fails_fails_its_row_only(compiler):
    guides = Guides(compiler, torch.device("cpu"))
    rules = (text_rules("start: %json {"), text_rules('start: "a"'))
    guides.open(
        [
            RowSetup(row=row, tokens=[1], prompt_length=1, params=SamplingParams(), seed=0, rules=one)
            for row, one in enumerate(rules)
        ]
    )
    masks = guides.masks([0, 1])
    assert list(guides.failed) == [0]
    assert "cannot be held to its rules" in guides.failed[0]
    assert (masks[0] == -1).all()
    assert int(np.unpackbits(masks[1].numpy().view(np.uint8)).sum()) == 1
    assert Guides(None, torch.device("cpu")).masks([0]) is None
