"""Rules and the engine's promise: the same answer in company, in chunks, after a prefix hit and after preemption."""

import json

import pytest

from inkcap import LLM, SamplingParams
from inkcap.models.registry import write_demo

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
ASKED = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    "thinking_token_budget": 6,
}
WORDS = "Tell me a name and a number, please, and think about it before you do. " * 9
MESSAGES = [[{"role": "user", "content": f"{i} {WORDS}"}] for i in range(4)]
PARAMS = [SamplingParams(max_tokens=44, temperature=1.5, seed=40 + i, logprobs=1) for i in range(4)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "demo"
    write_demo(folder, family="inkling", seed=0)
    return str(folder)


def answers(demo, messages, params, **options):
    with LLM(demo, dtype="float32", threads=1, max_model_len=512, **options) as llm:
        first = llm.chat(messages, params, **ASKED, use_tqdm=False)
        again = llm.chat(messages, params, **ASKED, use_tqdm=False)
        return first, again, llm.stats()


@pytest.fixture(scope="module")
def alone(demo):
    """Each answer on its own."""
    found = []
    with LLM(demo, dtype="float32", threads=1, max_model_len=512, max_num_seqs=1, enable_prefix_caching=False) as llm:
        for messages, params in zip(MESSAGES, PARAMS, strict=True):
            found += llm.chat(messages, params, **ASKED, use_tqdm=False)
    return [result.outputs[0] for result in found]


def same(results, alone):
    for result, wanted in zip(results, alone, strict=True):
        output = result.outputs[0]
        assert output.token_ids == wanted.token_ids
        assert (output.text, output.reasoning, output.finish_reason) == (
            wanted.text,
            wanted.reasoning,
            wanted.finish_reason,
        )
        assert len(output.logprobs) == len(output.token_ids)


def test_answers_hold_and_have_log_probabilities(alone):
    assert any(output.finish_reason == "stop" for output in alone)
    for output in alone:
        if output.finish_reason == "stop":
            assert set(json.loads(output.text)) == {"name", "n"}


def test_in_company_in_chunks_and_after_a_prefix_hit(demo, alone):
    first, again, stats = answers(demo, MESSAGES, PARAMS, max_num_seqs=4, max_num_batched_tokens=48)
    same(first, alone)
    same(again, alone)
    assert all(result.num_cached_tokens >= 64 for result in again)
    assert stats.running == 0


def test_after_preemption(demo, alone):
    squeezed = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "cache_memory_bytes": TIGHT}
    first, _, stats = answers(demo, MESSAGES, PARAMS, **squeezed)
    assert stats.preemptions > 0
    same(first, alone)


TIGHT = 3_550_000  # bytes: three rows of three blocks fit, until they need a fourth


def test_each_of_n_is_held(demo):
    params = SamplingParams(max_tokens=44, temperature=1.5, seed=3, n=3)
    with LLM(demo, dtype="float32", threads=1, max_model_len=512, max_num_seqs=3) as llm:
        (result,) = llm.chat(MESSAGES[0], params, **ASKED, use_tqdm=False)
    texts = [output.text for output in result.outputs if output.finish_reason == "stop"]
    assert len(set(texts)) == len(texts) > 0
    for text in texts:
        assert set(json.loads(text)) == {"name", "n"}
