"""Models, health, metrics, version, tokenizing; and what holds for every path."""

import json
import re

import httpx
import pytest

from inkcap.base.request import EngineStats
from inkcap.server.service import VERSION

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hello"}]}


def test_models(call):
    listed = call("GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert [entry["id"] for entry in listed["data"]] == ["demo", "alias"]
    entry = call("GET", "/v1/models/alias").json()
    assert (entry["object"], entry["max_model_len"], entry["owned_by"]) == ("model", 4096, "inkcap")
    missing = call("GET", "/v1/models/other/one")
    assert missing.status_code == 404
    assert missing.json()["error"] == {
        "message": "no model 'other/one' here; this server has demo, alias",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }


def test_an_unknown_model_is_404_and_an_absent_one_the_first(call, chat_answer):
    chat_answer("", "x")
    assert call("POST", CHAT, json={**ASK, "model": "gpt"}).status_code == 404
    assert call("POST", CHAT, json=ASK).json()["model"] == "demo"
    assert call("POST", CHAT, json={**ASK, "model": "alias"}).json()["model"] == "alias"


def test_health_while_loading_serving_draining_and_dead(call, engine, app):
    info, engine.info = engine.info, None
    assert call("GET", "/health").status_code == 503
    assert call("GET", "/health").json() == {"status": "loading"}
    refused = call("POST", CHAT, json=ASK)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    engine.info = info
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        response = call(method, path)
        assert (response.status_code, response.content) == (200, b"")
    app.state.service.draining = True
    assert call("GET", "/health").json() == {"status": "draining"}
    assert call("POST", CHAT, json=ASK).json()["error"]["type"] == "ServiceUnavailable"
    engine.fault = "it was killed"
    assert call("GET", "/health").json() == {"status": "dead"}
    assert "it was killed" in call("POST", CHAT, json=ASK).json()["error"]["message"]


def test_version_load_and_documentation(call):
    assert call("GET", "/version").json() == {"version": VERSION}
    assert call("GET", "/load").json() == {"server_load": 0}
    page = call("GET", "/docs")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "://" not in page.text
    for name in re.findall(r'(?:href|src)="(page/[^"]+)"', page.text):
        assert call("GET", f"/{name}").status_code == 200, name
    assert call("GET", "/redoc").status_code == 404
    paths = call("GET", "/openapi.json").json()["paths"]
    assert {CHAT, "/v1/completions", "/v1/models", "/health", "/metrics", "/tokenize"} <= set(paths)


def test_tokenize_and_detokenize(call, tokenizer):
    text = "Hello <|end_message|> wörld"
    reply = call("POST", "/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert reply["tokens"] == tokenizer.encode_text(text)
    assert (reply["count"], reply["max_model_len"]) == (len(reply["tokens"]), 4096)
    assert reply["token_strs"][0] == "Hello"
    assert call("POST", "/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": text}
    rendered = call("POST", "/tokenize", json=ASK).json()["tokens"]
    assert rendered[0] == 200_002
    assert rendered[-4:] == [200_000, 200_004, 13225, 200_010]
    assert call("POST", "/tokenize", json={}).status_code == 400
    assert call("POST", "/tokenize", json={"prompt": "x", **ASK}).status_code == 400
    assert call("POST", "/detokenize", json={"tokens": [200_058]}).status_code == 400


def test_metrics(call, engine, chat_answer):
    ids = chat_answer("think", "a b c")
    engine.numbers = EngineStats(
        running=2, waiting=1, cache_usage=0.5, group_usage={"full": 0.5}, generated_tokens=9, steps=3, step_tokens=12,
        step_sizes=[0, 2, 1, *[0] * 11],
    )  # fmt: skip
    call("POST", CHAT, json={**ASK, "n": 2})
    call("POST", CHAT, json={**ASK, "temperature": -1})
    call("GET", "/nowhere/at/all")
    call("POST", CHAT, json={**ASK, "structured_outputs": {"regex": "("}})
    response = call("GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = {}
    for line in response.text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            assert name not in values, f"{name} appears twice"
            values[name] = float(value)
    labels = 'model_name="demo",engine="0"'
    assert values[f"vllm:num_requests_running{{{labels}}}"] == 2
    assert values[f"vllm:kv_cache_usage_perc{{{labels}}}"] == 0.5
    assert values[f"vllm:generation_tokens_total{{{labels}}}"] == 9
    assert values[f'vllm:request_success_total{{{labels},finished_reason="stop"}}'] == 2
    assert values[f"vllm:time_to_first_token_seconds_count{{{labels}}}"] == 2
    assert values[f"vllm:inter_token_latency_seconds_count{{{labels}}}"] == 2 * (len(ids) - 1)
    assert values[f"vllm:e2e_request_latency_seconds_count{{{labels}}}"] == 2
    assert values[f'vllm:request_generation_tokens_bucket{{{labels},le="20"}}'] == 2
    assert values[f'vllm:request_generation_tokens_bucket{{{labels},le="5"}}'] == 0
    assert values[f"vllm:request_generation_tokens_sum{{{labels}}}"] == 2 * len(ids)
    assert values[f"vllm:iteration_tokens_total_sum{{{labels}}}"] == 12
    assert values[f"vllm:iteration_tokens_total_count{{{labels}}}"] == 3
    assert values[f'vllm:iteration_tokens_total_bucket{{{labels},le="8"}}'] == 2
    assert values[f"vllm:request_queue_time_seconds_sum{{{labels}}}"] == 1.0  # as the fake engine says, twice 0.5
    for part in ("prefill", "inference"):  # less than it says there, so nothing is left for these
        assert values[f"vllm:request_{part}_time_seconds_sum{{{labels}}}"] == 0
    for part in ("prefill", "decode", "inference"):
        assert values[f"vllm:request_{part}_time_seconds_count{{{labels}}}"] == 2
    assert values[f'vllm:request_num_preemptions_bucket{{{labels},le="1"}}'] == 0
    assert values[f'vllm:request_num_preemptions_bucket{{{labels},le="2"}}'] == 2
    assert values[f"vllm:reasoning_tokens_total{{{labels}}}"] == 2  # "think" is one token
    assert values[f'http_requests_total{{handler="{CHAT}",method="POST",status="2xx"}}'] == 1
    assert values[f'http_requests_total{{handler="{CHAT}",method="POST",status="4xx"}}'] == 2
    assert values[f"vllm:grammar_rejects_total{{{labels}}}"] == 1
    assert values[f"vllm:undeclared_tool_calls_total{{{labels}}}"] == 0
    assert values['http_requests_total{handler="none",method="GET",status="4xx"}'] == 1


GAUGES = (
    "num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc lora_requests_info "
    "cache_config_info engine_sleep_state"
)
COUNTERS = (
    "prompt_tokens prompt_tokens_cached generation_tokens request_success num_preemptions prefix_cache_queries "
    "prefix_cache_hits mm_cache_queries mm_cache_hits spec_decode_num_drafts spec_decode_num_draft_tokens "
    "spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos corrupted_requests "
    "tool_call_parser_invocations malformed_tool_calls bare_text_blocks reasoning_tokens grammar_rejects"
)
HISTOGRAMS = (
    "time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds "
    "e2e_request_latency_seconds request_queue_time_seconds request_inference_time_seconds "
    "request_prefill_time_seconds request_decode_time_seconds request_prompt_tokens request_generation_tokens "
    "request_max_num_generation_tokens request_params_n request_params_max_tokens iteration_tokens_total "
    "request_num_preemptions"
)


def test_every_family_that_clients_of_vllm_scrape_is_there(call):
    found = {tuple(line.split()[2:]) for line in call("GET", "/metrics").text.splitlines() if line.startswith("# TYPE")}
    wanted = {(f"vllm:{name}", "gauge") for name in GAUGES.split()}
    wanted |= {(f"vllm:{name}_total", "counter") for name in COUNTERS.split()}
    wanted |= {(f"vllm:{name}", "histogram") for name in HISTOGRAMS.split()}
    wanted |= {("http_requests_total", "counter"), ("http_request_duration_seconds", "histogram")}
    assert wanted <= found, wanted - found


def test_metrics_while_loading(call, engine):
    engine.info = None
    assert "vllm:num_requests_running" in call("GET", "/metrics").text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"messages": [', "not JSON"),
        (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', "not"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "not JSON"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', ""),
        (b"[" * 100_000, ""),
        (b"[1, 2]", ""),
        (b'"text"', ""),
        (b"", ""),
        (b"null", ""),
    ],
)
def test_bodies_that_are_no_requests(call, content, said):
    response = call("POST", CHAT, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert said in error["message"]
    assert error["type"] == "BadRequestError"
    assert "Traceback" not in response.text


def test_many_mistakes_are_named_briefly(call):
    body = {"messages": ["x" * 10_000] * 50, "temperature": "x" * 10_000}
    error = call("POST", CHAT, json=body).json()["error"]
    assert "messages.0" in error["message"]
    assert "and 41 more" in error["message"]
    assert len(error["message"]) < 3000


def test_paths_methods_and_content_types(call):
    assert call("GET", "/nowhere").json()["error"]["type"] == "NotFoundError"
    assert call("GET", CHAT).status_code == 405
    assert call("GET", CHAT).json()["error"]["code"] == 405
    response = call("POST", CHAT, content="a=b", headers={"content-type": "application/x-www-form-urlencoded"})
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]
    charset = {"content-type": "application/json; charset=utf-8"}
    assert call("POST", CHAT, content=json.dumps({}), headers=charset).status_code == 400


def test_request_ids(call, engine, chat_answer):
    chat_answer("", "x")
    response = call("POST", CHAT, json=ASK, headers={"X-Request-Id": "my-id.1"})
    assert response.headers["x-request-id"] == "my-id.1"
    assert response.json()["id"] == "chatcmpl-my-id.1"
    call("POST", CHAT, json=ASK, headers={"X-Request-Id": "my-id.1"})
    assert len({request.request_id for request in engine.requests}) == 2
    odd = call("GET", "/version", headers={"X-Request-Id": "no good"}).headers["x-request-id"]
    assert len(odd) == 32
    assert call("GET", "/nowhere").headers["x-request-id"]


def test_an_unexpected_failure_is_a_500_without_its_inside(call, engine):
    def broken(_):
        raise ValueError("secret path /etc")

    engine.submit = broken
    response = call("POST", CHAT, json=ASK)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "InternalServerError"
    assert "secret" not in response.text


@pytest.mark.parametrize("settings", [{"body_bytes": 1000}])
def test_large_bodies(call, settings):
    response = call("POST", CHAT, json={"messages": [{"role": "user", "content": "x" * 2000}]})
    assert response.status_code == 413
    assert "1,000" in response.json()["error"]["message"]

    async def pieces():
        for _ in range(20):
            yield b"x" * 100

    response = call("POST", CHAT, content=pieces(), headers={"content-type": "application/json"})
    assert response.status_code == 413


@pytest.mark.parametrize("settings", [{"api_key": "s3cret"}])
def test_api_key(call, chat_answer, settings):
    chat_answer("", "x")
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "s3cret"},
        {"Authorization": b"Bearer \xff"},
    ):
        response = call("POST", CHAT, json=ASK, headers=headers)
        assert response.status_code == 401
        assert response.json() == {"error": "Unauthorized"}
    right = {"Authorization": "Bearer s3cret"}
    assert call("POST", CHAT, json=ASK, headers=right).status_code == 200
    assert call("GET", "/v1/models").status_code == 401
    assert call("POST", "/tokenize", json={"prompt": "x"}).status_code == 401
    for open_path in ("/health", "/metrics", "/version"):
        assert call("GET", open_path).status_code == 200


@pytest.mark.parametrize("settings", [{"cors_origins": ("https://page.example",), "api_key": "k"}])
def test_cors(call, settings):
    asked = {
        "Origin": "https://page.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    response = call("OPTIONS", CHAT, headers=asked)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://page.example"
    refused = call("OPTIONS", CHAT, headers={**asked, "Origin": "https://other.example"})
    assert refused.status_code == 400
    unauthorized = call("POST", CHAT, json=ASK, headers={"Origin": "https://page.example"})
    assert unauthorized.status_code == 401
    assert unauthorized.headers["access-control-allow-origin"] == "https://page.example"


@pytest.mark.parametrize("settings", [{"root_path": "/prefix", "api_key": "k"}])
def test_a_prefix_that_a_proxy_strips(site, settings):
    assert httpx.get(site.url + "/v1/models").status_code == 401
    assert httpx.get(site.url + "/v1/models", headers={"Authorization": "Bearer k"}).status_code == 200
    assert httpx.get(site.url + "/version").status_code == 200
    assert httpx.get(site.url + "/openapi.json").json()["servers"] == [{"url": "/prefix"}]
