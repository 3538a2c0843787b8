"""Clients that people use, against a server on a socket: they must find in it what they find elsewhere."""

import asyncio
import json
import os
import warnings

import anthropic
import openai
import pytest
from pydantic import BaseModel

from inkcap.chat.tokens import CALL_JSON, END_MESSAGE, END_TURN, MODEL, TEXT, THINKING

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or importing it asks the network for prices
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of these libraries' own making
    import litellm
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

ASK = [{"role": "user", "content": "Weather in SF?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Warnings these libraries raise about themselves are theirs."""
    monkeypatch.setattr(litellm, "suppress_debug_info", True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def agent(engine, tokenizer):
    """Make the engine think and call a tool, and answer once it has the tool's result."""
    payload = '{"name":"get_weather","args":{"city":"SF"}}'
    calls = [MODEL, THINKING, *tokenizer.encode_text("Need tool."), END_MESSAGE]
    calls += [MODEL, *tokenizer.encode_text("get_weather"), CALL_JSON, *tokenizer.encode_text(payload), END_MESSAGE]
    says = [MODEL, TEXT, *tokenizer.encode_text("It is 18C."), END_MESSAGE]
    result = tokenizer.encode_text("18C sunny")

    def answer(request):
        ids = request.token_ids
        seen = any(ids[i : i + len(result)] == result for i in range(len(ids)))
        return [*(says if seen else calls), END_TURN]

    engine.answer = answer


def test_openai_runs_a_tool_and_streams(site, agent, engine):
    with openai.OpenAI(base_url=site.url + "/v1", api_key="none", max_retries=0) as client:
        first = client.chat.completions.create(model="demo", messages=ASK, tools=[TOOL])
        (call,) = first.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "SF"}
        assert first.choices[0].message.reasoning_content == "Need tool."
        messages = [*ASK, first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "18C sunny"}]
        with client.chat.completions.stream(model="demo", messages=messages, tools=[TOOL]) as stream:
            assert stream.get_final_completion().choices[0].message.content == "It is 18C."
        options = {"include_usage": True}
        chunks = list(client.chat.completions.create(model="demo", messages=ASK, stream=True, stream_options=options))
        assert chunks[-1].usage.completion_tokens_details.reasoning_tokens > 0
        text = client.completions.create(model="demo", prompt="x", max_tokens=2, logprobs=1)
        assert len(text.choices[0].logprobs.tokens) == 2
        assert [model.id for model in client.models.list()] == ["demo", "alias"]
        engine.capacity = 0
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model="demo", messages=ASK)
        assert caught.value.response.headers["retry-after"] == "2"


class City(BaseModel):
    city: str


def test_openai_parses_a_structured_answer(site, engine, tokenizer):
    engine.answer = lambda _: [MODEL, TEXT, *tokenizer.encode_text('{"city":"SF"}'), END_MESSAGE, END_TURN]
    with openai.OpenAI(base_url=site.url + "/v1", api_key="none", max_retries=0) as client:
        reply = client.chat.completions.parse(model="demo", messages=ASK, response_format=City)
        assert reply.choices[0].message.parsed == City(city="SF")
        assert client.responses.parse(model="demo", input="x", text_format=City).output_parsed == City(city="SF")


@pytest.fixture
def city(engine, tokenizer):
    """Make the engine answer as the schema of City asks; `held` says whether the last request was held to it."""
    engine.answer = lambda _: [MODEL, TEXT, *tokenizer.encode_text('{"city":"SF"}'), END_MESSAGE, END_TURN]

    def held():
        rules = engine.requests[-1].rules
        return rules is not None and rules.strict and '"city"' in rules.text

    return held


def test_openai_streams_calls_and_structured_answers(site, agent, engine, tokenizer):
    with openai.OpenAI(base_url=site.url + "/v1", api_key="none", max_retries=0) as client:
        for choice in ("auto", "required"):
            with client.chat.completions.stream(model="demo", messages=ASK, tools=[TOOL], tool_choice=choice) as stream:
                kinds = [event.type for event in stream]
                (call,) = stream.get_final_completion().choices[0].message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "SF"})
            assert "tool_calls.function.arguments.delta" in kinds
        engine.answer = lambda _: [MODEL, TEXT, *tokenizer.encode_text('{"city":"SF"}'), END_MESSAGE, END_TURN]
        with client.chat.completions.stream(model="demo", messages=ASK, response_format=City) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == City(city="SF")
        with client.responses.stream(model="demo", input="x", text_format=City) as stream:
            assert stream.get_final_response().output_parsed == City(city="SF")


def test_anthropic_streams_a_call_and_parses_a_structured_answer(site, agent, engine, tokenizer):
    tools = [{"name": "get_weather", "description": "Weather", "input_schema": PARAMETERS}]
    with anthropic.Anthropic(base_url=site.url, api_key="none", max_retries=0) as client:
        asked = {"model": "demo", "max_tokens": 100, "messages": ASK}
        with client.messages.stream(**asked, tools=tools, tool_choice={"type": "any"}) as stream:
            assert "input_json" in [event.type for event in stream]
            assert stream.get_final_message().content[-1].input == {"city": "SF"}
        engine.answer = lambda _: [MODEL, TEXT, *tokenizer.encode_text('{"city":"SF"}'), END_MESSAGE, END_TURN]
        assert client.messages.parse(**asked, output_format=City).parsed_output == City(city="SF")
        assert '"city"' in engine.requests[-1].rules.text


