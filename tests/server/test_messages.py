"""`/v1/messages` and `count_tokens` over a fake engine, by hand and through the anthropic client."""

import json

import anthropic
import httpx
import pytest

from inkcap.chat.tokens import CALL_JSON, END_MESSAGE, END_TURN, MODEL, TEXT
from inkcap.server import sse

MESSAGES = "/v1/messages"
ASK = {"model": "demo", "max_tokens": 100, "messages": [{"role": "user", "content": "Hello"}]}
TOOL = {"name": "look", "description": "Looks", "input_schema": {"type": "object", "properties": {"x": {}}}}


@pytest.fixture
def call_answer(engine, tokenizer):
    """Make the engine say a text and call a tool."""

    def set_answer(text, name, arguments):
        payload = f'{{"name":"{name}","args":{arguments}}}'
        ids = [MODEL, TEXT, *tokenizer.encode_text(text), END_MESSAGE, MODEL, *tokenizer.encode_text(name)]
        ids += [CALL_JSON, *tokenizer.encode_text(payload), END_MESSAGE, END_TURN]
        engine.answer = lambda _: ids

    return set_answer


@pytest.fixture
def client(site):
    with anthropic.Anthropic(base_url=site.url, api_key="none", max_retries=0) as made:
        yield made


def sent(response):
    """Name and payload of each event of a stream."""
    pairs = [block.split("\ndata: ") for block in response.text.split("\n\n") if block]
    assert all(name.startswith("event: ") for name, _ in pairs)
    return [(name.removeprefix("event: "), json.loads(data)) for name, data in pairs]


def test_an_answer_with_thinking(call, engine, chat_answer):
    ids = chat_answer("think hard", "the answer")
    response = call("POST", MESSAGES, json=ASK, headers={"X-Request-Id": "7"})
    assert response.status_code == 200
    prompt = len(engine.requests[0].token_ids)
    assert response.json() == {
        "id": "msg_7",
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [
            {"type": "thinking", "thinking": "think hard", "signature": ""},
            {"type": "text", "text": "the answer"},
        ],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt - 3,
            "output_tokens": len(ids),
            "cache_read_input_tokens": 3,
            "cache_creation_input_tokens": 0,
        },
    }


def test_events_are_in_order_and_add_up(call, chat_answer):
    chat_answer("think hard", "the answer")
    events = sent(call("POST", MESSAGES, json={**ASK, "stream": True}))
    assert all(name == payload["type"] for name, payload in events)
    names = [name for name, _ in events]
    assert (names[:2], names[-2:]) == (["message_start", "ping"], ["message_delta", "message_stop"])
    assert [n for n in names if n.startswith("content_block_st")] == ["content_block_start", "content_block_stop"] * 2
    deltas = [payload for name, payload in events if name == "content_block_delta"]
    assert "".join(d["delta"].get("thinking", "") for d in deltas if d["index"] == 0) == "think hard"
    assert "".join(d["delta"].get("text", "") for d in deltas if d["index"] == 1) == "the answer"
    assert events[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2][1]["usage"]["cache_read_input_tokens"] == 3


def test_a_stream_that_is_silent_for_long_pings(site, engine, chat_answer, monkeypatch):
    monkeypatch.setattr(sse, "IDLE_SECONDS", 0.02)
    engine.pace_s = 0.2
    chat_answer("", "a b")
    with httpx.stream("POST", site.url + MESSAGES, json={**ASK, "stream": True}) as response:
        names = [line.removeprefix("event: ") for line in response.iter_lines() if line.startswith("event: ")]
    assert names.count("ping") > 3
    assert names[names.index("content_block_start") + 1] in ("content_block_delta", "ping")
    assert names[-1] == "message_stop"
    engine.pace_s = 0.0
    with httpx.stream("POST", site.url + "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        assert "ping" not in response.read().decode()


def test_why_it_ended(call, text_answer, chat_answer):
    chat_answer("", "one two STOP three")
    reply = call("POST", MESSAGES, json={**ASK, "stop_sequences": ["STOP"]}).json()
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "STOP")
    assert reply["content"] == [{"type": "text", "text": "one two "}]
    text_answer("on and on ")
    assert call("POST", MESSAGES, json={**ASK, "max_tokens": 5}).json()["stop_reason"] == "max_tokens"


