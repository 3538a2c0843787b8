"""Inkling 2's text model, with and without a loop, against transformers, however the tokens are cut into steps.

The oracle writes each random checkpoint with save_pretrained, and this engine loads that directory.
"""

import json
from dataclasses import dataclass

import pytest
import torch
from oracle_inkling2 import BASE, FULL, LOOP, SLIDING, randomise
from steps import World
from transformers import (
    Inkling2ForCausalLM,
    Inkling2LoopForCausalLM,
    Inkling2LoopTextConfig,
    Inkling2TextConfig,
)

import inkcap.ops  # noqa: F401  declares the implementations
from inkcap.models.inkling2.config import Inkling2Config
from inkcap.models.inkling2.model import Inkling2
from inkcap.models.inkling2.weights import TABLES
from inkcap.ops.dispatch import OPS, bind
from inkcap.parallel.comm import Comm
from inkcap.weights.load import load
from inkcap.weights.reader import Checkpoint

CPU = torch.device("cpu")
LENGTH = 75
VARIANTS = {
    "base": {},
    "one_block": {"n_layers_per_attn_res_block": 12, "layer_types": [SLIDING, FULL] * 3},
    "many_blocks": {
        "n_layers_per_attn_res_block": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "swa_num_key_value_heads": 1,
        "log_scaling_n_floor": 40,
    },
    "starts_full": {"layer_types": [FULL, SLIDING] * 3, "head_dim": 8, "swa_head_dim": 24, "rel_extent": 30},
    "many_experts": {
        "n_routed_experts": 24,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 3,
        "layer_types": [FULL] * 3,
    },
    "tight_window": {"sliding_window_size": 3, "num_experts_per_tok": 1, "n_layers_per_attn_res_block": 2},
    "wide_window": {"sliding_window_size": 66, "rel_extent": 100, "log_scaling_n_floor": 128000, "conv_kernel_size": 2},
    "loop": {**LOOP, "num_hidden_layers": 9, "layer_types": [SLIDING, SLIDING, FULL] * 3},
    "long_loop": {
        **LOOP,
        "num_hidden_layers": 8,
        "n_layers_per_attn_res_block": 2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 8,
        "loop_num_passes": 2,
        "layer_types": [SLIDING, FULL, SLIDING, SLIDING] * 2,
    },
    "four_passes": {**LOOP, "loop_num_passes": 4, "layer_types": [SLIDING] * 6, "loop_gate_rank": 2},
    "one_pass": {**LOOP, "loop_num_passes": 1},
}


@dataclass
class Case:
    """A checkpoint in both engines, a few prompts, and the oracle's logits of each."""

    model: Inkling2
    prompts: list[list[int]]
    logits: list[torch.Tensor]  # [tokens, words] of each prompt


def build(variant, directory):
    """A random checkpoint of the variant, written by one library and read by the other."""
    torch.manual_seed(sorted(VARIANTS).index(variant))
    values = {**BASE, **VARIANTS[variant]}
    looped = "loop_num_passes" in values
    make, config = (
        (Inkling2LoopForCausalLM, Inkling2LoopTextConfig) if looped else (Inkling2ForCausalLM, Inkling2TextConfig)
    )
    oracle = make(config(**values, attn_implementation="eager")).eval()
    with torch.inference_mode():
        randomise(oracle)
        oracle.save_pretrained(directory)
        read = Inkling2Config.from_json(json.loads((directory / "config.json").read_text()))
        model = Inkling2(read, Comm.alone(), torch.float32, CPU)
        load(Checkpoint(directory), model.slots(), TABLES, progress=False)
        model.unpack()
        prompts = [torch.randint(0, 90, (length,)).tolist() for length in (LENGTH, 31, 2)]
        logits = [oracle(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]
    return Case(model, prompts, logits)


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def case(request, tmp_path_factory):
    torch.set_num_threads(1)
    return build(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=["ref", "bound"])
def ops(request):
    """The references, then what a CPU is given."""
    bind(CPU, dict.fromkeys(OPS, "ref") if request.param == "ref" else {})
    yield request.param
    bind(CPU)


def check(got, want):
    assert got.shape == want.shape
    assert got.dtype == torch.float32
    error = (got - want).abs().max() / want.abs().max()
    assert error < 1e-4, f"relative error {error:.2e}"


def run(case, world, work):
    """One step; the logits of each sequence's tokens."""
    with torch.inference_mode():
        batch = world.batch(work)
        logits = case.model.head(case.model.forward(batch)[batch.sampled])
    return logits.split([len(tokens) for _, _, tokens in work])


@pytest.mark.parametrize(("chunk", "which"), [(LENGTH, 0), (64, 0), (7, 0), (1, 1)])
def test_logits_in_chunks(case, ops, chunk, which):
    prompt, world = case.prompts[which], World(case.model.states)
    parts = [run(case, world, [(2, at, prompt[at : at + chunk])])[0] for at in range(0, len(prompt), chunk)]
    check(torch.cat(parts), case.logits[which])


def test_sequences_packed_in_one_step(case, ops):
    """Three sequences in shuffled blocks; one decodes while another is prefilled, then all decode."""
    world = World(case.model.states, seed=7)
    done = [[], [], []]
    cursor = [0, 0, 0]
    for sizes in [(5, 1, 0), (1, 9, 2), (60, 1, 0), *[(1, 1, 0)] * 9]:
        work, who = [], []
        for i, size in enumerate(sizes):
            if size:
                work.append((3 - i, cursor[i], case.prompts[i][cursor[i] : cursor[i] + size]))
                who.append(i)
                cursor[i] += size
        for i, logits in zip(who, run(case, world, work), strict=True):
            done[i].append(logits)
    for i in range(3):
        check(torch.cat(done[i]), case.logits[i][: cursor[i]])
