"""A cache of codes (cache.dtype = fp8) in engines of both generations: what it changes, and what it must not change."""

from dataclasses import replace

import pytest
import torch
from conftest import config
from steps import World

from inkcap import LLM, SamplingParams
from inkcap.base.errors import ConfigInvalid
from inkcap.cache.plan import groups_of
from inkcap.models.inkling2.demo import DemoShape, write
from inkcap.models.registry import load_model
from inkcap.ops.attn_prep import ref
from inkcap.ops.dispatch import OPS, bind
from inkcap.parallel.comm import Comm

CPU = torch.device("cpu")
PROMPTS = [[(7 * n + 3) % 500 for n in range(130)], [9], [(11 * n) % 490 for n in range(40)]]
WISH = SamplingParams(temperature=0, max_tokens=20, logprobs=1, prompt_logprobs=0)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=["inkling", "inkling2, looped"])
def directory(request, checkpoint, tmp_path_factory):
    if request.param == "inkling":
        return checkpoint
    made = tmp_path_factory.mktemp("loop") / "demo"
    shape = DemoShape(
        vocabulary=500,
        padded_vocabulary=512,
        hidden=32,
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
    write(made, seed=1, shape=shape)
    return made


def numbers(results):
    """Tokens of the answers, and log-probabilities of these and of the prompts."""
    tokens = [result.outputs[0].token_ids for result in results]
    steps = [
        step for result in results for step in (*(result.prompt_logprobs or ()), *result.outputs[0].logprobs) if step
    ]
    return tokens, [max(entry.logprob for entry in step.values()) for step in steps]


def ask(directory, prompts=PROMPTS, **how):
    with LLM(config(directory, **how), skip_tokenizer_init=True) as llm:
        return llm.generate(prompts, [WISH] * len(prompts), use_tqdm=False)


@pytest.mark.parametrize("device", DEVICES)
def test_answers_do_not_depend_on_chunks_or_company(directory, device):
    """This step's keys and values are what the cache will give, so nothing depends on where a step ends."""
    how = {"kv": "fp8", "deterministic": True, "device": device}
    alone = [result for prompt in PROMPTS for result in ask(directory, [prompt], prefix=False, rows=1, **how)]
    for chunk in (7, 64):
        assert numbers(ask(directory, chunk=chunk, rows=3, **how)) == numbers(alone)


@pytest.mark.parametrize("device", DEVICES)
def test_codes_change_answers_a_little(checkpoint, device):
    """Not asked of the loop: with random weights it makes much of any rounding, that of a cache in bf16 too."""
    plain, coded = (numbers(ask(checkpoint, kv=kv, device=device))[1] for kv in ("auto", "fp8"))
    count = len(PROMPTS[0]) - 1  # of log-probabilities of the same tokens
    apart = torch.tensor(plain[:count]) - torch.tensor(coded[:count])
    assert apart.abs().max() > 1e-4
    print(f"log-probabilities differ by {apart.square().mean().sqrt():.3f}")
    assert apart.square().mean().sqrt() < 0.2


@pytest.mark.parametrize("chosen", ["ref", "bound"])
def test_scales_cancel(directory, chosen, monkeypatch):
    """With codes that round nothing, the model is the one without codes."""
    monkeypatch.setattr(ref, "encode", lambda x, scale: x / scale[:, None])
    models = [
        load_model(directory, comm=Comm.alone(), dtype=torch.float32, device=CPU, progress=False, kv_dtype=kv)
        for kv in (None, torch.float32)
    ]
    bind(CPU, dict.fromkeys(OPS, "ref") if chosen == "ref" else {})
    found = []
    for model in models:
        world, made = World(model.states, length=512), []
        for first, stop in ((0, 40), (40, 41), (41, 90)):
            batch = world.batch([(1, first, PROMPTS[0][first:stop])])
            made.append(model.head(model.forward(batch)))
        found.append(torch.cat(made))
    bind(CPU)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_half_the_memory_keeps_as_much(directory):
    """Blocks of keys and values take half of what they take in bf16, a quarter of fp32; convolutions take the same."""
    sizes = []
    for kv in (None, torch.float8_e4m3fn):
        model = load_model(directory, comm=Comm.alone(), dtype=torch.bfloat16, device=CPU, progress=False, kv_dtype=kv)
        sizes.append({group.name: group.block_bytes for group in groups_of(model.states)})
    plain, coded = sizes
    assert coded == {"full": plain["full"] // 2, "window": plain["window"] // 2, "sconv": plain["sconv"]}


def test_a_bf16_cache_needs_a_bf16_model(checkpoint):
    with pytest.raises(
        ConfigInvalid, match=r"cache\.dtype = bf16 needs a model in bfloat16, and this one runs in float32"
    ):
        LLM(config(checkpoint, kv="bf16"), skip_tokenizer_init=True)


def test_no_key_or_value_saturates(checkpoint):
    """Inputs that are made to: a normed row along each channel's weights gives its largest value."""
    model = load_model(
        checkpoint, comm=Comm.alone(), dtype=torch.float32, device=CPU, progress=False, kv_dtype=torch.float8_e4m3fn
    )
    for layer in model.layers:
        attention, norm = layer.attention, layer.attn_norm.weight
        weight = attention.qkvr.slots()["v.weight"].target * norm
        rows = (
            weight / weight.norm(dim=1, keepdim=True) * len(norm) ** 0.5
        )  # of length sqrt(C), before the norm's weight
        largest = (rows @ weight.t()).diagonal() * (1 + attention.v_sconv.taps.abs().sum(1))
        used = largest.view(-1, attention.heads.size).amax(1) / attention.codes.v / 448
        assert ((used < 1) & (used > 0.48)).all()
        key = attention.heads.size**0.5 * attention.k_norm.weight.abs().max() / attention.codes.k / 448
        assert ((key < 1) & (key > 0.48)).all()


def test_scales_from_a_file(checkpoint, tmp_path):
    """A scale that is far too small saturates, and says so before it runs."""
    path = tmp_path / "scales.json"
    path.write_text('{"layers.1.attention.v_scale": 1e-6}')
    settings = config(checkpoint, kv="fp8")
    with LLM(replace(settings, cache=replace(settings.cache, scales=str(path))), skip_tokenizer_init=True) as llm:
        small = numbers(llm.generate(PROMPTS[:1], [WISH], use_tqdm=False))
    assert small != numbers(ask(checkpoint, PROMPTS[:1], kv="fp8"))
    with pytest.raises(ConfigInvalid, match=r"cache\.scales needs cache\.dtype = fp8; it is auto"):
        LLM(replace(settings, cache=replace(settings.cache, scales=str(path), dtype="auto")), skip_tokenizer_init=True)
