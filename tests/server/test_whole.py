"""`inkcap serve` with a real model: over HTTP a request gives the tokens it gives offline, whoever else is there."""

import os
import random
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from inkcap import LLM, SamplingParams
from inkcap.models.registry import write_demo
from tests.server.conftest import Follower, Process, until

FLAGS = ("--dtype", "float32", "--threads", "1", "--keep-every", "64", "--max-num-seqs", "8", "--max-model-len", "1024")
draw = random.Random(3)
SHARED = [draw.randrange(100_000) for _ in range(70)]
PROMPTS = [SHARED, [*SHARED, 5, 6, 7], [9], [draw.randrange(100_000) for _ in range(90)]]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "demo"
    write_demo(folder, family="inkling", seed=0)
    return folder


@pytest.fixture(scope="module")
def server(demo):
    process = Process(["-m", "inkcap", "serve", str(demo), *FLAGS])
    yield process.ready()
    process.close()


@pytest.fixture(scope="module")
def offline(demo):
    """Tokens and log-probabilities of each prompt, greedy and sampled, each on its own: rounding that company adds on
    both sides could pass the bound together."""
    with LLM(str(demo), dtype="float32", threads=1, max_model_len=1024, max_num_seqs=1) as llm:
        both = [SamplingParams(max_tokens=10, temperature=0, logprobs=0)]
        both.append(SamplingParams(max_tokens=10, temperature=0.8, top_p=0.9, seed=5, logprobs=0))
        return [[answer.outputs[0] for answer in llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params)]
                for params in both]  # fmt: skip


def complete(url, prompt, sampled):
    body = {"prompt": prompt, "max_tokens": 10, "temperature": 0, "logprobs": 0, "return_token_ids": True}
    if sampled:
        body |= {"temperature": 0.8, "top_p": 0.9, "seed": 5}
    return httpx.post(url + "/v1/completions", json=body, timeout=60).json()


def test_http_gives_the_tokens_of_offline_use(server, offline):
    work = [(index, sampled) for sampled in (0, 1) for index in range(len(PROMPTS))]
    with ThreadPoolExecutor(8) as pool:  # all at once, then all again after prefix hits
        replies = [list(pool.map(lambda w: complete(server.url, PROMPTS[w[0]], w[1]), work)) for _ in range(2)]
    for again, round_ in enumerate(replies):
        for (index, sampled), reply in zip(work, round_, strict=True):
            (choice,), wanted = reply["choices"], offline[sampled][index]
            assert choice["token_ids"] == wanted.token_ids
            assert choice["text"] == wanted.text
            found = choice["logprobs"]["token_logprobs"]
            expected = [step[token].logprob for step, token in zip(wanted.logprobs, wanted.token_ids, strict=True)]
            assert found == pytest.approx(expected, abs=1e-5)
            if again and index < 2:
                assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


def test_the_openai_client_chats_with_it(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        asked = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "seed": 1, "max_tokens": 12}
        reply = client.chat.completions.create(**asked)
        with client.chat.completions.create(**asked, stream=True) as stream:
            chunks = list(stream)
    message = reply.choices[0].message
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == (message.content or "")
    assert reply.usage.completion_tokens <= 12
    assert chunks[-1].choices[0].finish_reason == reply.choices[0].finish_reason


def test_leavers_leave_no_block_behind_and_kill_9_ends_it(server):
    def gauge(name):
        text = httpx.get(server.url + "/metrics").text
        return float(re.search(rf"^vllm:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)[1])

    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 900, "stream": True, "ignore_eos": True}
    for _ in range(20):
        with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=60) as response:
            next(response.iter_raw())
    until(lambda: gauge("num_requests_running") == 0 and gauge("num_requests_waiting") == 0)
    assert gauge("kv_cache_usage_perc") == 0

    follower = Follower(server.url, body)
    until(lambda: gauge("num_requests_running") == 1)
    os.kill(server.engine(), signal.SIGKILL)
    assert "SIGKILL" in follower.whole()
    assert server.ended() == 1
