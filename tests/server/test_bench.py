"""The load generator against a real socket, and its datasets."""

import argparse
import asyncio
import itertools
import json
import random
import socket
import threading
from xml.etree import ElementTree

import pytest

from inkcap.bench.http import Target
from inkcap.bench.measure import CallDelta, Delta, Events, Function, Reply, Sample, told
from inkcap.bench.plot import Panel, cumulative, figure, steps
from inkcap.bench.serve import Conversation, Load, add_flags, drive, load_of, main, quantiles, run
from inkcap.bench.workload import Lengths, Session, Shape, Turn, WorkloadInvalid, sessions, user
from inkcap.chat.tokens import CALL_JSON, END_MESSAGE, END_TURN, MODEL


def shape(requests, prompt=20, output=8, **more):
    return Shape(
        requests=requests, prompt_tokens=Lengths(prompt, prompt), output_tokens=Lengths(output, output), **more
    )


def texts(session):
    return [str(message["content"]) for message in (*session.opening, *(turn.message for turn in session.turns))]


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_figures_of_a_run(site, engine, text_answer, api):
    text_answer(" word")
    engine.pace_s = 0.001
    load = Load(url=site.url, api=api, concurrency=4, warmup=1, shape=shape(10))
    result = asyncio.run(drive(load))
    assert (result["requests"], result["failed"], result["model"]) == (10, 0, "demo")
    assert result["output_tokens"] == 80
    assert result["prompt_tokens"] == sum(len(request.token_ids) for request in engine.requests[1:])
    assert len(engine.requests) == 11
    assert all(request.params.ignore_eos and request.max_tokens == 8 for request in engine.requests)
    assert result["first_token_ms"]["p50"] <= result["request_ms"]["p50"]
    assert 0 < result["chunks"] <= 80
    assert engine.open == {}


def test_fields_of_every_request(site, engine, text_answer):
    text_answer(" word")
    parser = argparse.ArgumentParser()
    add_flags(parser)
    words = ["--url", site.url, "--requests", "3", "--warmup", "0", "--extra-body", '{"presence_penalty": 0.5}']
    assert asyncio.run(drive(load_of(parser.parse_args(words))))["failed"] == 0
    assert [request.params.presence_penalty for request in engine.requests] == [0.5] * 3
    with pytest.raises(SystemExit):
        parser.parse_args(["--extra-body", "[1]"])


def test_an_end_of_turn_does_not_shorten_an_answer(site, engine, tokenizer):
    ids = [*tokenizer.encode_text("a b"), END_TURN]
    engine.answer = lambda _: iter(ids * 100)
    result = asyncio.run(drive(Load(url=site.url, concurrency=1, warmup=0, shape=shape(1, output=30))))
    assert (result["failed"], result["output_tokens"]) == (0, 30)


def test_failures_are_counted_by_reason(site, engine, text_answer):
    text_answer("x")
    engine.capacity = 0
    result = asyncio.run(drive(Load(url=site.url, concurrency=2, warmup=0, shape=shape(5))))
    assert (result["failed"], result["failures"]) == (5, {"status 429: 0 sequences wait already; try again": 5})
    engine.capacity = 100
    engine.pace_s = 0.005
    load = Load(url=site.url, concurrency=2, warmup=0, shape=shape(2, output=1000))
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
    assert json.loads(shown.out)["failures"] == {"status 401: Unauthorized": 3}
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


def test_what_an_error_says():
    assert told(b'{"error":{"message":"no"}}') == ": no"
    assert told(b"<html>") == told(b"") == told(b"\xff") == told(b'{"error":null}') == ""


def test_quantiles():
    assert quantiles([i / 1000 for i in range(1, 101)]) == {"mean": 50.5, "p50": 51.0, "p90": 91.0, "p99": 100.0}
    assert quantiles([]) == {}


def test_lengths():
    assert (Lengths.parse("7"), str(Lengths.parse("7-9"))) == (Lengths(7, 7), "7-9")
    dice = random.Random(0)
    assert {Lengths(7, 9).draw(dice) for _ in range(100)} == {7, 8, 9}
    for wrong in ("", "0", "9-7", "-5", "x", "1-2-3", "1.5"):
        with pytest.raises(WorkloadInvalid, match="no length"):
            Lengths.parse(wrong)