def test_litellm_streams_calls(site, agent):
    for target in (
        {"model": "hosted_vllm/demo", "api_base": site.url + "/v1"},
        {"model": "anthropic/demo", "api_base": site.url},
    ):
        chunks = litellm.completion(
            **target, api_key="none", num_retries=0, messages=ASK, tools=[TOOL], max_tokens=100, stream=True
        )
        message = litellm.stream_chunk_builder(list(chunks)).choices[0].message
        assert json.loads(message.tool_calls[0].function.arguments) == {"city": "SF"}


def test_litellm_asks_for_a_schema(site, city):
    reply = litellm.completion(
        model="hosted_vllm/demo", api_base=site.url + "/v1", api_key="none", messages=ASK, response_format=City
    )
    assert json.loads(reply.choices[0].message.content) == {"city": "SF"}
    assert city()


def test_langchain_streams_calls(site, agent):
    model = ChatOpenAI(model="demo", base_url=site.url + "/v1", api_key="none", max_retries=0)
    whole = None
    for chunk in model.bind_tools([TOOL], tool_choice="required").stream(ASK):
        whole = chunk if whole is None else whole + chunk
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("get_weather", {"city": "SF"})]


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_asks_for_a_schema(site, city, responses):
    model = ChatOpenAI(
        model="demo", base_url=site.url + "/v1", api_key="none", max_retries=0, use_responses_api=responses
    )
    assert model.with_structured_output(City, method="json_schema").invoke("x") == City(city="SF")
    assert city()


def test_openai_asynchronously(site, agent):
    async def ask():
        client = openai.AsyncOpenAI(base_url=site.url + "/v1", api_key="none", max_retries=0)
        async with client, client.responses.stream(model="demo", input="Weather?") as stream:
            return [event.type async for event in stream]

    assert asyncio.run(ask())[-1] == "response.completed"


def test_anthropic_runs_a_tool(site, agent):
    tools = [{"name": "get_weather", "description": "Weather", "input_schema": PARAMETERS}]
    with anthropic.Anthropic(base_url=site.url, api_key="none", max_retries=0) as client:
        first = client.messages.create(model="demo", max_tokens=100, messages=ASK, tools=tools)
        assert first.stop_reason == "tool_use"
        thought, use = first.content
        assert (thought.thinking, use.input) == ("Need tool.", {"city": "SF"})
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "18C sunny"}
        messages = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        with client.messages.stream(model="demo", max_tokens=100, messages=messages, tools=tools) as stream:
            assert "".join(stream.text_stream) == "It is 18C."


def test_litellm_in_three_dialects(site, agent):
    common = {"api_key": "none", "num_retries": 0}
    openai_like = {**common, "model": "hosted_vllm/demo", "api_base": site.url + "/v1"}
    reply = litellm.completion(**openai_like, messages=ASK, tools=[TOOL])
    message = reply.choices[0].message
    assert message.reasoning_content == "Need tool."
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "SF"}
    chunks = list(litellm.completion(**openai_like, messages=ASK, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.reasoning_content == "Need tool."
    assert whole.usage.completion_tokens > 0
    reply = litellm.completion(
        **common, model="anthropic/demo", api_base=site.url, messages=ASK, tools=[TOOL], max_tokens=100
    )
    assert json.loads(reply.choices[0].message.tool_calls[0].function.arguments) == {"city": "SF"}
    reply = litellm.responses(**common, model="openai/demo", api_base=site.url + "/v1", input="Weather?")
    assert [item.arguments for item in reply.output if item.type == "function_call"] == ['{"city":"SF"}']
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**openai_like, "model": "hosted_vllm/other"}, messages=ASK)


def test_langchain_runs_an_agent_s_turn(site, agent):
    @tool
    def get_weather(city: str) -> str:
        """Weather"""
        return f"18C sunny in {city}"

    model = ChatOpenAI(model="demo", base_url=site.url + "/v1", api_key="none", max_retries=0, stream_usage=True)
    bound = model.bind_tools([get_weather])
    first = bound.invoke([HumanMessage("Weather in SF?")])
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "SF"})
    assert call["id"]
    assert first.usage_metadata["output_tokens"] > 0
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    messages = [HumanMessage("Weather in SF?"), first, result]
    assert bound.invoke(messages).content == "It is 18C."
    whole = None
    for chunk in bound.stream(messages):
        whole = chunk if whole is None else whole + chunk
    assert whole.content == "It is 18C."
    assert whole.usage_metadata["input_tokens"] > 0
    responses = ChatOpenAI(
        model="demo", base_url=site.url + "/v1", api_key="none", max_retries=0, use_responses_api=True
    ).bind_tools([get_weather])
    assert responses.invoke([HumanMessage("Weather in SF?")]).tool_calls[0]["args"] == {"city": "SF"}
