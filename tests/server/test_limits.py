"""What a server takes from strangers: size of heads, depth of JSON; and what its log and errors give away."""

import contextlib
import io
import json
import logging
import socket

import httpx
import pytest

from inkcap.base.log import JsonLines, TextLines, logger, request_id
from inkcap.server.body import deeper

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hello"}]}
LIMITS = {"header_bytes": 4000, "header_count": 20}


def answer_to(site, *pieces):
    """What the server says to raw bytes before it hangs up, or before it waits for more."""
    with contextlib.closing(socket.create_connection(("127.0.0.1", site.port))) as client:
        client.settimeout(20)
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                client.sendall(piece)
        said = b""
        with contextlib.suppress(ConnectionError):
            while piece := client.recv(4096):
                said += piece
        return said


@pytest.mark.parametrize("settings", [LIMITS])
@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET /version HTTP/1.1\r\nhost: x\r\nbig: ", b"x" * 5000, b"\r\n\r\n"],
        [b"GET /version HTTP/1.1\r\nhost: x\r\nendless: ", *[b"x" * 4000] * 50],
        [b"GET /", b"x" * 5000, b" HTTP/1.1\r\nhost: x\r\n\r\n"],
        [b"GET /version HTTP/1.1\r\nhost: x\r\n", *[b"a: b\r\n"] * 30, b"\r\n"],
        [b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\nbig: " + b"x" * 5000 + b"\r\n\r\nabcde"],
    ],
    ids=["one long header", "no end", "a long path", "many headers", "before a body"],
)
def test_large_heads_are_refused_and_hung_up_on(site, settings, pieces):
    said = answer_to(site, *pieces)  # it ends, so the server has hung up
    assert said == b"" or said.startswith(b"HTTP/1.1 431 ")
    if len(pieces) == 1:  # with more to read, the hanging up may overtake the answer
        assert said.startswith(b"HTTP/1.1 431 ")
    assert httpx.get(site.url + "/version", headers={"a": "x" * 3000}).status_code == 200


@pytest.mark.parametrize("settings", [LIMITS])
def test_a_large_body_is_no_large_head(site, settings):
    with httpx.Client() as client:
        for _ in range(3):  # on one connection
            body = {"prompt": "word " * 20_000}
            assert client.post(site.url + "/tokenize", json=body).json()["count"] >= 20_000


def nested(depth):
    return b'{"prompt": "x", "extra": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_json_may_be_nested_as_deep_as_the_limit(call):
    headers = {"content-type": "application/json"}
    assert call("POST", "/tokenize", content=nested(128), headers=headers).status_code == 200
    for depth in (129, 900, 100_000):
        response = call("POST", "/tokenize", content=nested(depth), headers=headers)
        assert response.status_code == 400
        assert "nested too deeply" in response.json()["error"]["message"]


@pytest.mark.parametrize(("value", "depth"), [(1, 0), ([], 1), ({"a": 1}, 1), ([[], {"a": [1]}], 3)])
def test_depth(value, depth):
    assert not deeper(value, depth + 1)
    if depth:
        assert not deeper(value, depth)
        assert deeper([value], depth)


@pytest.fixture
def logged():
    """Lines of the log, as each format writes them."""
    texts = {"text": io.StringIO(), "json": io.StringIO()}
    handlers = [logging.StreamHandler(stream) for stream in texts.values()]
    for handler, formatter in zip(handlers, (TextLines("server"), JsonLines("server")), strict=True):
        handler.setFormatter(formatter)
        logger.addHandler(handler)
    yield {kind: lambda stream=stream: stream.getvalue().splitlines() for kind, stream in texts.items()}
    for handler in handlers:
        logger.removeHandler(handler)


FORGED = "x\n2026-01-01T00:00:00.000 INFO [server] all is well\x1b[31m\u2028"


def test_nothing_that_a_client_sends_makes_a_line_of_the_log(call, logged, chat_answer):
    chat_answer("", "x")
    call("POST", CHAT, json={**ASK, FORGED: 1}, headers={"X-Request-Id": "r1"})
    logger.warning("as it came: %s", FORGED)
    for kind in ("text", "json"):
        lines = logged[kind]()
        assert len(lines) == 2
        assert "\x1b" not in "".join(lines)
    first = json.loads(logged["json"]()[0])
    assert (first["level"], first["role"], first["request_id"]) == ("warning", "server", "r1")
    assert json.loads(logged["json"]()[1])["message"] == "as it came: " + FORGED


def test_a_traceback_stays_out_of_the_reply_and_within_its_lines(call, engine, logged):
    def broken(_):
        raise ValueError(FORGED)

    engine.submit = broken
    response = call("POST", CHAT, json=ASK)
    assert response.status_code == 500
    assert "all is well" not in response.text
    try:
        raise ValueError(FORGED)
    except ValueError:
        logger.exception("failed")
    text = logged["text"]()
    assert all(line.startswith(("    ", "20")) for line in text)
    assert not any(line.startswith("2026-01-01T00:00:00.000 INFO") for line in text)
    assert "ValueError" in json.loads(logged["json"]()[-1])["traceback"]
    assert request_id.get() is None


@pytest.mark.parametrize("settings", [{"docs": False}])
def test_documentation_can_be_left_out(call, settings):
    assert [call("GET", path).status_code for path in ("/docs", "/redoc", "/openapi.json")] == [404, 404, 404]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/audio/transcriptions", "/v1/load_lora_adapter", "/sleep"])
def test_endpoints_that_are_not_built_say_so(call, path):
    response = call("POST", path, json={})
    assert (response.status_code, response.json()["error"]["type"]) == (501, "NotImplementedError")
    assert path in response.json()["error"]["message"]


def test_tokenizer_info_is_asked_for(call):
    assert "--enable-tokenizer-info-endpoint" in call("GET", "/tokenizer_info").json()["error"]["message"]


@pytest.mark.parametrize("settings", [{"tokenizer_info": True}])
def test_tokenizer_info(call, settings):
    facts = call("GET", "/tokenizer_info").json()
    assert (facts["eos_token"], facts["eos_token_id"]) == ("<|content_model_end_sampling|>", 200_006)
    assert facts["added_tokens_decoder"]["200010"]["content"] == "<|end_message|>"


@pytest.mark.parametrize("settings", [LIMITS])
def test_what_came_before_a_head_does_not_count_for_it(site, settings):
    body = json.dumps({"prompt": "word " * 4000}).encode()
    first = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
    first += str(len(body)).encode() + b"\r\n\r\n" + body
    with contextlib.closing(socket.create_connection(("127.0.0.1", site.port))) as client:
        client.settimeout(20)
        client.sendall(first + b"GET /version HTTP/1.1\r\nhost: x\r\n")  # a second one begins in the same bytes
        said = b""
        while b'"token_strs"' not in said:
            piece = client.recv(65536)
            assert piece, "the server hung up"
            said += piece
        client.sendall(b"connection: close\r\n\r\n")
        while piece := client.recv(4096):
            said += piece
    assert said.count(b"HTTP/1.1 200 OK") == 2