def test_datasets():
    wanted = Shape(requests=50, prompt_tokens=Lengths(5, 9), prefixes=3, prefix_tokens=Lengths(30, 30))
    alone = sessions("random", wanted, 1)
    assert alone == sessions("random", wanted, 1) != sessions("random", wanted, 2)
    assert {len(texts(session)[0].split()) for session in alone} == {5, 6, 7, 8, 9}
    together = sessions("shared", wanted, 1)
    assert len(together) == 50
    assert len({texts(session)[0] for session in together}) == 3
    assert len({texts(session)[1] for session in together}) > 45
    working = sessions("agent", Shape(requests=50, turns=Lengths(2, 4), tool_tokens=Lengths(11, 11)), 1)
    assert sum(len(session.turns) for session in working) == 50
    assert {len(session.turns) for session in working[:-1]} == {2, 3, 4}
    for session in working:
        assert [turn.message["role"] for turn in session.turns] == ["user", *["tool"] * (len(session.turns) - 1)]
        assert all(len(text.split()) == 11 for text in texts(session)[2:])
    arrivals = [session.arrival_s for session in sessions("random", shape(2000), 3, rate=20.0)]
    assert arrivals == sorted(arrivals)
    assert 80 < arrivals[-1] < 120  # about 100 s


def test_agents_grow_by_what_was_answered(site, engine, tokenizer):
    numbers = itertools.count()
    engine.answer = lambda _: itertools.chain(tokenizer.encode_text(f"answer {next(numbers)}"), itertools.repeat(13))
    wanted = shape(6, turns=Lengths(3, 3), prefix_tokens=Lengths(40, 40), prefixes=1, tool_tokens=Lengths(10, 10))
    result = asyncio.run(drive(Load(url=site.url, dataset="agent", concurrency=1, warmup=0, shape=wanted)))
    assert (result["requests"], result["sessions"], result["failed"]) == (6, 2, 0)
    assert result["cached_prompt_tokens"] == 18  # the fake engine says 3 each time
    first, second, third, fresh = (tokenizer.decode(request.token_ids) for request in engine.requests[:4])
    assert "answer 0" in second
    assert all(text in third for text in ("answer 0", "answer 1"))
    assert "answer" not in fresh
    assert second.startswith(first)
    assert third.startswith(second)
    assert fresh[:150] == first[:150]


def test_outputs_of_tools_answer_the_calls_of_the_model():
    turns = [Turn(user("task"), 5), Turn({"role": "tool", "content": "18 degrees"}, 5)]
    conversation = Conversation(Load(url="x"), "m", Session(turns))
    conversation.body(turns[0])
    reply = Reply()
    reply.add(Delta(tool_calls=[CallDelta(0, "a", Function("f", "{")), CallDelta(1, "b", Function("g", "{}"))]))
    reply.add(Delta(tool_calls=[CallDelta(0, None, Function(None, "}"))], reasoning_content="hm"))
    conversation.answered(reply)
    messages = json.loads(conversation.body(turns[1]))["messages"]
    assert messages[1]["reasoning"] == "hm"
    assert [call["function"] for call in messages[1]["tool_calls"]] == [
        {"name": "f", "arguments": "{}"},
        {"name": "g", "arguments": "{}"},
    ]
    assert [(m["role"], m["tool_call_id"], m["content"]) for m in messages[2:]] == [
        ("tool", "a", "18 degrees"),
        ("tool", "b", ""),
    ]


def test_agents_of_a_model_that_calls(site, engine, tokenizer):
    call = [MODEL, *tokenizer.encode_text("f"), CALL_JSON]
    call += [*tokenizer.encode_text('{"name":"f","args":{}}'), END_MESSAGE, END_TURN]
    engine.answer = lambda _: itertools.chain(call, itertools.repeat(END_TURN))
    wanted = shape(2, output=30, turns=Lengths(2, 2))
    result = asyncio.run(drive(Load(url=site.url, dataset="agent", concurrency=1, warmup=0, shape=wanted)))
    assert (result["failed"], result["requests"]) == (0, 2)
    assert "<|message_tool|>f" in tokenizer.decode(engine.requests[1].token_ids)


def test_a_failed_turn_ends_its_session(site, engine, text_answer):
    text_answer("x")
    engine.capacity = 0
    wanted = shape(8, turns=Lengths(4, 4))
    result = asyncio.run(drive(Load(url=site.url, dataset="agent", warmup=0, shape=wanted)))
    assert (result["requests"], result["failed"], result["skipped"]) == (2, 2, 6)


