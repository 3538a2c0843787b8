"""The offline API: prompts in every form, results in order, text, chat, streams, and what misuse is told."""

import asyncio
import threading

import pytest
from conftest import config, run
from msgspec.structs import replace

from inkcap import LLM, SamplingParams
from inkcap.base.errors import BadRequest, ConfigInvalid, ContextTooLong, EngineFault, ModelNotFound, NotBuiltYet
from inkcap.models.inkling.demo import DemoShape, write

NO_END = {199_999: -100.0, 200_006: -100.0}  # the demo ends a raw text at once


@pytest.fixture(scope="module")
def bare(checkpoint):
    """A model with a small vocabulary and no tokenizer."""
    with LLM(config(checkpoint), skip_tokenizer_init=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A demo that keeps the chat format."""
    directory = tmp_path_factory.mktemp("talker") / "demo"
    write(directory, shape=DemoShape(hidden=32, layers=2, global_every=2, dense=1, experts=4, max_length=512, shards=1))
    (directory / "generation_config.json").write_text('{"temperature": 0.6, "max_new_tokens": 7}')
    with LLM(directory, dtype="float32", threads=1, cache_memory_bytes=64 << 20, max_num_seqs=8) as llm:
        yield llm


def test_prompts_come_in_every_form(talker):
    hello = talker.tokenizer.encode_text("Hello, world")
    forms = ["Hello, world", {"prompt": "Hello, world"}, {"prompt_token_ids": hello}, hello]
    params = SamplingParams(max_tokens=5, seed=1, logit_bias=NO_END)
    results = talker.generate(forms, params, use_tqdm=False)
    results += [talker.generate(form, params, use_tqdm=False)[0] for form in forms]
    assert len({tuple(result.outputs[0].token_ids) for result in results}) == 1
    assert {tuple(result.prompt_token_ids) for result in results} == {tuple(hello)}
    assert [result.prompt for result in results] == ["Hello, world", "Hello, world", None, None] * 2
    for result in results:
        (output,) = result.outputs
        assert output.text == talker.tokenizer.decode(output.token_ids, skip_special=True)
        assert result.finished
        assert (output.index, output.finish_reason, output.logprobs, output.cumulative_logprob) == (
            0,
            "length",
            None,
            None,
        )
    assert len({result.request_id for result in results}) == 8


def test_results_stand_in_the_order_of_the_prompts(bare):
    params = [SamplingParams(max_tokens=1 + 7 * i % 10, seed=i) for i in range(20)]
    results = bare.generate([[i] for i in range(20)], params, use_tqdm=False)
    assert [result.prompt_token_ids for result in results] == [[i] for i in range(20)]
    assert [len(result.outputs[0].token_ids) for result in results] == [1 + 7 * i % 10 for i in range(20)]
    assert bare.generate([], use_tqdm=False) == []


def test_more_prompts_than_rows_and_waiting_places(checkpoint):
    with LLM(config(checkpoint, rows=2, waiting=1), skip_tokenizer_init=True) as llm:
        assert len(llm.generate([[1, 2]] * 30, SamplingParams(max_tokens=2), use_tqdm=False)) == 30


def test_seeds_of_unseeded_requests_come_from_the_configuration(checkpoint, bare):
    first = bare.generate([[1, 2], [1, 2]], SamplingParams(max_tokens=8), use_tqdm=False)
    assert first[0].outputs[0].token_ids != first[1].outputs[0].token_ids
    with (
        LLM(config(checkpoint), skip_tokenizer_init=True) as one,
        LLM(config(checkpoint), skip_tokenizer_init=True) as two,
    ):
        answers = [
            [result.outputs[0].token_ids for result in llm.generate([[1]] * 3, SamplingParams(), use_tqdm=False)]
            for llm in (one, two)
        ]
    assert answers[0] == answers[1]


def test_logprobs_by_token(bare):
    params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=0, seed=4)
    (result,) = bare.generate([4, 5, 6], params, use_tqdm=False)
    (output,) = result.outputs
    for token, step in zip(output.token_ids, output.logprobs, strict=True):
        assert token in step
        assert 2 <= len(step) <= 3
        ranked = sorted(step.values(), key=lambda entry: -entry.logprob)
        assert [entry.rank for entry in ranked[:2]] == [1, 2]
    assert result.prompt_logprobs[0] is None
    assert [list(step) for step in result.prompt_logprobs[1:]] == [[5], [6]]


def test_stop_ids_and_stop_strings(talker):
    params = SamplingParams(max_tokens=20, seed=3, logit_bias=NO_END)
    (plain,) = talker.generate("Once", params, use_tqdm=False)
    third = plain.outputs[0].token_ids[2]
    (stopped,) = talker.generate("Once", replace(params, stop_token_ids=[third]), use_tqdm=False)
    at = plain.outputs[0].token_ids.index(third)
    assert stopped.outputs[0].token_ids == plain.outputs[0].token_ids[: at + 1]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", third)
    text = plain.outputs[0].text
    word = text[len(text) // 2 : len(text) // 2 + 3]
    (cut,) = talker.generate("Once", replace(params, stop=word), use_tqdm=False)
    assert cut.outputs[0].text == text[: text.index(word)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", word)
    assert len(cut.outputs[0].token_ids) < 20
    assert max(talker.stats().group_usage.values()) == 0.0


def test_defaults_come_from_the_checkpoint(talker):
    assert talker.get_default_sampling_params() == SamplingParams(temperature=0.6, max_tokens=7)
    (result,) = talker.generate("Once", use_tqdm=False)
    assert len(result.outputs[0].token_ids) <= 7


def test_chat_answers(talker):
    messages = [{"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    params = SamplingParams(max_tokens=60, seed=2)
    single, twice = talker.chat(messages, params, use_tqdm=False), talker.chat([messages] * 2, params, use_tqdm=False)
    assert [result.outputs[0] for result in twice] == [single[0].outputs[0]] * 2
    output = single[0].outputs[0]
    assert output.finish_reason in ("stop", "length")
    assert "<|" not in output.text
    assert output.text
    with_tools = talker.chat(messages, params, tools=tools, reasoning_effort="low", use_tqdm=False)
    assert len(with_tools[0].prompt_token_ids) > len(single[0].prompt_token_ids)
    assert talker.tokenizer.decode(single[0].prompt_token_ids).count("Thinking effort level: 0.9") == 1
    assert talker.tokenizer.decode(with_tools[0].prompt_token_ids).count("Thinking effort level: 0.2") == 1


def test_streams_grow_and_end_as_the_whole(talker):
    async def collect(stream):
        return [partial async for partial in stream]

    params = SamplingParams(max_tokens=12, seed=6, n=2, logit_bias=NO_END)
    (whole,) = talker.generate("Once upon", params, use_tqdm=False)
    partials = run(collect(talker.generate_async("Once upon", params)))
    assert [output.token_ids for output in partials[-1].outputs] == [output.token_ids for output in whole.outputs]
    assert [output.text for output in partials[-1].outputs] == [output.text for output in whole.outputs]
    lengths = [sum(len(output.token_ids) for output in partial.outputs) for partial in partials]
    assert lengths == sorted(set(lengths))
    assert lengths[0] < lengths[-1]
    messages = [{"role": "user", "content": "Hi"}]
    params = SamplingParams(max_tokens=30, seed=2)
    (answer,) = talker.chat(messages, params, use_tqdm=False)
    assert run(collect(talker.chat_async(messages, params)))[-1].outputs == answer.outputs


def test_threads_and_tasks_share_one_engine(bare):
    params = SamplingParams(max_tokens=10, seed=8)
    (wanted,) = bare.generate([3, 4], params, use_tqdm=False)
    found = []

    def work():
        found.extend(bare.generate([[3, 4]] * 3, params, use_tqdm=False))

    async def last():
        return [partial async for partial in bare.generate_async([3, 4], params)][-1]

    async def test():
        threads = [asyncio.to_thread(work) for _ in range(3)]
        return await asyncio.gather(*threads, *(last() for _ in range(3)))

    streamed = run(test())[3:]
    assert len(found) == 9
    assert [result.outputs for result in found + streamed] == [wanted.outputs] * 12


@pytest.mark.parametrize(
    ("prompts", "params", "kind", "message"),
    [
        (b"bytes", None, BadRequest, "prompts is a bytes"),
        (17, None, BadRequest, "prompts is a int"),
        ([None], None, BadRequest, "prompt 0 is a NoneType"),
        ([[1], {"tokens": [1]}], None, BadRequest, "prompt 1 has the unknown key 'tokens'"),
        ([{}], None, BadRequest, "prompt 0 has neither"),
        ([{"prompt": 3}], None, BadRequest, "prompt 0 has a int as 'prompt'"),
        ([{"prompt_token_ids": [1], "multi_modal_data": {}}], None, NotBuiltYet, "images and audio"),
        (["text"], None, BadRequest, "without a tokenizer"),
        ([[1], []], None, BadRequest, "the prompt is empty"),
        ([[1, 500]], None, BadRequest, "prompt token 1 is 500"),
        ([[1] * 600], None, ContextTooLong, "600 tokens"),
        ([[1]], {"temperature": 1}, BadRequest, "sampling_params is a dict"),
        ([[1]], [SamplingParams()] * 2, BadRequest, "2 sampling_params for 1 prompts"),
        ([[1]], [None], BadRequest, r"sampling_params\[0\] is a NoneType"),
        ([[1]], SamplingParams(top_p=0.0), BadRequest, "top_p"),
        ([[1]], SamplingParams(stop="x"), BadRequest, "stop strings need a tokenizer"),
    ],
)
def test_misuse_is_told_and_nothing_runs(bare, prompts, params, kind, message):
    before = bare.stats().steps
    with pytest.raises(kind, match=message):
        bare.generate(prompts, params, use_tqdm=False)
    assert bare.stats().steps == before


def test_chat_misuse(bare, talker):
    with pytest.raises(BadRequest, match="runs without one"):
        bare.chat([{"role": "user", "content": "Hi"}])
    with pytest.raises(BadRequest, match="messages"):
        talker.chat("Hi")
    with pytest.raises(BadRequest, match="empty"):
        talker.chat([])


def test_setup_errors_are_raised_by_the_constructor(checkpoint, tmp_path):
    with pytest.raises(ModelNotFound, match="nowhere"):
        LLM(tmp_path / "nowhere")
    with pytest.raises(ConfigInvalid, match="dtype"):
        LLM(checkpoint, dtype="int4")
    with pytest.raises(ConfigInvalid, match="fp8_e5m2"):
        LLM(checkpoint, kv_cache_dtype="fp8_e5m2")
    with pytest.raises(ConfigInvalid, match="gpu_utilization"):
        LLM(checkpoint, gpu_memory_utilization=1.5)


def test_an_eight_bit_cache_holds_more_and_deterministic_answers_have_the_same_bits(checkpoint):
    options = {"dtype": "float32", "threads": 1, "cache_memory_bytes": 16 << 20, "skip_tokenizer_init": True}
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=1)
    with LLM(checkpoint, kv_cache_dtype="fp8", deterministic=True, **options) as llm:
        blocks = llm.info.cache_groups["full"]
        beside, *_ = llm.generate([[1, 2, 3]] + [[n] * 30 for n in range(3)], params, use_tqdm=False)
        (alone,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    assert alone.outputs[0].logprobs == beside.outputs[0].logprobs
    with LLM(checkpoint, **options) as llm:
        assert blocks > 1.5 * llm.info.cache_groups["full"]


def test_a_closed_model_says_so(checkpoint):
    llm = LLM(config(checkpoint), skip_tokenizer_init=True)
    caught = []

    def work():
        try:
            llm.generate([1], SamplingParams(max_tokens=500), use_tqdm=False)
        except EngineFault as fault:
            caught.append(fault)

    thread = threading.Thread(target=work)
    thread.start()
    while not llm.stats().running:
        assert thread.is_alive()
    llm.close()
    llm.close()
    thread.join(60)
    assert "closed" in str(caught[0])
    with pytest.raises(EngineFault, match="closed"):
        llm.generate([1], use_tqdm=False)
    with pytest.raises(EngineFault, match="closed"):
        llm.stats()


def test_the_bar_counts_prompts(bare, capfd):
    bare.generate([[1], [2]], SamplingParams(max_tokens=1))
    assert "2/2" in capfd.readouterr().err
