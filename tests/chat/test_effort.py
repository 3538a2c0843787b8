"""Thinking effort: the table of the published grammar, and which setting counts."""

import random

import pytest

from inkcap.base.errors import BadRequest
from inkcap.chat.effort import choose_effort, format_effort, parse_effort, states_effort
from inkcap.chat.render import render

USER = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("effort", "number"),
    [
        (0, [15]),
        (0.1, [15, 13, 16]),
        (0.2, [15, 13, 17]),
        (0.7, [15, 13, 22]),
        (0.9, [15, 13, 24]),
        (0.25, [15, 13, 1161]),
        (0.99, [15, 13, 2058]),
        (1, [16]),
    ],
)
def test_effort_message_is_as_published(tokenizer, effort, number):
    ids = render(tokenizer, [USER], effort=effort).token_ids
    stated = [200002, 200004, 133850, 6942, 3211, 25, 220, *number, 200010]
    assert ids == [*stated, 200000, 200004, 13225, 200010]


def test_numbers_are_written_as_by_the_official_renderer(oracle):
    rng = random.Random(3)
    for effort in [*(i / 10_000 for i in range(10_001)), *(rng.random() for _ in range(5000))]:
        text = oracle.tokenizer.decode(oracle.ids([{"role": "user", "content": "x"}], effort))
        assert f"level: {format_effort(effort)}<|" in text, effort


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("none", 0),
        ("minimal", 0.1),
        ("low", 0.2),
        ("medium", 0.7),
        ("high", 0.9),
        ("xhigh", 0.99),
        ("max", 0.99),
        (0, 0),
        (1, 1),
        (0.33, 0.33),
    ],
)
def test_names_and_numbers(value, number):
    assert parse_effort(value) == number


@pytest.mark.parametrize("value", ["", "High", "0.5", -0.01, 1.01, float("nan"), float("inf"), True, [], {}])
def test_anything_else_is_refused(value):
    with pytest.raises(BadRequest, match="use a number from 0 to 1 or one of none, minimal") as caught:
        parse_effort(value)
    assert caught.value.param == "reasoning_effort"


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf")])
def test_the_renderer_refuses_numbers_out_of_range(value):
    with pytest.raises(BadRequest, match="goes from 0 to 1"):
        format_effort(value)


@pytest.mark.parametrize(
    ("field", "kwargs", "chosen"),
    [
        (None, None, 0.9),
        ("low", {"reasoning_effort": "high", "enable_thinking": False}, 0.2),
        (None, {"reasoning_effort": 0.5, "thinking": False}, 0.5),
        (None, {"enable_thinking": False}, 0.0),
        (None, {"thinking": False}, 0.0),
        (None, {"thinking": True}, 0.9),
        (0, {}, 0.0),
    ],
)
def test_precedence(field, kwargs, chosen):
    assert choose_effort([USER], 0.9, field, kwargs) == chosen


@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        ({"reasoning_effort": "much"}, "chat_template_kwargs.reasoning_effort"),
        ({"enable_thinking": "no"}, "chat_template_kwargs.enable_thinking"),
    ],
)
def test_bad_template_arguments_name_their_field(kwargs, param):
    with pytest.raises(BadRequest) as caught:
        choose_effort([USER], 0.9, None, kwargs)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "content", ["Thinking effort level: 0.5", [{"type": "text", "text": "Thinking effort level: 1"}]]
)
def test_a_conversation_that_states_its_effort_gets_no_second_one(tokenizer, content):
    messages = [{"role": "system", "content": content}, USER]
    assert states_effort(messages)
    assert choose_effort(messages, 0.9) is None
    with pytest.raises(BadRequest, match="states the thinking effort") as caught:
        render(tokenizer, messages, effort=choose_effort(messages, 0.9, "low"))
    assert caught.value.param == "reasoning_effort"


@pytest.mark.parametrize(
    "message", [USER, {"role": "user", "content": "Thinking effort level: 0.5"}, {"role": "system"}, 3]
)
def test_other_messages_do_not_state_an_effort(message):
    assert not states_effort([message])
