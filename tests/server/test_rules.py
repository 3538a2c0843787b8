"""Tool choice, formats and budgets over HTTP: what reaches the engine, how calls are told, what is refused."""

import json
import time

import httpx
import pytest

from inkcap.base.turn import Start
from inkcap.chat.tokens import CALL_JSON, END_MESSAGE, END_TURN, MODEL, TEXT
from tests.server.conftest import Follower

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 64}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name, **more):
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


TOOLS = [tool("get_weather"), tool("f")]


@pytest.fixture
def rules(call, engine):
    """The rules that a body reaches the engine with."""

    def sent(**body):
        response = call("POST", CHAT, json={**ASK, "max_tokens": 1, **body})
        assert response.status_code == 200, response.text
        return engine.requests[-1].rules

    return sent


def refusal(call, path=CHAT, **body):
    response = call("POST", path, json={**ASK, **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_what_a_choice_of_tools_becomes(rules):
    assert rules() is None
    auto = rules(tools=TOOLS)
    assert (auto.strict, list(auto.calls), auto.closed, auto.most_calls) == (False, ["get_weather", "f"], False, None)
    none = rules(tools=TOOLS, tool_choice="none")
    assert (none.strict, none.calls, none.most_calls) == (False, {}, 0)
    required = rules(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert (required.strict, required.texts, required.least_calls, required.most_calls) == (True, False, 1, 1)
    named = rules(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "f"}})
    assert (list(named.calls), named.least_calls, named.most_calls, named.start) == (["f"], 1, 1, Start.BETWEEN)
    for nested in (True, False):
        few = {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}
        choice = {"type": "allowed_tools", **({"allowed_tools": few} if nested else few)}
        assert list(rules(tools=TOOLS, tool_choice=choice).calls) == ["f"]


def test_what_a_format_becomes(rules):
    made = rules(response_format={"type": "json_object"})
    assert (made.strict, made.texts, made.most_calls) == (True, True, 0)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    both = rules(response_format=schema, tools=TOOLS, thinking_token_budget=7)
    assert (both.strict, both.texts, list(both.calls), both.thinking) == (True, True, ["get_weather", "f"], 7)
    assert '"city"' in both.text
    for field, value in (("json", SCHEMA), ("regex", "a+"), ("choice", ["a", "b"]), ("grammar", 'start: "a"')):
        assert rules(structured_outputs={field: value}) == rules(**{f"guided_{field}": value})
    assert rules(response_format={"type": "text"}) is None
    tag = {"begin": "<f>", "schema": SCHEMA, "end": "</f>"}
    assert rules(response_format={"type": "structural_tag", "structures": [tag], "triggers": ["<f"]}).strict
    nested = {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "const_string", "value": "END"}]}
    assert rules(response_format={"type": "structural_tag", "format": nested}).strict
    spaced = rules(structured_outputs={"json": SCHEMA, "whitespace_pattern": "[ ]?"})
    assert '"whitespace_pattern": "[ ]?"' in spaced.text
    assert '"whitespace_flexible": false' in rules(structured_outputs={"json": {}, "disable_any_whitespace": True}).text
    open_at = {
        "type": "object",
        "properties": {"a": SCHEMA},
        "additionalProperties": {"type": "array", "items": SCHEMA},
    }
    text = rules(structured_outputs={"json": open_at, "disable_additional_properties": True}).text
    assert text.count('"additionalProperties": false') == 2
    assert text.count('"additionalProperties": {"type": "array"') == 1


def test_completions_have_formats_too(call, engine):
    body = {"prompt": "x", "max_tokens": 1, "guided_choice": ["a", "b"]}
    assert call("POST", "/v1/completions", json=body).status_code == 200
    assert engine.requests[-1].rules.start is Start.RAW
    assert refusal(call, "/v1/completions", prompt="x", guided_regex="(")["param"] == "guided_regex"


REFUSED = [
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": 3}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": "("}}, "structured_outputs.json"),
    (
        {"structured_outputs": {"regex": "a", "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
    ),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": {"type": "nonsense"}}, "guided_json"),
    ({"guided_regex": "(?=a)b"}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "start: <|end_message|>"}, "guided_grammar"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    ({"guided_grammar": "root ::= ("}, "guided_grammar"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "any_tokens"}}}, "response_format.format.type"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "("}}}, "response_format"),
    ({"guided_json": SCHEMA, "allowed_token_ids": [5]}, "allowed_token_ids"),
    ({"tools": TOOLS, "functions": [{"name": "f"}]}, "functions"),
    ({"tools": [tool("f", parameters={"type": "nonsense"}, strict=True)]}, "tools[0].function.parameters"),
    ({"tools": [tool("f", parameters={"$ref": "#/no"})], "tool_choice": "required"}, "tools[0].function.parameters"),
]


@pytest.mark.parametrize(("wrong", "param"), REFUSED, ids=[f"{i}-{p}" for i, (_, p) in enumerate(REFUSED)])
def test_what_cannot_be_enforced_is_refused_by_name(call, engine, wrong, param):
    error = refusal(call, **wrong)
    assert error["param"] == param
    assert len(error["message"]) < 1000
    assert not engine.requests


