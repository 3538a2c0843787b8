"""Traces of requests, sent to a collector that the test plays."""

import contextlib
import http.server
import sys
import threading

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from inkcap.base.config import EngineConfig, ModelConfig, ServerConfig
from inkcap.base.errors import ConfigInvalid
from inkcap.server.spans import start_tracing
from tests.server.conftest import Site

ASK = {"messages": [{"role": "user", "content": "Hello secret"}], "temperature": 0.5}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def collector():
    """Its address, and the spans it was sent."""
    spans = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        server.shutdown()
        thread.join()


def test_a_request_is_a_span_below_its_caller_s(collector, engine, tokenizer, chat_answer):
    ids = chat_answer("think", "the answer")
    address, spans = collector
    config = EngineConfig(model=ModelConfig(path="demo"), server=ServerConfig(trace_endpoint=address))
    with contextlib.closing(Site(engine, config, tokenizer)) as site:
        for stream in (False, True):
            headers = {"traceparent": PARENT, "X-Request-Id": f"r{stream}"}
            body = {**ASK, "stream": stream}
            assert httpx.post(site.url + "/v1/chat/completions", json=body, headers=headers).status_code == 200
        assert httpx.post(site.url + "/v1/chat/completions", json={}).status_code == 400
    assert [span.name for span in spans] == ["POST /v1/chat/completions"] * 3
    for span in spans[:2]:
        assert span.trace_id.hex() == PARENT.split("-")[1]
        assert span.parent_span_id.hex() == PARENT.split("-")[2]
        found = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
        assert found["gen_ai.usage.completion_tokens"] == len(ids)
        assert found["gen_ai.usage.cached_tokens"] == 3
        assert (found["gen_ai.request.temperature"], found["gen_ai.latency.time_in_queue"]) == (0.5, 0.5)
        assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
        assert found["http.response.status_code"] == 200
        assert "secret" not in str(span)
    assert {a.value.string_value for span in spans for a in span.attributes if a.key == "gen_ai.request.id"} > {"rTrue"}


def test_a_failure_is_a_failed_span_without_its_text(collector, engine, tokenizer):
    def broken(_):
        raise ValueError("the secret")

    engine.submit = broken
    address, spans = collector
    config = EngineConfig(model=ModelConfig(path="demo"), server=ServerConfig(trace_endpoint=address))
    with contextlib.closing(Site(engine, config, tokenizer)) as site:
        assert httpx.post(site.url + "/v1/chat/completions", json=ASK).status_code == 500
        assert httpx.get(site.url + "/version").status_code == 200
    failed, fine = spans
    assert (failed.status.code, fine.status.code) == (2, 0)
    assert "secret" not in str(failed)


def test_without_opentelemetry_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "inkcap.server.tracing", None)  # importing it fails
    with pytest.raises(ConfigInvalid, match=r"pip install 'inkcap\[trace\]'"):
        start_tracing("http://localhost", "demo")
