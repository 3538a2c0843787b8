"""`/v1/responses` over a fake engine, by hand and through the openai client."""

import itertools
import json

import msgspec
import openai
import pytest

from inkcap.chat.tokens import CALL_JSON, END_MESSAGE, END_TURN, MODEL, TEXT
from tests.server.conftest import until

RESPONSES = "/v1/responses"
ASK = {"model": "demo", "input": "Hello"}
TOOL = {"type": "function", "name": "look", "description": "Looks", "parameters": {"type": "object", "properties": {}}}


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
    with openai.OpenAI(base_url=site.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def sent(response):
    """Payloads of the events of a stream, whose numbers and names are checked."""
    pairs = [block.split("\ndata: ") for block in response.text.split("\n\n") if block]
    events = [json.loads(data) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_an_answer_with_thinking_and_usage(call, engine, chat_answer):
    ids = chat_answer("think hard", "the answer")
    body = {**ASK, "metadata": {"a": "b"}, "instructions": "Be kind.", "temperature": 0.5}
    reply = call("POST", RESPONSES, json=body, headers={"X-Request-Id": "7"}).json()
    assert (reply["id"], reply["object"], reply["status"], reply["error"]) == ("resp_7", "response", "completed", None)
    thought, said = reply["output"]
    assert (thought["type"], thought["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "think hard"}])
    assert (said["type"], said["role"], said["status"]) == ("message", "assistant", "completed")
    assert said["content"] == [{"type": "output_text", "text": "the answer", "annotations": [], "logprobs": []}]
    prompt = len(engine.requests[0].token_ids)
    assert reply["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": len(ids),
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": prompt + len(ids),
    }
    assert (reply["metadata"], reply["instructions"], reply["temperature"]) == ({"a": "b"}, "Be kind.", 0.5)


def test_events_add_up_to_the_reply(call, call_answer, chat_answer):
    chat_answer("think hard", "the answer")
    events = sent(call("POST", RESPONSES, json={**ASK, "stream": True}))
    names = [event["type"].removeprefix("response.") for event in events]
    assert (names[:2], names[-1]) == (["created", "in_progress"], "completed")
    assert events[0]["response"]["status"] == "in_progress"
    last = events[-1]["response"]
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == last["output"]
    for index, kind, text in ((0, "reasoning_text", "think hard"), (1, "output_text", "the answer")):
        mine = [e for e in events if e.get("output_index") == index]
        pieces = [e["delta"] for e in mine if e["type"] == f"response.{kind}.delta"]
        assert len(pieces) > 1
        assert "".join(pieces) == text
        order = [e["type"].removeprefix("response.") for e in mine if not e["type"].endswith(".delta")]
        assert order == [
            "output_item.added",
            "content_part.added",
            f"{kind}.done",
            "content_part.done",
            "output_item.done",
        ]
    call_answer("I look.", "look", '{"x":1}')
    events = sent(call("POST", RESPONSES, json={**ASK, "stream": True, "tools": [TOOL]}))
    done = next(e for e in events if e["type"] == "response.function_call_arguments.done")
    assert done["arguments"] == '{"x":1}'
    item = events[-1]["response"]["output"][1]
    assert (item["type"], item["name"], item["arguments"], item["status"]) == (
        "function_call",
        "look",
        '{"x":1}',
        "completed",
    )


def test_an_answer_cut_by_length_is_incomplete(call, text_answer):
    text_answer("on and on ")
    reply = call("POST", RESPONSES, json={**ASK, "max_output_tokens": 5}).json()
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert reply["output"][0]["status"] == "incomplete"
    events = sent(call("POST", RESPONSES, json={**ASK, "max_output_tokens": 5, "stream": True}))
    assert events[-1]["type"] == "response.incomplete"


def test_the_prompt_is_the_chat_api_s(call, engine, chat_answer):
    """A conversation of every kind of item renders as the same conversation sent to the chat API."""
    chat_answer("", "x")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"x":1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "seen"},
        {"type": "message", "role": "user", "content": "And?"},
    ]
    body = {"input": items, "instructions": "Be kind.", "tools": [TOOL], "reasoning": {"effort": "low"}}
    assert call("POST", RESPONSES, json=body).status_code == 200
    function = {"name": "look", "arguments": '{"x":1}'}
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "look"},
        {"role": "assistant", "reasoning": "hm", "content": "I look.",
         "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}]
    asked = {"messages": chat, "tools": tools, "reasoning_effort": "low"}
    assert call("POST", "/v1/chat/completions", json=asked).status_code == 200
    ours, theirs = engine.requests
    assert ours.token_ids == theirs.token_ids


def test_a_response_can_be_followed_fetched_and_forgotten(call, engine, call_answer, chat_answer):
    call_answer("I look.", "look", '{"x":1}')
    first = call("POST", RESPONSES, json={**ASK, "tools": [TOOL], "instructions": "Only now."}).json()
    assert call("GET", f"{RESPONSES}/{first['id']}").json() == first
    chat_answer("", "done")
    output = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "seen"}
    followed = {"input": [output], "previous_response_id": first["id"], "tools": [TOOL]}
    second = call("POST", RESPONSES, json=followed).json()
    assert second["previous_response_id"] == first["id"]
    whole = {"input": [{"role": "user", "content": "Hello"}, *first["output"], output], "tools": [TOOL]}
    call("POST", RESPONSES, json=whole)
    assert engine.requests[1].token_ids == engine.requests[2].token_ids
    third = call("POST", RESPONSES, json={"input": "more", "previous_response_id": second["id"]}).json()
    assert third["status"] == "completed"
    assert call("DELETE", f"{RESPONSES}/{first['id']}").json()["deleted"] is True
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
        gone = call(method, f"{RESPONSES}/{first['id']}{path}")
        assert (gone.status_code, gone.json()["error"]["type"]) == (404, "NotFoundError")
    assert call("POST", RESPONSES, json=followed).status_code == 404


def test_items_of_kept_responses_can_be_referred_to(call, engine, call_answer, chat_answer):
    call_answer("I look.", "look", '{"x":1}')
    first = call("POST", RESPONSES, json={**ASK, "tools": [TOOL]}).json()
    output = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "seen"}
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    chat_answer("", "done")
    begin = {"role": "user", "content": "Hello"}
    for items in (first["output"], references):
        body = {"input": [begin, *items, output], "tools": [TOOL]}
        assert call("POST", RESPONSES, json=body).status_code == 200
    assert engine.requests[1].token_ids == engine.requests[2].token_ids
    assert call("POST", f"{RESPONSES}/input_tokens", json=body).json()["input_tokens"] == len(
        engine.requests[2].token_ids
    )
    for wrong in ("x", "msg_nothing_0", first["output"][0]["id"][:-1] + "9", None):
        reply = call("POST", RESPONSES, json={"input": [{"type": "item_reference", "id": wrong}]})
        assert (reply.status_code, reply.json()["error"]["param"]) == (404, "input[0].id")