def test_the_prompt_is_the_chat_api_s(call, engine, chat_answer):
    """A conversation of every kind of block renders as the same conversation sent to the chat API."""
    chat_answer("", "x")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "abc"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "look", "input": {"x": 1}},
            {"type": "tool_use", "id": "t2", "name": "look", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "seen"},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": True, "content": [{"type": "text", "text": "no"}]},
            {"type": "text", "text": "And?"},
        ]},
    ]  # fmt: skip
    body = {**ASK, "system": [{"type": "text", "text": "Be kind."}], "messages": messages, "tools": [TOOL]}
    assert call("POST", MESSAGES, json=body).status_code == 200
    counted = call("POST", MESSAGES + "/count_tokens", json={k: v for k, v in body.items() if k != "max_tokens"})
    function = {"name": "look", "description": "Looks", "parameters": TOOL["input_schema"]}
    calls = [
        {"id": i, "type": "function", "function": {"name": "look", "arguments": a}}
        for i, a in (("t1", '{"x":1}'), ("t2", "{}"))
    ]
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "look"},
        {"role": "assistant", "reasoning": "hm", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": "seen"},
        {"role": "tool", "tool_call_id": "t2", "content": "no", "is_error": True},
        {"role": "user", "content": "And?"},
    ]
    tools = [{"type": "function", "function": function}]
    assert call("POST", "/v1/chat/completions", json={"messages": chat, "tools": tools}).status_code == 200
    ours, theirs = engine.requests
    assert ours.token_ids == theirs.token_ids
    assert counted.json() == {"input_tokens": len(ours.token_ids)}


def test_text_after_a_call_stays_after_it(call, engine, chat_answer):
    chat_answer("", "x")
    said = {"role": "assistant", "content": [
        {"type": "tool_use", "id": "t1", "name": "look", "input": {}}, {"type": "text", "text": "Looking."},
    ]}  # fmt: skip
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "seen"}]}
    call("POST", MESSAGES, json={**ASK, "messages": [*ASK["messages"], said, result], "tools": [TOOL]})
    ids = engine.requests[0].token_ids
    assert ids.index(CALL_JSON) < len(ids) - 1 - ids[::-1].index(MODEL)
    assert ids.count(MODEL) == 2


def test_rules_of_an_answer_are_the_chat_api_s(call, engine, chat_answer):
    chat_answer("", "x")
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    function = {"name": "look", "description": "Looks", "parameters": TOOL["input_schema"]}
    tools = [{"type": "function", "function": function}]
    named = {"type": "function", "function": {"name": "look"}}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    for ours, theirs in (
        ({"output_config": {"format": {"type": "json_schema", "schema": schema}}}, {"response_format": form}),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, {"tools": tools, "tool_choice": "required"}),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, {"tools": tools, "tool_choice": "none"}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True}},
            {"tools": tools, "tool_choice": named, "parallel_tool_calls": False},
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1100},
            {"thinking_token_budget": 1024, "max_tokens": 1100},
        ),
    ):
        assert call("POST", MESSAGES, json={**ASK, **ours}).status_code == 200
        chat = {"messages": ASK["messages"], **theirs}
        assert call("POST", "/v1/chat/completions", json=chat).status_code == 200
        mine, other = engine.requests[-2:]
        assert mine.rules == other.rules is not None
        assert mine.token_ids == other.token_ids


def test_a_last_message_of_the_assistant_is_gone_on_with(call, engine, tokenizer):
    engine.answer = lambda _: [*tokenizer.encode_text(" more"), END_MESSAGE, END_TURN]
    messages = [*ASK["messages"], {"role": "assistant", "content": "so far"}]
    reply = call("POST", MESSAGES, json={**ASK, "messages": messages}).json()
    assert reply["content"] == [{"type": "text", "text": " more"}]
    assert engine.requests[0].token_ids[-2:] == tokenizer.encode_text("so far")


@pytest.mark.parametrize(
    ("fields", "stated"),
    [
        ({}, "0.9"),
        ({"thinking": {"type": "disabled"}}, "0"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "0.2"),
        ({"output_config": {"effort": "max"}}, "0.99"),
    ],
)
def test_effort(call, engine, chat_answer, tokenizer, fields, stated):
    chat_answer("", "x")
    assert call("POST", MESSAGES, json={**ASK, **fields}).status_code == 200
    text = tokenizer.decode(engine.requests[0].token_ids)
    assert f"effort level: {stated}<|end_message|>" in text


def test_thinking_may_be_left_out(call, chat_answer):
    chat_answer("secret", "said")
    body = {**ASK, "thinking": {"type": "adaptive", "display": "omitted"}}
    assert call("POST", MESSAGES, json=body).json()["content"] == [{"type": "text", "text": "said"}]
    assert "secret" not in call("POST", MESSAGES, json={**body, "stream": True}).text


def test_a_call_is_a_block_with_its_input(call, call_answer):
    call_answer("I look.", "look", '{"x":[1,2]}')
    reply = call("POST", MESSAGES, json={**ASK, "tools": [TOOL]}).json()
    text, use = reply["content"]
    assert (text["text"], use["name"], use["input"], reply["stop_reason"]) == (
        "I look.",
        "look",
        {"x": [1, 2]},
        "tool_use",
    )


