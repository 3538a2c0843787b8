"""A small model on two GPUs against the same model on one: sums over NCCL, sharded weights, captured steps."""

from random import Random

import pytest
import torch

from inkcap import LLM, SamplingParams
from inkcap.models.inkling.demo import DemoShape
from inkcap.models.inkling.demo import write as write_inkling
from inkcap.models.inkling2.demo import write as write_inkling2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SHAPE = DemoShape(
    vocabulary=2000,
    padded_vocabulary=2048,
    hidden=512,
    heads=8,
    head_dim=64,
    window=64,
    extent=128,
    floor=128,
    dense_width=512,
    expert_width=128,
    experts=16,
    chosen=4,
    max_length=1024,
    shards=1,
)
LENGTHS = (1, 63, 300, 301, 7)  # of prompts, tokens


def answers(path, ranks: int):
    """The answers and their log-probabilities, of prompts that run beside each other."""
    pick = Random(0)
    prompts = [[pick.randrange(500) for _ in range(length)] for length in LENGTHS]
    params = SamplingParams(max_tokens=24, temperature=0, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    with LLM(
        path,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        device="cuda",
        tensor_parallel_size=ranks,
        cache_memory_bytes=256 << 20,
        max_num_seqs=4,
    ) as llm:
        return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("family", ["inkling", "inkling2"])
def test_two_gpus_agree_with_one(tmp_path, family):
    if family == "inkling":
        write_inkling(tmp_path / "demo", shape=SHAPE)
    else:
        write_inkling2(tmp_path / "demo")
    apart, equal = [], 0
    for one, two in zip(answers(tmp_path / "demo", 1), answers(tmp_path / "demo", 2), strict=True):
        for alone, shared in zip(one.prompt_logprobs[1:], two.prompt_logprobs[1:], strict=True):
            (token,) = alone
            apart.append(abs(alone[token].logprob - shared[token].logprob))
        (alone,), (shared,) = one.outputs, two.outputs
        for step, (left, right) in enumerate(zip(alone.token_ids, shared.token_ids, strict=True)):
            if left != right:  # rounding may only decide where the two best were close
                assert shared.logprobs[step][right].logprob - alone.logprobs[step][left].logprob < 0.1
                assert abs(alone.logprobs[step][left].logprob - alone.logprobs[step][right].logprob) < 0.1
                break
            apart.append(abs(alone.logprobs[step][left].logprob - shared.logprobs[step][right].logprob))
            equal += 1
    assert equal >= 24
    assert torch.tensor(apart).median() < 0.02
    assert max(apart) < 0.5
