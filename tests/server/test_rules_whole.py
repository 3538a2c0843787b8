"""Rules with a real model behind a real server: answers at temperature 1.5 hold, and conversations resume whole."""

import json

import httpx
import jsonschema_rs
import pytest

from inkcap.base.vocabulary import END_MESSAGE, KINDS, ORDINARY, THINKING
from inkcap.models.registry import write_demo
from tests.server.conftest import Process

FLAGS = ("--dtype", "float32", "--threads", "1", "--max-num-seqs", "8", "--max-model-len", "1024")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "save", "parameters": PERSON}},
    {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "maxProperties": 0}}},
]
ASKED = {
    "required": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "save"}}},
    "format": {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}},
}
SAMPLES = 6


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "demo"
    write_demo(folder, family="inkling", seed=0)
    process = Process(["-m", "inkcap", "serve", str(folder), *FLAGS])
    yield process.ready()
    process.close()


def chat(server, **body):
    asked = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 1.5, "max_tokens": 90, **body}
    asked = {"thinking_token_budget": 3, "return_token_ids": True, **asked}
    response = httpx.post(server.url + "/v1/chat/completions", json=asked, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def check_frame(ids):
    """Control tokens stand between texts, never in one."""
    inside = False
    for token in ids:
        if token >= ORDINARY:
            assert not inside or token == END_MESSAGE
            inside = token in KINDS


@pytest.mark.parametrize("kind", ASKED)
def test_every_answer_that_ended_is_valid(server, kind):
    reply = chat(server, **ASKED[kind], n=SAMPLES, seed=1)
    ended = 0
    for choice in reply["choices"]:
        check_frame(choice["token_ids"])
        message = choice["message"]
        if choice["finish_reason"] == "length":
            continue
        ended += 1
        if kind == "format":
            jsonschema_rs.validate(PERSON, json.loads(message["content"]))
            continue
        (call,) = message["tool_calls"]
        assert not message["content"]
        arguments = json.loads(call["function"]["arguments"])
        jsonschema_rs.validate(PERSON if call["function"]["name"] == "save" else {"maxProperties": 0}, arguments)
        assert kind == "required" or call["function"]["name"] == "save"
    assert ended >= SAMPLES // 2, "most can end within their budget"


@pytest.mark.parametrize("kind", ASKED)
def test_a_stream_is_the_whole_answer_in_pieces(server, kind):
    asked = {**ASKED[kind], "seed": 3, "temperature": 1.5, "thinking_token_budget": 3, "logit_bias": {THINKING: 60}}
    whole = chat(server, **asked)
    (choice,) = whole["choices"]
    message = choice["message"]
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3, "the budget, which it fills"
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 90, "stream": True, **asked}
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=120) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    deltas = [one["delta"] for one in choices]
    for name in ("content", "reasoning", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (message.get(name) or ""), name
    assert message["reasoning"] == message["reasoning_content"]
    told = [call["function"].get("arguments") or "" for delta in deltas for call in delta.get("tool_calls") or ()]
    assert "".join(told) == "".join(call["function"]["arguments"] for call in message.get("tool_calls") or ())
    assert choices[-1]["finish_reason"] == choice["finish_reason"]
    assert len(told) > 2 or kind == "format", "arguments come in pieces"


def test_a_conversation_with_calls_resumes_from_its_last_whole_grain(server):
    asked = {**ASKED["named"], "seed": 5}
    history = [{"role": "user", "content": "Save me, whoever I am, and then tell me what you saved. " * 3}]
    known = 0
    for turn in range(3):
        reply = chat(server, messages=history, **asked)
        usage, (choice,) = reply["usage"], reply["choices"]
        if turn:
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached == known // 64 * 64, (cached, known)
        assert choice["finish_reason"] == "stop"
        known = usage["total_tokens"] - 1  # the last token, the end of the turn, has no state yet
        said = choice["message"]
        call = said["tool_calls"][0]
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1, sort_keys=True)
        history += [said, {"role": "tool", "tool_call_id": call["id"], "content": "saved"}]