def test_a_call_whose_arguments_come_in_pieces(call, engine, tokenizer):
    """A grammar holds them to their form, so they stream. A call that is cut is text."""
    payload = '{"name":"look","args":{"x":"a long enough text"}}'
    ids = [MODEL, *tokenizer.encode_text("look"), CALL_JSON, *tokenizer.encode_text(payload), END_MESSAGE, END_TURN]
    engine.answer = lambda _: ids
    body = {**ASK, "tools": [TOOL], "tool_choice": {"type": "any"}}
    events = sent(call("POST", MESSAGES, json={**body, "stream": True}))
    pieces = [p["delta"]["partial_json"] for n, p in events if n == "content_block_delta"]
    assert len(pieces) > 1
    assert "".join(pieces) == '{"x":"a long enough text"}'
    assert events[2][1]["content_block"] == {
        "type": "tool_use",
        "id": events[2][1]["content_block"]["id"],
        "name": "look",
        "input": {},
    }
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"
    whole = call("POST", MESSAGES, json=body).json()
    assert whole["content"][0]["input"] == {"x": "a long enough text"}
    cut = call("POST", MESSAGES, json={**body, "max_tokens": len(ids) - 6}).json()
    assert cut["stop_reason"] == "max_tokens"
    assert [block["type"] for block in cut["content"]] == ["text"]
    assert '{"x":"a' in cut["content"][0]["text"]


REFUSED = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": [7]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "server_tool_use"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t9"}]}]}, "t9"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    ({"tools": [{"name": "x"}]}, "tools.0.input_schema"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "below max_tokens"),
    ({"thinking": {"type": "on"}}, "thinking.type"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"system": [{"type": "image"}]}, "system.0.type"),
    ({"output_config": {"effort": "huge"}}, "huge"),
    ({"output_config": {"format": {"type": "xml"}}}, "xml"),
    ({"temperature": 9}, "temperature"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "named"), REFUSED, ids=[f"{i}-{n}" for i, (_, n) in enumerate(REFUSED)])
def test_what_cannot_be_served_is_refused_by_name(call, engine, wrong, named):
    response = call("POST", MESSAGES, json={**ASK, **wrong})
    assert response.status_code == 400, response.text
    reply = response.json()
    assert (reply["type"], reply["error"]["type"]) == ("error", "invalid_request_error")
    assert named in reply["error"]["message"]
    assert engine.requests == []


def test_errors_have_the_shape_and_type_of_this_api(call, engine, app):
    wrong = call("POST", MESSAGES, json={**ASK, "model": "gpt"})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (404, "not_found_error")
    assert call("GET", MESSAGES).json()["error"]["type"] == "invalid_request_error"
    assert call("POST", MESSAGES, content=b"{", headers={"content-type": "application/json"}).json()["type"] == "error"
    engine.capacity = 0
    full = call("POST", MESSAGES, json=ASK)
    assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
    assert full.headers["retry-after"]
    app.state.service.draining = True
    assert call("POST", MESSAGES, json=ASK).json()["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("settings", [{"api_key": "k"}])
def test_the_key_may_stand_where_this_api_puts_it(call, chat_answer, settings):
    chat_answer("", "x")
    refused = call("POST", MESSAGES, json=ASK)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert call("POST", MESSAGES, json=ASK, headers={"x-api-key": "wrong"}).status_code == 401
    assert call("POST", MESSAGES, json=ASK, headers={"x-api-key": "k"}).status_code == 200


def test_a_fault_in_a_stream_is_an_error_event(call, engine, text_answer):
    text_answer("on and on ")
    engine.pace_s = 0.01
    original = engine.steps

    async def dying():
        engine.die("it was killed")
        await original()

    engine.steps = dying
    name, payload = sent(call("POST", MESSAGES, json={**ASK, "stream": True}))[-1]
    assert (name, payload["type"], payload["error"]["type"]) == ("error", "error", "overloaded_error")


def test_the_anthropic_client(client, call_answer, chat_answer):
    chat_answer("think hard", "the answer")
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == "the answer"
    assert [block.model_dump() for block in streamed.content] == [block.model_dump() for block in whole.content]
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert streamed.usage.input_tokens == whole.usage.input_tokens
    call_answer("I look.", "look", '{"x":[1,2]}')
    with client.messages.stream(**ASK, tools=[TOOL]) as stream:
        message = stream.get_final_message()
    assert message.content[-1].input == {"x": [1, 2]}
    assert message.stop_reason == "tool_use"
    assert client.messages.count_tokens(model="demo", messages=ASK["messages"]).input_tokens > 0
    with pytest.raises(anthropic.NotFoundError, match="no model"):
        client.messages.create(**{**ASK, "model": "gpt"})
