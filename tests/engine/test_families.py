"""Families and formats from demo checkpoint to answers: continued prompts, chat, reference numerics, and a server."""

from functools import cache

import httpx
import pytest

from inkcap import LLM, SamplingParams
from inkcap.__main__ import main
from inkcap.models.inkling.demo import DemoShape, write
from tests.server.conftest import Process

FORMATS = {"inkling2": ("bf16", "mxfp8"), "inkling2-mini": ("bf16", "nvfp4")}  # mixed: in the other tests
SMALL = ("--threads", "1", "--cache-memory", "64MiB", "--max-num-seqs", "4")
PROMPT = "The quick brown fox"
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Where the demo of a family and format is, written when first asked for."""
    root = tmp_path_factory.mktemp("families")

    @cache
    def place(family, form):
        words = ["demo-checkpoint", str(root / f"{family}-{form}"), "--family", family, "--format", form]
        assert main(words) == 0
        return words[1]

    return place


@pytest.mark.parametrize("family", FORMATS)
def test_each_format_answers_prompts_and_messages(demo, family):
    said = {}
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    for form in FORMATS[family]:
        with LLM(demo(family, form), threads=1, cache_memory_bytes=64 << 20, max_num_seqs=4) as llm:
            (continued,) = llm.generate(PROMPT, params, use_tqdm=False)
            (answer,) = llm.chat(MESSAGES, params, use_tqdm=False)
        for output in (continued.outputs[0], answer.outputs[0]):
            assert output.finish_reason in ("stop", "length")
        assert len(continued.outputs[0].token_ids) == 6
        assert answer.outputs[0].text
        said[form] = tuple(continued.outputs[0].token_ids)
    assert len(set(said.values())) > 1  # the formats are read: rounding moves some choice


def test_numerics_reach_the_model(demo, tmp_path, capsys):
    words = ["generate", demo("inkling2", "mixed"), PROMPT, *SMALL, "--max-tokens", "12", "--temperature", "0"]
    printed = []
    for numerics in ("w4a16", "reference"):
        assert main([*words, "--chat", "--numerics", numerics]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] != printed[1]
    assert main([*words, "--numerics", "w8a8"]) == 2
    assert "model.numerics is 'w8a8'; it must be w4a16 or reference" in capsys.readouterr().err
    write(tmp_path / "first", shape=DemoShape(vocabulary=90, padded_vocabulary=96))
    assert main(["plan", str(tmp_path / "first"), "--numerics", "reference"]) == 0
    assert "numerics" in capsys.readouterr().out


def test_a_looped_model_in_both_formats_and_reference_numerics_is_served(demo):
    path = demo("inkling2-mini", "mixed")
    process = Process(["-m", "inkcap", "serve", path, *SMALL, "--numerics", "reference"])
    try:
        server = process.ready()
        body = {"max_tokens": 4, "temperature": 0}
        text = httpx.post(
            server.url + "/v1/completions", json={**body, "prompt": PROMPT, "ignore_eos": True}, timeout=60
        ).json()
        chat = httpx.post(server.url + "/v1/chat/completions", json={**body, "messages": MESSAGES}, timeout=60).json()
        assert text["usage"]["completion_tokens"] == 4
        assert chat["choices"][0]["message"]["content"]
    finally:
        process.close()
