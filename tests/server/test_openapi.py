"""The server's own OpenAPI file, and bodies made from it at random: whatever comes, the answer is not a failure."""

import warnings

import hypothesis
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode

EXAMPLES = 16  # of each operation and mode


@pytest.fixture
def settings():
    return {"tokenizer_info": True}


def sender(operation, mode, url, answers):
    """A function that sends requests of one operation and writes down the status of each answer."""

    @hypothesis.seed(1)
    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def send(case):
        if isinstance(case.body, dict):
            case.body.pop("model", None)  # nearly every other name is a 404
            if operation.path.startswith("/v1/messages"):
                case.body["model"] = "demo"
        response = case.call(base_url=url, timeout=20)
        answers.append(response.status_code)
        assert response.status_code < 500, f"{operation.label}: {response.text}\n{case.as_curl_command()}"

    return send


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_no_request_of_the_schema_fails(site, engine, mode):
    engine.info = msgspec.structs.replace(engine.info, max_length=64)  # answers end soon
    engine.capacity = 20
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of schemathesis' own
        schema = schemathesis.openapi.from_url(site.url + "/openapi.json")
        asked = {}
        for result in schema.get_all_operations():
            operation = result.ok()
            answers = asked.setdefault(operation.label, [])
            try:
                sender(operation, mode, site.url, answers)()
            except hypothesis.errors.Unsatisfiable:
                assert mode is GenerationMode.NEGATIVE  # nothing about it can be wrong
    assert len(asked) > 12
    assert {"POST /v1/chat/completions", "POST /v1/responses", "POST /v1/messages"} <= set(asked)
    if mode is GenerationMode.POSITIVE:
        served = [label for label, answers in asked.items() if 200 in answers]
        assert {"POST /v1/completions", "POST /tokenize", "GET /v1/models"} <= set(served)


def test_the_schema_lists_what_is_served(call):
    paths = call("GET", "/openapi.json").json()["paths"]
    assert {
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel", "/v1/messages", "/v1/messages/count_tokens", "/v1/models", "/health",
        "/metrics", "/version", "/load", "/tokenize", "/detokenize", "/tokenizer_info",
    } <= set(paths)  # fmt: skip
    assert "/v1/embeddings" not in paths
