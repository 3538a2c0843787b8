"""The server as a process: loading, draining, cutting off, and the death of its engine. The model is a stand-in."""

import asyncio
import json
import os
import re
import signal
import socket
import time
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from inkcap.base.config import EngineConfig, ModelConfig, ServerConfig
from inkcap.base.errors import CheckpointMismatch, CheckpointUnreadable, ConfigInvalid
from inkcap.server.run import address, curl_line, listen, serve_checkpoint
from tests.server.conftest import Follower, Process, until

PROGRAM = str(Path(__file__).parents[2] / "bench" / "no_model.py")
LONG = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 30_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A directory with a tokenizer and no weights."""
    folder = tmp_path_factory.mktemp("checkpoint")
    spec = find_spec("tml_renderers")
    (folder / "tiktoken").mkdir()
    ranks = Path(spec.origin).parent / "data" / "o200k_base.tiktoken"
    (folder / "tiktoken" / "tokenizer.model").symlink_to(ranks)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def start(checkpoint):
    running = []

    def begin(*flags):
        running.append(Process([PROGRAM, str(checkpoint), *flags]))
        return running[-1]

    yield begin
    for server in running:
        server.close()


def test_a_drain_lets_open_requests_finish(start):
    server = start("--drain-seconds", "30")
    assert httpx.get(server.url + "/health").status_code in (503, 200)  # it answers from the first moment
    server.ready()
    follower = Follower(server.url, {**LONG, "max_tokens": 40, "stream": True})
    until(lambda: follower.text.count("content") > 3)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: "draining" in server.log)
    health = httpx.get(server.url + "/health")
    assert (health.status_code, health.json()) == (503, {"status": "draining"})
    refused = httpx.post(server.url + "/v1/chat/completions", json=LONG)
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    text = follower.whole()
    assert '"finish_reason":"length"' in text
    assert text.endswith("data: [DONE]\n\n")
    assert server.ended() == 0
    assert "1 requests finished, 0 cut off" in server.log


@pytest.mark.parametrize("hurried", [False, True])
def test_what_does_not_finish_is_cut_off(start, hurried):
    server = start("--drain-seconds", "60" if hurried else "0.2").ready()
    stream = Follower(server.url, {**LONG, "stream": True})
    until(lambda: stream.text.count("content") > 3)
    whole = Follower(server.url, LONG)
    until(lambda: httpx.get(server.url + "/load").json()["server_load"] == 2)
    server.process.send_signal(signal.SIGINT)
    if hurried:
        until(lambda: "draining" in server.log)
        server.process.send_signal(signal.SIGINT)
    last, done = stream.whole().split("\n\n")[-3:-1]
    assert "cut off" in json.loads(last[6:])["error"]["message"]
    assert done == "data: [DONE]"
    assert "cut off" in whole.whole()
    assert whole.status == 503
    assert server.ended() == 0
    assert re.search(r"0 requests finished, 2 cut off: \w+", server.log)


def test_kill_9_of_the_engine(start):
    server = start().ready()
    stream, whole = Follower(server.url, {**LONG, "stream": True}), Follower(server.url, LONG)
    until(lambda: stream.text.count("content") > 3)
    until(lambda: httpx.get(server.url + "/load").json()["server_load"] == 2)
    os.kill(server.engine(), signal.SIGKILL)
    assert "SIGKILL" in stream.whole()
    assert stream.text.endswith("data: [DONE]\n\n")
    assert "SIGKILL" in whole.whole()
    assert whole.status == 503
    health = httpx.get(server.url + "/health")
    assert (health.status_code, health.json()) == (503, {"status": "dead"})
    assert server.ended() == 1
    assert "exit code 1" in server.log


def configured(path, **server):
    return EngineConfig(model=ModelConfig(path=str(path)), server=ServerConfig(port=0, **server))


def test_an_engine_that_cannot_start(checkpoint, tmp_path):
    program = tmp_path / "engine.py"
    program.write_text(
        "import sys\n"
        "from inkcap.base.errors import CheckpointMismatch\n"
        "from inkcap.engine.serving import serve_core\n"
        "def build(config, port):\n"
        "    raise CheckpointMismatch('the checkpoint lacks 3 tensors')\n"
        "sys.exit(serve_core(build))\n"
    )
    started = time.monotonic()
    with pytest.raises(CheckpointMismatch, match="lacks 3 tensors"):
        asyncio.run(serve_checkpoint(configured(checkpoint), program=(str(program),)))
    assert time.monotonic() - started < 20


def test_a_checkpoint_without_a_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointUnreadable, match="no tokenizer"):
        asyncio.run(serve_checkpoint(configured(tmp_path)))


def test_addresses():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigInvalid, match=f"port {port}"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigInvalid, match="no address"):
        listen("no.such.host.invalid", 0)
    with listen("127.0.0.1", 0) as listener:
        assert address(listener) == f"127.0.0.1:{listener.getsockname()[1]}"
        line = curl_line(configured("m", api_key="k"), listener, "demo")
        assert line.startswith(f"curl -N http://{address(listener)}/v1/chat/completions -H 'Authorization")