def test_truncation_drops_the_first_turns_of_a_conversation_that_is_too_long(call, engine, chat_answer):
    chat_answer("", "ok")
    words = "word " * (engine.info.max_length // 40)
    turns = [{"role": role, "content": f"{i} {words}"} for i in range(40) for role in ("user", "assistant")]
    body = {"instructions": "Be kind.", "input": [{"role": "developer", "content": "Stay."}, *turns, turns[0]]}
    assert call("POST", RESPONSES, json=body).json()["error"]["message"].startswith("prompt has")
    reply = call("POST", RESPONSES, json={**body, "truncation": "auto"}).json()
    assert (reply["status"], reply["truncation"]) == ("completed", "auto")
    kept = engine.requests[0].token_ids
    assert engine.info.max_length // 2 < len(kept) < engine.info.max_length
    latest = [*body["input"][:1], *turns[-20:], turns[0]]
    call("POST", RESPONSES, json={**body, "input": latest})
    assert kept[-200:] == engine.requests[1].token_ids[-200:]
    assert kept[:20] == engine.requests[1].token_ids[:20], "what the system says stays"
    lone = {"input": words * 50, "truncation": "auto"}
    assert call("POST", RESPONSES, json=lone).status_code == 400, "the last turn is not cut"


def test_rules_of_an_answer_are_the_chat_api_s(call, engine, chat_answer):
    chat_answer("", "x")
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    function = {k: v for k, v in TOOL.items() if k != "type"}
    tools = [{"type": "function", "function": function}]
    for ours, theirs in (
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}},
        ),
        ({"tools": [TOOL], "tool_choice": "required"}, {"tools": tools, "tool_choice": "required"}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "look"}, "parallel_tool_calls": False},
            {
                "tools": tools,
                "tool_choice": {"type": "function", "function": {"name": "look"}},
                "parallel_tool_calls": False,
            },
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "look"}],
                },
            },
            {
                "tools": tools,
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}},
            },
        ),
    ):
        assert call("POST", RESPONSES, json={**ASK, **ours}).status_code == 200
        chat = {"messages": [{"role": "user", "content": "Hello"}], **theirs}
        assert call("POST", "/v1/chat/completions", json=chat).status_code == 200
        mine, other = engine.requests[-2:]
        assert mine.rules == other.rules is not None
        assert mine.token_ids == other.token_ids