def test_a_trace_is_replayed_by_its_clock(site, engine, text_answer, tokenizer, tmp_path):
    text_answer("x")
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 2400, "input_length": 520, "output_length": 3, "hash_ids": [7, 8]},
        {"timestamp": 2000, "input_length": 515, "output_length": 2, "hash_ids": [7, 9]},
        {"arrival": 2.2, "messages": [{"role": "system", "content": "S"}, user("hi")], "max_tokens": 4},
        {"arrival": 2.3, "prompt": "plain"},
        {"arrival": 9.0, "prompt": "never, it is one too many"},
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    wanted = shape(4, output=5, trace=str(trace), speed=2.0)
    todo = sessions("trace", wanted, 0)
    assert [session.arrival_s for session in todo] == pytest.approx([0.0, 0.1, 0.15, 0.2])
    first, _, _, last = (texts(session)[-1].split() for session in todo)
    assert (len(first), len(last)) == (515, 520)
    assert first[:512] == last[:512]
    assert first[512:] != last[512:515]
    result = asyncio.run(drive(Load(url=site.url, dataset="trace", concurrency=1, warmup=0, shape=wanted)))
    assert (result["failed"], result["requests"], result["output_tokens"]) == (0, 4, 14)
    assert [request.max_tokens for request in engine.requests] == [2, 4, 5, 3]
    assert "S" in tokenizer.decode(engine.requests[1].token_ids)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 1"),
        ("[]", "a line is an object"),
        ('{"timestamp": -1, "prompt": "x"}', "from 0 up"),
        ('{"arrival": true, "prompt": "x"}', "arrival"),
        ('{"input_length": 600, "hash_ids": [1]}', "1 hash_ids stand for less than the 600"),
        ('{"input_length": 0}', "1 or more"),
        ('{"prompt": "x", "max_tokens": 0}', "1 or more"),
        ('{"messages": ["x"]}', "with a role"),
        ("", "no request"),
    ],
)
def test_lines_that_are_no_request(tmp_path, line, told):
    (tmp_path / "t").write_text(line)
    with pytest.raises(WorkloadInvalid, match=told):
        sessions("trace", Shape(trace=str(tmp_path / "t")), 0)


def test_sessions_arrive_whatever_the_server_does(site, engine, text_answer):
    text_answer("x")
    engine.pace_s = 0.02
    load = Load(url=site.url, rate=200.0, concurrency=1, warmup=0, shape=shape(12, output=20))
    done = threading.Thread(target=lambda: results.append(asyncio.run(drive(load))))
    results, most = [], 0
    done.start()
    while done.is_alive():
        most = max(most, len(engine.open))
        done.join(0.005)
    assert results[0]["failed"] == 0
    assert most > 6


def test_files_of_results(site, text_answer, tmp_path, capsys):
    text_answer("x")
    out, svg = tmp_path / "r.json", tmp_path / "r.svg"
    words = ["--url", site.url, "--requests", "6", "--output-tokens", "3-6", "--dataset", "shared", "--api-key", "k<y"]
    words += ["--prefix-tokens", "20", "--output", str(out), "--plot", str(svg), "--quiet"]
    assert main(words) == 0
    content = json.loads(out.read_text())
    assert content["result"] == json.loads(capsys.readouterr().out)
    assert (content["load"]["output_tokens"], content["load"]["dataset"]) == ("3-6", "shared")
    assert "k<y" not in out.read_text()
    assert [entry["failure"] for entry in content["requests"]] == [None] * 6
    assert sum(entry["output_tokens"] for entry in content["requests"]) == content["result"]["output_tokens"]
    root = ElementTree.fromstring(svg.read_text())
    assert len(root.findall("{*}polyline")) == 3
    assert len(root.findall("{*}circle")) == 6
    assert "demo, shared: 6 requests" in svg.read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--dataset", "trace"], "--trace FILE"),
        (["--dataset", "trace", "--trace", "/nowhere"], "/nowhere"),
        (["--dataset", "trace", "--trace", "x", "--rate", "3"], "--rate"),
    ],
)
def test_flags_in_contradiction(words, told, capsys):
    assert main(["--url", "http://127.0.0.1:1", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--prompt-tokens", "9-7"], ["--rate", "0"], ["--concurrency", "0"]])
def test_flags_out_of_range(words, capsys):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert load_of(parser.parse_args([])).shape == Shape()
    with pytest.raises(SystemExit):
        parser.parse_args(words)
    assert words[0] in capsys.readouterr().err


def test_plots():
    assert steps(0.0) == [0.0, 1.0]
    assert steps(1.0) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert steps(73) == [0, 20, 40, 60, 80]
    assert cumulative([]) == []
    points = cumulative(list(range(10_000)))
    assert len(points) < 500
    assert (points[0], points[-1]) == ((0.0, 0.0), (9999, 1.0))
    drawn = figure("a < b & c", [Panel("empty", "x", []), Panel("one", "x", [(2.0, 5.0)], dots=True)])
    root = ElementTree.fromstring(drawn)
    assert root.findtext("{*}text") == "a < b & c"
    (dot,) = root.findall("{*}circle")
    assert float(dot.get("cy")) == 30 + 34  # the largest value is at the top of its axis
