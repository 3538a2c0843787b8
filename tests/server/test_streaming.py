"""Streams on a real socket: leavers, slow readers, a dying engine, crowds, and clients people use."""

import asyncio
import contextlib
import itertools
import json
import socket
import subprocess
import threading
import time

import httpx
import msgspec
import openai
import pytest

from inkcap.base.request import Finish, TokenDelta
from inkcap.chat.tokens import END_MESSAGE, END_TURN, MODEL, TEXT
from tests.server.conftest import until

CHAT = "/v1/chat/completions"
ASK = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}


def connect(site, body, receive_buffer=None):
    """Send a chat request over a raw socket; the response has not been read."""
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(20)
    client.connect(("127.0.0.1", site.port))
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    return client


def test_a_client_that_leaves_aborts_at_once_every_time(site, engine, text_answer):
    text_answer("on and on ")
    engine.pace_s = 0.001
    engine.info = msgspec.structs.replace(engine.info, max_length=1_000_000)  # no answer ends by itself
    for number in range(200):
        client = connect(site, {**ASK, "stream": number % 2 == 0, "n": 1 + number % 3 // 2})
        if number % 4 == 0:
            client.recv(2000)  # in the middle of the answer
        else:
            until(lambda: engine.open)
        client.close()
        until(lambda: not engine.open)
    assert len(engine.aborted) == len(engine.requests) > 200
    until(lambda: not site.service.runs)
    assert "vllm:request_success_total" in httpx.get(site.url + "/metrics").text


def test_a_client_that_leaves_while_it_is_behind(site, engine, text_answer):
    text_answer("on and on ")
    engine.info = msgspec.structs.replace(engine.info, max_length=1_000_000)
    client = connect(site, {**ASK, "stream": True}, receive_buffer=4096)
    stream = None

    def blocked():
        nonlocal stream
        stream = next(iter(engine.open.values()), None)
        return stream is not None and len(stream.waiting) > 50

    until(blocked)
    client.close()
    until(lambda: not engine.open)
    assert len(engine.aborted) == 1


def test_a_reader_of_one_byte_per_turn_blocks_nobody_and_costs_no_memory(site, engine, chat_answer, tokenizer):
    piece = tokenizer.encode_text("slow reader ")
    long = [MODEL, TEXT, *(piece * 10_000)[:20_000], END_MESSAGE, END_TURN]
    engine.answer = lambda _: long
    engine.info = msgspec.structs.replace(engine.info, max_length=30_000)
    slow = connect(site, {**ASK, "stream": True}, receive_buffer=2048)
    assert slow.recv(1) == b"H"
    until(lambda: not engine.open)  # all tokens are made; the reader has taken one byte
    short = chat_answer("", "quick")
    started = time.monotonic()
    reply = httpx.post(site.url + CHAT, json=ASK).json()
    assert reply["choices"][0]["message"]["content"] == "quick"
    assert time.monotonic() - started < 10
    for _ in range(50):
        assert len(slow.recv(1)) == 1
    received = b""
    while b"[DONE]" not in received:
        received += slow.recv(65536)
    slow.close()
    events = [line for line in received.split(b"\n\n") if b"data: {" in line]
    assert len(events) < 10_000  # of 20,000 tokens: what waited was joined
    text = "".join(
        choice["delta"].get("content") or ""
        for line in events
        for choice in json.loads(line[line.index(b"data: ") + 6 :])["choices"]
    )
    assert tokenizer.decode(long[2:-2]).endswith(text)
    assert len(text) > 80_000
    until(lambda: not site.service.runs)
    gaps = sum(site.service.metrics.inter_token.counts)
    assert gaps == len(long) - 1 + len(short) - 1  # of both answers; tokens that came together count one by one


def test_the_engine_dies_in_mid_stream(site, engine, text_answer):
    text_answer("on and on ")
    engine.pace_s = 0.002
    results = []

    def follow(stream):
        response = httpx.post(site.url + CHAT, json={**ASK, "stream": stream}, timeout=20)
        results.append((stream, response.status_code, response.text))

    threads = [threading.Thread(target=follow, args=(i % 2 == 0,)) for i in range(8)]
    for thread in threads:
        thread.start()
    until(lambda: len(engine.open) == 8 and all(s.made > 3 for s in list(engine.open.values())))
    site.do(lambda: engine.die("the engine was killed by SIGKILL"))
    for thread in threads:
        thread.join(20)
    assert len(results) == 8
    for stream, status, text in results:
        assert "killed by SIGKILL" in text
        if stream:
            assert status == 200
            assert text.endswith("data: [DONE]\n\n")
            assert json.loads(text.split("\n\n")[-3][6:])["error"]["code"] == 503
        else:
            assert status == 503
            assert json.loads(text)["error"]["type"] == "ServiceUnavailable"
    assert httpx.get(site.url + "/health").status_code == 503


def test_a_sequence_that_fails_alone(site, engine, text_answer):
    text_answer("on ")
    engine.pace_s = 0.002
    with httpx.stream("POST", site.url + CHAT, json={**ASK, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        (stream,) = engine.open.values()
        failure = TokenDelta(stream.request.request_id, [], finish=Finish.ERROR, error="NaN in the logits")
        site.do(lambda: stream.push(failure))
        rest = "\n".join(lines)
    assert "NaN in the logits" in rest
    assert rest.strip().endswith("data: [DONE]")
    assert httpx.get(site.url + "/health").status_code == 200


def test_two_thousand_requests_at_once(site, engine, chat_answer):
    chat_answer("", "ok")
    engine.capacity = 300
    engine.pace_s = 0.3
    body = json.dumps(ASK).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    async def one():
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return answer

    async def crowd():
        return await asyncio.wait_for(asyncio.gather(*(one() for _ in range(2000))), 60)

    answers = asyncio.run(crowd())
    good = [a for a in answers if a.startswith(b"HTTP/1.1 200") and b'"content":"ok"' in a]
    refused = [a for a in answers if a.startswith(b"HTTP/1.1 429")]
    assert len(good) + len(refused) == 2000
    assert len(good) >= 300
    assert refused
    assert all(b"retry-after: 2" in a.lower() and b"RateLimitError" in a for a in refused)
    assert engine.open == {}


def test_a_prompt_of_ten_megabytes(site, engine, text_answer):
    text_answer("meanwhile ")
    engine.pace_s = 0.005
    with httpx.stream("POST", site.url + CHAT, json={**ASK, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        text = "ten megabytes " * 750_000
        parts = [{"type": "text", "text": text}]
        for path, body in (
            (CHAT, {"messages": [{"role": "user", "content": text}]}),
            (CHAT, {"messages": [{"role": "user", "content": parts}]}),
            ("/v1/completions", {"prompt": "a" * 10_000_000}),
            ("/v1/completions", {"prompt": [7] * 1_000_000}),
        ):
            refused = httpx.post(site.url + path, json=body, timeout=60)
            assert refused.status_code == 400
            assert "4,096" in refused.json()["error"]["message"]
        too_many = httpx.post(site.url + "/v1/completions", json={"prompt": [7] * 2_000_000}, timeout=60)
        assert "more than 1,100,000 ," in too_many.json()["error"]["message"]
        uncounted = httpx.post(site.url + "/v1/completions", json={"prompt": text}, timeout=60)
        assert "so at least 82,031 tokens" in uncounted.json()["error"]["message"]
        cut = {"messages": [{"role": "user", "content": text}], "truncate_prompt_tokens": 100, "max_tokens": 3}
        assert httpx.post(site.url + CHAT, json=cut, timeout=60).json()["usage"]["prompt_tokens"] == 100
        assert next(line for line in lines if line)
        assert engine.open


def test_the_openai_client(site, engine, chat_answer, text_answer):
    chat_answer("let me see", "the answer is 4")
    with openai.OpenAI(base_url=site.url + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["demo", "alias"]
        messages = [{"role": "user", "content": "2+2?"}]
        reply = client.chat.completions.create(model="demo", messages=messages)
        assert reply.choices[0].message.content == "the answer is 4"
        assert reply.choices[0].message.reasoning_content == "let me see"
        assert reply.usage.completion_tokens_details.reasoning_tokens == 3
        with client.chat.completions.create(
            model="demo", messages=messages, stream=True, stream_options={"include_usage": True}
        ) as stream:
            chunks = list(stream)
        said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert said == "the answer is 4"
        assert chunks[-1].usage.completion_tokens == reply.usage.completion_tokens
        text_answer(" and so on")
        with client.completions.create(model="demo", prompt="x", max_tokens=6, stream=True) as stream:
            assert "".join(chunk.choices[0].text for chunk in stream) == " and so on" * 2
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=messages)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model="demo", messages=messages, temperature=9)
        engine.capacity = 0
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(model="demo", messages=messages)


def test_curl(site, chat_answer):
    chat_answer("", "hi there")
    for stream in (False, True):
        body = json.dumps({**ASK, "stream": stream})
        command = ["curl", "-sSN", "-i", site.url + CHAT, "-H", "Content-Type: application/json", "-d", body]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        assert shown.startswith("HTTP/1.1 200")
        if stream:
            assert shown.strip().endswith("data: [DONE]")
            assert '"content":"hi"' in shown
        else:
            assert '"content":"hi there"' in shown


def test_each_token_is_sent_when_it_comes(site, engine, tokenizer):
    ids = tokenizer.encode_text("one two three")
    gate = threading.Event()

    def answer(_):
        yield from [MODEL, TEXT, ids[0]]
        yield from itertools.takewhile(lambda _: not gate.is_set(), itertools.repeat(ids[1]))
        yield from [END_MESSAGE, END_TURN]

    engine.answer = answer
    engine.pace_s = 0.02
    with httpx.stream("POST", site.url + CHAT, json={**ASK, "stream": True}) as response:
        seen = 0
        for line in response.iter_lines():
            seen += '"content":" two"' in line
            if seen == 3:
                gate.set()  # the answer ends only after three of its tokens have been seen here
    assert seen >= 3