def test_the_input_of_a_kept_response_can_be_listed(call, chat_answer):
    chat_answer("", "ok")
    items = [{"role": "user", "content": f"number {i}"} for i in range(5)]
    made = call("POST", RESPONSES, json={**ASK, "input": items}).json()
    path = f"{RESPONSES}/{made['id']}/input_items"
    first = call("GET", path, params={"limit": 2, "order": "asc"}).json()
    assert [item["content"] for item in first["data"]] == ["number 0", "number 1"]
    assert first["object"] == "list"
    assert first["has_more"]
    assert (first["first_id"], first["last_id"]) == tuple(item["id"] for item in first["data"])
    rest = call("GET", path, params={"order": "asc", "after": first["last_id"]}).json()
    assert [item["content"] for item in rest["data"]] == ["number 2", "number 3", "number 4"]
    assert not rest["has_more"]
    assert [item["content"] for item in call("GET", path).json()["data"]] == [f"number {i}" for i in (4, 3, 2, 1, 0)]
    assert "nobody" in call("GET", path, params={"after": "nobody"}).json()["error"]["message"]
    assert call("GET", path, params={"limit": 0}).status_code == 400
    assert call("GET", f"{RESPONSES}/resp_x/input_items").status_code == 404
    plain = call("POST", RESPONSES, json=ASK).json()
    (item,) = call("GET", f"{RESPONSES}/{plain['id']}/input_items").json()["data"]
    assert (item["type"], item["content"]) == ("message", [{"type": "input_text", "text": "Hello"}])


def test_tokens_of_an_input_are_counted_as_they_are_used(call, engine, chat_answer):
    chat_answer("", "ok")
    body = {**ASK, "instructions": "Be brief.", "tools": [TOOL]}
    counted = call("POST", f"{RESPONSES}/input_tokens", json=body).json()
    assert engine.requests == []
    made = call("POST", RESPONSES, json=body).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": made["usage"]["input_tokens"]}
    following = {**body, "previous_response_id": made["id"], "input": "And?"}
    more = call("POST", f"{RESPONSES}/input_tokens", json=following).json()["input_tokens"]
    assert more == call("POST", RESPONSES, json=following).json()["usage"]["input_tokens"] > counted["input_tokens"]
    assert call("POST", f"{RESPONSES}/input_tokens", json={**body, "previous_response_id": "x"}).status_code == 404


def test_what_is_not_stored_is_not_kept(call, chat_answer):
    chat_answer("", "x")
    reply = call("POST", RESPONSES, json={**ASK, "store": False}).json()
    assert call("GET", f"{RESPONSES}/{reply['id']}").status_code == 404


@pytest.mark.parametrize("settings", [{"stored_responses": 2}])
def test_the_oldest_are_forgotten_first(call, chat_answer, settings):
    chat_answer("", "x")
    names = [call("POST", RESPONSES, json=ASK, headers={"X-Request-Id": "same"}).json()["id"] for _ in range(3)]
    assert len(set(names)) == 3
    assert [call("GET", f"{RESPONSES}/{name}").status_code for name in names] == [404, 200, 200]


def test_a_call_whose_arguments_come_in_pieces(call, engine, tokenizer):
    """A grammar holds them to their form, so they stream."""
    payload = '{"name":"look","args":{"x":"a long enough text"}}'
    ids = [MODEL, *tokenizer.encode_text("look"), CALL_JSON, *tokenizer.encode_text(payload), END_MESSAGE, END_TURN]
    engine.answer = lambda _: ids
    body = {**ASK, "tools": [TOOL], "tool_choice": "required"}
    events = sent(call("POST", RESPONSES, json={**body, "stream": True}))
    pieces = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert len(pieces) > 1
    assert "".join(pieces) == events[-1]["response"]["output"][0]["arguments"] == '{"x":"a long enough text"}'
    cut = sent(call("POST", RESPONSES, json={**body, "max_output_tokens": len(ids) - 6, "stream": True}))[-1][
        "response"
    ]
    assert (cut["status"], cut["output"][0]["status"]) == ("incomplete", "incomplete")