def test_a_tool_that_need_not_be_called_may_have_any_schema(rules):
    odd = tool("f", parameters={"type": "nonsense"})
    assert '"type": "object"' in rules(tools=[odd]).calls["f"]


def answer(tokenizer, *calls):
    ids = []
    for name, arguments in calls:
        payload = f'{{"name":"{name}","args":{arguments}}}'
        ids += [MODEL, *tokenizer.encode_text(name), CALL_JSON, *tokenizer.encode_text(payload), END_MESSAGE]
    return [*ids, END_TURN]


def streamed(call, **body):
    text = call("POST", CHAT, json={**ASK, **body, "stream": True}).text
    return [json.loads(line[6:])["choices"][0] for line in text.split("\n") if line.startswith("data: {")]


def test_arguments_come_in_pieces_that_make_the_whole(call, engine, tokenizer):
    engine.pace_s = 0.001
    wanted = [("f", '{"a":"}\\"{ é€","b":[{}]}'), ("get_weather", "{}")]
    engine.answer = lambda _: answer(tokenizer, *wanted)
    choices = streamed(call, tools=TOOLS, tool_choice="required")
    told = [one for choice in choices for one in choice["delta"].get("tool_calls", ())]
    for index, (name, arguments) in enumerate(wanted):
        first, *more = [one for one in told if one["index"] == index]
        assert first["function"] == {"name": name, "arguments": ""}
        assert "".join(one["function"]["arguments"] for one in more) == arguments
    assert sum(one["index"] == 0 for one in told) > 5
    assert not any(choice["delta"].get("content") for choice in choices)
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_a_call_that_is_cut_off_keeps_what_was_told(call, engine, tokenizer):
    engine.pace_s = 0.001
    engine.answer = lambda _: answer(tokenizer, ("f", '{"city":"San Francisco"}'))
    choices = streamed(call, tools=TOOLS, tool_choice="required", max_tokens=9)
    told = [one["function"]["arguments"] for c in choices for one in c["delta"].get("tool_calls", ())]
    assert '{"city":"San Francisco"}'.startswith("".join(told))
    assert choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("length", [7, 12])
@pytest.mark.parametrize("body", [{}, {"tool_choice": "required"}], ids=["auto", "required"])
def test_a_call_cut_off_loses_nothing(call, engine, tokenizer, body, length):
    """Pieces that were sent cannot be taken back; without a stream what was sampled is told as text."""
    payload = '{"name":"f","args":{"city":"San Francisco"}}'
    engine.answer = lambda _: answer(tokenizer, ("f", '{"city":"San Francisco"}'))
    asked = {"tools": TOOLS, "max_tokens": length, **body}
    (choice,) = call("POST", CHAT, json={**ASK, **asked}).json()["choices"]
    assert payload.startswith(choice["message"]["content"])
    assert len(choice["message"]["content"]) > length
    assert not choice["message"].get("tool_calls")
    choices = streamed(call, **asked)
    pieces = [one["function"]["arguments"] for c in choices for one in c["delta"].get("tool_calls", ())]
    said = "".join(c["delta"].get("content") or "" for c in choices)
    assert choice["message"]["content"] == said or payload.partition('"args":')[2].startswith("".join(pieces))
    assert choice["finish_reason"] == choices[-1]["finish_reason"] == "length"


# As of a model that no grammar holds.
MALFORMED = {
    "no JSON": "{city: SF}",
    "no name": '{"args":{"city":"SF"}}',
    "no args": '{"name":"f","city":"SF"}',
    "no object": '{"name": "f", "args": [1]}',
    "trailing": '{"name": "f", "args": {}} and more',
}


