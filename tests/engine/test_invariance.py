"""The promise: a request gives the same tokens whatever the chunking, company, cache, preemption, process or ranks.

Real model, float32. Tokens are compared exactly, log-probabilities within a bound, in deterministic mode to the bit.
Prompts and answers cross the window (16), the extent of the relative bias (24), the floor of the log scaling (32),
blocks (64) and kept boundaries (64).
"""

import asyncio
import random
from dataclasses import dataclass
from dataclasses import replace as replaced
from functools import partial

import pytest
from conftest import config, run, settled
from msgspec.structs import replace

from inkcap import LLM, SamplingParams
from inkcap.base.request import Finish
from inkcap.engine.client import EngineClient
from inkcap.engine.requests import child_seed, expand
from inkcap.models.inkling2.demo import DemoShape, write


@dataclass(frozen=True)
class Family:
    """A model, and where it runs."""

    loop: bool
    memory_bytes: int  # of cache in which four rows do not have the room they want
    tolerance: float  # of log-probabilities
    deterministic: bool = False
    gpu: bool = False  # then rows are few, so that little is captured


FAMILIES = {
    "inkling": Family(False, 575_000, 1e-5),
    # Has every kind of layer of inkling2, and the loop, which passes rounding on from pass to pass. 1e-5 cannot be had
    # in fp32: with all else in float64 (where whole prompts and single tokens agree to 5e-14), rounding nothing but the
    # embeddings moves log-probabilities by up to 6e-6, and fp32 runs are 2.5e-5 to 3.5e-5 off, exact products or not.
    "inkling2-mini": Family(True, 900_000, 1e-4),
    "inkling-deterministic": Family(False, 575_000, 0.0, deterministic=True),
    "inkling-deterministic-gpu": Family(False, 290_000, 0.0, deterministic=True, gpu=True),
    "inkling2-mini-deterministic-gpu": Family(True, 455_000, 0.0, deterministic=True, gpu=True),
}
MARKED = [pytest.param(name, marks=[pytest.mark.gpu] if family.gpu else []) for name, family in FAMILIES.items()]
ANSWER = 24  # tokens
ids = random.Random(7)
SHARED = [ids.randrange(500) for _ in range(70)]  # longer than one kept boundary


def params(**more):
    return SamplingParams(max_tokens=ANSWER, logprobs=2, **more)


REQUESTS = [
    (SHARED, params(temperature=0)),
    ([*SHARED, 1, 2, 3], params(seed=11)),
    ([*SHARED[:64], *SHARED[:20]], params(seed=12, temperature=0.7, top_p=0.9, top_k=50)),
    ([9], params(seed=13, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2)),
    ([ids.randrange(500) for _ in range(40)], params(seed=14, min_p=0.02, logit_bias={5: 3.0}, min_tokens=4)),
    ([ids.randrange(500) for _ in range(130)], params(seed=15, temperature=1.5, prompt_logprobs=1)),
]


def numbers(logprobs):
    return [sorted((token, entry.logprob) for token, entry in step.items()) for step in logprobs or [] if step]


def same(found, wanted, tolerance):
    """Compare two continuations of one request."""
    assert found.token_ids == wanted.token_ids
    assert found.finish_reason == wanted.finish_reason
    compare(numbers(found.logprobs), numbers(wanted.logprobs), tolerance)


def compare(found, wanted, tolerance):
    assert len(found) == len(wanted)
    for step, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert [token for token, _ in mine] == [token for token, _ in theirs], f"alternatives at {step}"
        for (_, left), (_, right) in zip(mine, theirs, strict=True):
            assert abs(left - right) <= tolerance, f"log-probability at {step}: {left} and {right}"


def offline(settings, **how):
    return LLM(settings(**how), skip_tokenizer_init=True)


def ask(llm, requests=REQUESTS):
    prompts, wishes = [prompt for prompt, _ in requests], [wish for _, wish in requests]
    return llm.generate(prompts, wishes, use_tqdm=False)


@pytest.fixture(scope="module", params=MARKED)
def family(request):
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def tolerance(family):
    """How far log-probabilities may be apart."""
    return family.tolerance


@pytest.fixture(scope="module")
def settings(family, checkpoint, tmp_path_factory):
    """Configurations of the small model that all tests here use, or of one of the same size that has a loop."""
    how = {"deterministic": family.deterministic} | ({"device": "cuda", "rows": 8} if family.gpu else {})
    if not family.loop:
        return partial(config, checkpoint, **how)
    shape = DemoShape(
        vocabulary=500,
        padded_vocabulary=512,
        hidden=32,
        layers=6,
        full_every=2,
        block=2,
        head_dim=8,
        extent=24,
        floor=32,
        expert_width=16,
        max_length=512,
        shards=1,
        loop=(2, 4),
        passes=2,
    )
    directory = tmp_path_factory.mktemp("loop") / "demo"
    write(directory, seed=1, shape=shape)
    return partial(config, directory, **how)


@pytest.fixture(scope="module")
def alone(settings):
    """Each request on its own, whole prompt in one chunk, nothing cached."""
    with offline(settings, prefix=False) as llm:
        results = [ask(llm, [request])[0] for request in REQUESTS]
    assert len({tuple(result.outputs[0].token_ids) for result in results}) == len(REQUESTS)
    return results


def check(results, alone, tolerance):
    for found, wanted in zip(results, alone, strict=True):
        same(found.outputs[0], wanted.outputs[0], tolerance)
        compare(numbers(found.prompt_logprobs), numbers(wanted.prompt_logprobs), tolerance)


