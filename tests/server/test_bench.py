"""The load generator against a real socket."""

import argparse
import asyncio
import json
import random
import socket
import threading

import pytest

from inkcap.bench.http import Target
from inkcap.bench.serve import Events, Load, Sample, add_flags, drive, main, quantiles, request_body, run
from inkcap.chat.tokens import END_TURN


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_figures_of_a_run(site, engine, text_answer, api):
    text_answer(" word")
    engine.pace_s = 0.001
    load = Load(url=site.url, api=api, concurrency=4, requests=10, warmup=1, prompt_tokens=20, output_tokens=8)
    result = asyncio.run(drive(load))
    assert (result["requests"], result["failed"], result["model"]) == (10, 0, "demo")
    assert result["output_tokens"] == 80
    assert result["prompt_tokens"] == sum(len(request.token_ids) for request in engine.requests[1:])
    assert len(engine.requests) == 11
    assert all(request.params.ignore_eos and request.max_tokens == 8 for request in engine.requests)
    assert result["first_token_ms"]["p50"] <= result["request_ms"]["p50"]
    assert 0 < result["chunks"] <= 80
    assert engine.open == {}


def test_an_end_of_turn_does_not_shorten_an_answer(site, engine, tokenizer):
    ids = [*tokenizer.encode_text("a b"), END_TURN]
    engine.answer = lambda _: iter(ids * 100)
    result = asyncio.run(drive(Load(url=site.url, concurrency=1, requests=1, warmup=0, output_tokens=30)))
    assert (result["failed"], result["output_tokens"]) == (0, 30)


def test_failures_are_counted_by_reason(site, engine, text_answer):
    text_answer("x")
    engine.capacity = 0
    result = asyncio.run(drive(Load(url=site.url, concurrency=2, requests=5, warmup=0)))
    assert (result["failed"], result["failures"]) == (5, {"status 429": 5})
    engine.capacity = 100
    engine.pace_s = 0.005
    load = Load(url=site.url, concurrency=2, requests=2, warmup=0, output_tokens=1000)
    stopper = threading.Timer(0.3, lambda: site.do(lambda: engine.die("it was killed")))
    stopper.start()
    result = asyncio.run(drive(load))
    stopper.join()
    assert result["failed"] == 2
    assert len(result["failures"]) == 1
    assert "it was killed" in next(iter(result["failures"]))


@pytest.mark.parametrize("settings", [{"api_key": "k"}])
def test_command_line(site, text_answer, capsys, settings):
    text_answer("x")
    words = ["--url", site.url, "--requests", "3", "--concurrency", "2", "--output-tokens", "4"]
    assert main([*words, "--api-key", "k"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["output_tokens"] == 12
    assert "first token" in shown.err
    assert main([*words, "--api-key", "wrong", "--model", "demo", "--quiet"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["failures"] == {"status 401": 3}
    assert shown.err == ""
    assert main([*words, "--api-key", "wrong"]) == 2
    assert "401" in capsys.readouterr().err


def test_no_server(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert run(parser.parse_args(["--url", f"http://127.0.0.1:{port}"])) == 2
    assert "inkcap bench serve:" in capsys.readouterr().err


def test_targets():
    assert Target.parse("http://host:1/v1") == Target.parse("host:1") == Target("host", 1, False, "")
    assert Target.parse("https://host/models/v1/") == Target("host", 443, True, "/models")
    with pytest.raises(ValueError, match="no address"):
        Target.parse("ftp://host")


def test_events_may_be_cut_anywhere():
    body = (
        b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
        b": a comment\n\n"
        b'data: {"choices":[{"delta":{"reasoning":"a"}}]}\n\n'
        b'data: {"choices":[{"delta":{"content":"b"}}]}\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
    )
    for cut in range(len(body)):
        sample = Sample()
        events = Events(sample, 0.0)
        events.feed(body[:cut], 1.0)
        events.feed(body[cut:], 2.0)
        assert events.ended
        assert (sample.prompt_tokens, sample.output_tokens, sample.failure) == (3, 2, None)
        assert 1 <= sample.chunks <= 2
        assert sample.last == 2.0 or cut > body.index(b'"b"')


def test_what_is_no_chunk_is_a_failure():
    sample = Sample()
    Events(sample, 0.0).feed(b"data: {broken\n\n", 1.0)
    assert "no chunk" in sample.failure


def test_bodies_and_quantiles():
    load = Load(url="x", prompt_tokens=5)
    draws = [json.loads(request_body(load, "m", random.Random(1))) for _ in range(2)]
    assert draws[0] == draws[1]
    assert len(draws[0]["messages"][0]["content"].split()) == 5
    assert quantiles([i / 1000 for i in range(1, 101)]) == {"mean": 50.5, "p50": 51.0, "p90": 91.0, "p99": 100.0}