@pytest.mark.parametrize("payload", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_call_is_told_as_text(call, engine, tokenizer, payload):
    head = [MODEL, TEXT, *tokenizer.encode_text("I call. "), END_MESSAGE, MODEL, *tokenizer.encode_text("f"), CALL_JSON]
    engine.answer = lambda _: [*head, *tokenizer.encode_text(payload), END_MESSAGE, END_TURN]
    (choice,) = call("POST", CHAT, json={**ASK, "tools": TOOLS}).json()["choices"]
    assert choice["message"]["content"] == "I call. " + payload
    assert not choice["message"].get("tool_calls")
    assert choice["finish_reason"] == "stop"
    choices = streamed(call, tools=TOOLS)
    assert "".join(c["delta"].get("content") or "" for c in choices) == "I call. " + payload
    assert not any(c["delta"].get("tool_calls") for c in choices)
    assert choices[-1]["finish_reason"] == "stop"


SALVAGED = {
    "entities": "{&quot;name&quot;:&quot;f&quot;,&quot;args&quot;:{&quot;city&quot;:&quot;SF&quot;}}",
    "arguments": '{"name":"f","arguments":{"city":"SF"}}',
    "more keys": '{"id":7,"name":"f","args":{"city":"SF"}}',
    "a string": '{"name":"f","args":"{\\"city\\":\\"SF\\"}"}',
}


@pytest.mark.parametrize("payload", SALVAGED.values(), ids=SALVAGED)
def test_a_call_that_can_be_salvaged_is_one(call, engine, tokenizer, payload):
    head = [MODEL, *tokenizer.encode_text("f"), CALL_JSON]
    engine.answer = lambda _: [*head, *tokenizer.encode_text(payload), END_MESSAGE, END_TURN]
    (choice,) = call("POST", CHAT, json={**ASK, "tools": TOOLS}).json()["choices"]
    (made,) = choice["message"]["tool_calls"]
    assert made["function"]["name"] == "f"
    assert json.loads(made["function"]["arguments"]) == {"city": "SF"}
    assert choice["finish_reason"] == "tool_calls"
    assert not choice["message"]["content"]


def test_one_call_of_a_free_turn_when_they_may_not_be_parallel(rules):
    one = rules(tools=TOOLS, parallel_tool_calls=False)
    assert (one.strict, one.most_calls) == (False, 1)
    assert rules(tools=TOOLS, parallel_tool_calls=True).most_calls is None


def test_tools_that_may_not_be_called_stay_declared(call, engine, tokenizer):
    call("POST", CHAT, json={**ASK, "max_tokens": 1, "tools": TOOLS})
    call("POST", CHAT, json={**ASK, "max_tokens": 1, "tools": TOOLS, "tool_choice": "none"})
    call("POST", CHAT, json={**ASK, "max_tokens": 1, "tools": []})
    auto, none, without = (request.token_ids for request in engine.requests)
    assert auto == none, "the prefix cache finds them"
    assert len(without) < len(auto)
    assert engine.requests[2].rules is None, "an empty list is no list"


def test_a_named_call_stops_and_functions_get_function_calls(call, engine, tokenizer):
    engine.answer = lambda _: answer(tokenizer, ("f", '{"city":"SF"}'))
    named = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}
    (choice,) = call("POST", CHAT, json={**ASK, **named}).json()["choices"]
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("stop", 1)
    old = {"functions": [TOOLS[1]["function"]], "function_call": {"name": "f"}}
    (choice,) = call("POST", CHAT, json={**ASK, **old}).json()["choices"]
    assert choice["message"]["function_call"] == {"name": "f", "arguments": '{"city":"SF"}'}
    old["function_call"] = "auto"
    choices = streamed(call, **old)
    pieces = [c["delta"]["function_call"] for c in choices if "function_call" in c["delta"]]
    assert pieces[0]["name"] == "f"
    assert "".join(piece["arguments"] for piece in pieces) == '{"city":"SF"}'
    assert choices[-1]["finish_reason"] == "function_call"


def test_a_conversation_comes_back_by_token(call, engine, tokenizer):
    words = [tokenizer.token_bytes.index(bytes((byte,))) for byte in b"Hello"]
    ids = [MODEL, TEXT, *words, END_MESSAGE, *answer(tokenizer, ("f", '{"n":1.50,"a":"x"}'))]
    engine.answer = lambda _: ids
    (choice,) = call("POST", CHAT, json={**ASK, "tools": TOOLS}).json()["choices"]
    said = choice["message"]
    said["tool_calls"][0]["function"]["arguments"] = '{ "a": "x",\n "n": 1.5 }'
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "ok"}
    call("POST", CHAT, json={**ASK, "tools": TOOLS, "messages": [*ASK["messages"], said, result]})
    first, second = (request.token_ids for request in engine.requests)
    assert second[: len(first) + len(ids)] == first + ids


HOSTILE = {
    "optional properties": {"guided_json": {"type": "object", "properties": {f"p{i}": {} for i in range(5000)}}},
    "a large schema": {"guided_json": {"description": "x" * 10_000_000}},
    "a deep schema": {"guided_json": json.loads('{"not":' * 400 + "{}" + "}" * 400)},
    "a deep grammar": {"guided_grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000},
    "a deep regex": {"guided_regex": "(" * 50_000 + "a" + ")" * 50_000},
    "many tools": {"tools": [tool(f"t{i}") for i in range(10_000)], "tool_choice": "required"},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_requests_are_refused_while_others_stream(site, what):
    site.engine.pace_s = 0.002
    httpx.post(site.url + CHAT, json={**ASK, "guided_regex": "a", "max_tokens": 1})  # starts the checking process
    beside = Follower(site.url, {**ASK, "max_tokens": 4000, "stream": True})
    began = time.monotonic()
    response = httpx.post(site.url + CHAT, json={**ASK, **HOSTILE[what]}, timeout=30)
    assert response.status_code == 400, response.text
    assert len(response.json()["error"]["message"]) < 1000
    assert time.monotonic() - began < 20, "a deadline, far beyond what a busy machine needs"
    assert beside.is_alive(), "the stream beside it goes on"
    after = httpx.post(site.url + CHAT, json={**ASK, "guided_regex": "b+", "max_tokens": 1})
    assert after.status_code == 200, "the next grammar is checked by a new process"
    site.engine.pace_s = 0.0
    assert "[DONE]" in beside.whole()