def test_what_is_compared_is_all_there(alone):
    for (prompt, wish), result in zip(REQUESTS, alone, strict=True):
        (output,) = result.outputs
        assert len(output.token_ids) == len(output.logprobs) == ANSWER
        assert output.finish_reason == "length"
        assert output.cumulative_logprob == pytest.approx(
            sum(step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True))
        )
        if wish.prompt_logprobs is not None:
            assert len(result.prompt_logprobs) == len(prompt)
            assert result.prompt_logprobs[0] is None


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_in_chunks_and_in_company(settings, alone, tolerance, chunk):
    with offline(settings, chunk=chunk, step_tokens=3 * chunk + 5, prefix=False) as llm:
        check(ask(llm), alone, tolerance)
        assert llm.stats().running == 0


def test_in_company_of_many(settings, alone, tolerance):
    crowd = [([i, i + 1, *SHARED[: i % 50]], params(seed=100 + i)) for i in range(20)]
    with offline(settings, rows=9, step_tokens=48, chunk=33) as llm:
        results = ask(llm, [*crowd[:10], *REQUESTS, *crowd[10:]])
        check(results[10:16], alone, tolerance)


def test_after_a_prefix_hit(settings, alone, tolerance):
    with offline(settings) as llm:
        check([ask(llm, [request])[0] for request in REQUESTS], alone, tolerance)
        again = [ask(llm, [request])[0] for request in REQUESTS]
        check(again, alone, tolerance)
        cached = [result.num_cached_tokens for result in again]
        assert cached[0] >= 64
        assert cached[1] >= 64
        check(ask(llm), alone, tolerance)


def test_after_preemption(family, settings, alone, tolerance):
    # penalties: what was generated before a preemption must not count as prompt after it
    wish = SamplingParams(max_tokens=208, logprobs=2, frequency_penalty=0.4, presence_penalty=0.4)
    with offline(settings, memory_bytes=family.memory_bytes, rows=4, step_tokens=64, chunk=64) as llm:
        fill = [([i], replace(wish, seed=200 + i)) for i in range(4)]  # let in for little, they grow to four blocks
        results = ask(llm, [*REQUESTS, *fill])
        assert llm.stats().preemptions > 0
        check(results[: len(REQUESTS)], alone, tolerance)
    with offline(settings, prefix=False) as llm:  # the youngest, which was the first to go
        same(results[-1].outputs[0], ask(llm, [fill[-1]])[0].outputs[0], tolerance)


def test_beside_an_abort(settings, alone, tolerance):
    async def test(llm):
        victims = [llm.generate_async([7, *SHARED[:i]], params(seed=300 + i)) for i in (5, 40, 69)]
        for victim in victims:
            await anext(victim)
        kept = [asyncio.ensure_future(last(llm, request)) for request in REQUESTS]
        for victim in victims:
            await anext(victim)
            await victim.aclose()
        return await asyncio.gather(*kept)

    async def last(llm, request):
        found = None
        async for some in llm.generate_async(*request):
            assert found is None or len(some.outputs[0].token_ids) > len(found.outputs[0].token_ids)
            found = some
        assert found.finished
        return found

    with offline(settings, step_tokens=40, chunk=16) as llm:
        check(run(test(llm)), alone, tolerance)
        stats = llm.stats()
        assert stats.finished == {"length": len(REQUESTS), "abort": 3}
        assert max(stats.group_usage.values()) == 0.0


def test_each_of_n(settings, alone, tolerance):
    prompt, wish = REQUESTS[1]
    several = SamplingParams(max_tokens=ANSWER, logprobs=2, seed=11, n=3)
    with offline(settings) as llm:
        (result,) = ask(llm, [(prompt, several)])
        assert [output.index for output in result.outputs] == [0, 1, 2]
        same(result.outputs[0], alone[1].outputs[0], tolerance)
        for index in (1, 2):
            (single,) = ask(llm, [(prompt, params(seed=child_seed(wish.seed, index)))])
            same(result.outputs[index], single.outputs[0], tolerance)
            assert result.outputs[index].token_ids != result.outputs[0].token_ids


def through_process(settings):
    """Tokens, finish and log-probabilities of all requests, side by side, from an engine process."""

    async def one(client, info, number):
        prompt, wish = REQUESTS[number]
        (request,) = expand(prompt, wish, info=info, request_id=f"r{number}", draw_seed=lambda: 0)
        tokens, logprobs, finish = [], [], None
        async for part in client.submit(request):
            for delta in part:
                tokens += delta.tokens
                logprobs += delta.logprobs or []
                finish = delta.finish
        return tokens, logprobs, finish

    async def test():
        client = await EngineClient.start(settings)
        info = await client.ready()
        results = await asyncio.gather(*(one(client, info, number) for number in range(len(REQUESTS))))
        stats = await settled(client)
        await client.close()
        assert max(stats.group_usage.values()) == 0.0
        return results

    return run(test())


def test_through_a_process_on_one_rank_and_on_two(family, settings, alone, tolerance):
    for tp in (1,) if family.gpu else (1, 2):
        results = through_process(settings(tp=tp, chunk=16, step_tokens=64))
        same_through_process(results, alone, tolerance if tp == 1 else max(tolerance, 1e-5))  # other sums


def same_through_process(results, alone, tolerance):
    for (tokens, logprobs, finish), wanted in zip(results, alone, strict=True):
        output = wanted.outputs[0]
        assert tokens == output.token_ids
        assert finish is Finish.LENGTH
        found = [sorted(set(zip(entry.token_ids, entry.logprobs, strict=True))) for entry in logprobs]
        compare(found, numbers(output.logprobs), tolerance)


def test_with_prefixes_kept_at_other_places(settings, alone, tolerance):
    kept = settings()
    kept = replaced(kept, cache=replaced(kept.cache, keep_every=128))
    with LLM(kept, skip_tokenizer_init=True) as llm:
        check(ask(llm), alone, tolerance)
        check(ask(llm), alone, tolerance)