REFUSED = [
    ({"input": []}, "input"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input_image"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "x", "arguments": {}}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "c9", "output": "x"}]}, "c9"),
    ({"tools": [{"type": "web_search"}]}, "web_search"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "mcp"}, "tools": [TOOL]}, "mcp"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "some"}, "truncation"),
    ({"include": ["message.output_text.logprobs"]}, "message.output_text.logprobs"),
    ({"background": True, "stream": True}, "background"),
    ({"background": True, "store": False}, "background"),
    ({"reasoning": {"effort": "huge"}}, "huge"),
    ({"max_output_tokens": 0}, "max_tokens"),
    ({"temperature": 9}, "temperature"),
    ({"text": {"format": {"schema": {}}}}, "text.format"),
]


@pytest.mark.parametrize(("wrong", "named"), REFUSED, ids=[f"{i}-{n}" for i, (_, n) in enumerate(REFUSED)])
def test_what_cannot_be_served_is_refused_by_name(call, engine, wrong, named):
    response = call("POST", RESPONSES, json={**ASK, **wrong})
    assert response.status_code == 400, response.text
    assert named in response.json()["error"]["message"]
    assert engine.requests == []


def test_a_fault_in_a_stream_is_a_failed_response(call, engine, text_answer):
    text_answer("on and on ")
    steps = engine.steps

    async def dying():
        engine.die("it was killed")
        await steps()

    engine.steps = dying
    last = sent(call("POST", RESPONSES, json={**ASK, "stream": True}))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert "it was killed" in last["response"]["error"]["message"]
    assert call("GET", f"{RESPONSES}/{last['response']['id']}").json()["status"] == "failed"


def test_the_openai_client(client, chat_answer, call_answer):
    chat_answer("think hard", "the answer")
    whole = client.responses.create(**ASK)
    assert whole.output_text == "the answer"
    with client.responses.stream(**ASK) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(pieces) == final.output_text == "the answer"
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert client.responses.retrieve(final.id).output_text == "the answer"
    call_answer("I look.", "look", '{"x":1}')
    called = client.responses.create(**ASK, tools=[TOOL]).output[1]
    assert (called.type, called.arguments) == ("function_call", '{"x":1}')
    with pytest.raises(openai.NotFoundError, match="no response"):
        client.responses.retrieve("resp_none")


def test_background_and_cancel(client, engine, text_answer, chat_answer, site):
    engine.info = msgspec.structs.replace(engine.info, max_length=1_000_000)  # no answer ends by itself
    chat_answer("", "the answer")
    started = client.responses.create(**ASK, background=True)
    until(lambda: client.responses.retrieve(started.id).status == "completed")
    assert client.responses.retrieve(started.id).output_text == "the answer"
    with pytest.raises(openai.BadRequestError, match="completed already"):
        client.responses.cancel(started.id)
    text_answer("on and on ")
    engine.pace_s = 0.001
    running = client.responses.create(**ASK, background=True)
    until(lambda: client.responses.retrieve(running.id).output)
    with pytest.raises(openai.BadRequestError, match="still runs"):
        client.responses.create(**ASK, previous_response_id=running.id)
    assert client.responses.cancel(running.id).status == "cancelled"
    assert client.responses.cancel(running.id).status == "cancelled"
    until(lambda: not engine.open and not site.service.runs)
    assert client.responses.retrieve(running.id).output[0].status == "incomplete"


def test_a_stream_can_be_cancelled(client, engine, text_answer, site):
    engine.info = msgspec.structs.replace(engine.info, max_length=1_000_000)
    text_answer("on and on ")
    engine.pace_s = 0.001
    with client.responses.create(**ASK, stream=True) as stream:
        events = list(itertools.islice(stream, 10))
        client.responses.cancel(events[0].response.id)
        last = list(stream)[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    until(lambda: not engine.open and not site.service.runs)
