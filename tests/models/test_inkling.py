"""Inkling's text model against transformers on random checkpoints, however the tokens are cut into steps."""

from dataclasses import dataclass, replace

import pytest
import torch
from ranks import on_ranks
from steps import World
from transformers import InklingForCausalLM, InklingTextConfig

import inkcap.ops  # noqa: F401  declares the implementations
from inkcap.models.inkling.config import InklingConfig
from inkcap.models.inkling.model import Inkling
from inkcap.ops.dispatch import OPS, bind
from inkcap.parallel.comm import Comm

CPU = torch.device("cpu")
LENGTH = 75
BASE = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "vocab_size": 96,
    "unpadded_vocab_size": 90,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 16,
    "sliding_window_size": 8,
    "local_layer_ids": (0, 1, 3),
    "d_rel": 6,
    "rel_extent": 20,
    "log_scaling_n_floor": 11,
    "log_scaling_alpha": 0.3,
    "dense_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "route_scale": 2.5,
    "logits_mup_width_multiplier": 3.0,
    "rms_norm_eps": 1e-6,
}
VARIANTS = {
    "base": {},
    "one_kv_head": {"num_key_value_heads": 1, "swa_num_attention_heads": 8, "swa_num_key_value_heads": 2},
    "wide_window": {"sliding_window_size": 66, "rel_extent": 100, "log_scaling_n_floor": 1},
    "all_dense": {"dense": 4, "local_layer_ids": (1,), "num_attention_heads": 6, "num_key_value_heads": 3},
    "no_scaling": {"log_scaling_n_floor": None, "head_dim": 8, "swa_head_dim": 24, "rel_extent": 5},
    "many_experts": {"dense": 0, "n_routed_experts": 24, "num_experts_per_tok": 6, "n_shared_experts": 1},
    "tight_window": {"sliding_window_size": 3, "d_rel": 16, "local_layer_ids": (0, 2), "num_experts_per_tok": 1},
}


@dataclass
class Case:
    """A checkpoint in both engines, a few prompts, and the oracle's logits of each."""

    model: Inkling
    prompts: list[list[int]]
    logits: list[torch.Tensor]  # [tokens, words] of each prompt
    config: InklingConfig
    weights: dict[str, torch.Tensor]  # by slot, whole


def published(oracle, dense):
    """The oracle's weights by the names of our slots, in the published shapes."""
    tensors = dict(oracle.state_dict())
    names = {
        "q": "q_proj",
        "k": "k_proj",
        "v": "v_proj",
        "r": "r_proj",
        "k_sconv": "k_sconv.conv1d",
        "v_sconv": "v_sconv.conv1d",
        "q_norm": "q_norm",
        "k_norm": "k_norm",
    }
    wanted = {
        "embed.weight": tensors["model.embed_tokens.weight"],
        "embed.norm.weight": tensors["model.embed_tokens.embed_norm.weight"],
        "norm.weight": tensors["model.norm.weight"],
        "head.weight": tensors["lm_head.weight"],
    }
    for n in range(oracle.config.num_hidden_layers):
        own, other = f"layers.{n}", f"model.layers.{n}"
        for name, theirs in names.items():
            wanted[f"{own}.attention.{name}.weight"] = tensors[f"{other}.self_attn.{theirs}.weight"]
        wanted[f"{own}.attention.rel.proj"] = tensors[f"{other}.self_attn.rel_logits_proj.proj"]
        wanted[f"{own}.attn_out.weight"] = tensors[f"{other}.self_attn.o_proj.weight"]
        wanted[f"{own}.attn_norm.weight"] = tensors[f"{other}.input_layernorm.weight"]
        wanted[f"{own}.mlp_norm.weight"] = tensors[f"{other}.post_attention_layernorm.weight"]
        wanted[f"{own}.attn_sconv.weight"] = tensors[f"{other}.attn_sconv.conv1d.weight"]
        wanted[f"{own}.mlp_sconv.weight"] = tensors[f"{other}.mlp_sconv.conv1d.weight"]
        mlp = f"{other}.mlp"
        if n < dense:
            gate, up = tensors[f"{mlp}.gate_proj.weight"], tensors[f"{mlp}.up_proj.weight"]
            wanted[f"{own}.mlp.w13.weight"] = torch.stack([gate, up], 1).flatten(0, 1)
            wanted[f"{own}.mlp.w2.weight"] = tensors[f"{mlp}.down_proj.weight"]
            wanted[f"{own}.mlp.global_scale"] = tensors[f"{mlp}.global_scale"]
        else:
            both = tensors[f"{mlp}.experts.gate_up_proj"].unflatten(1, (2, -1))
            shared = [tensors[f"{mlp}.shared_experts.{half}_proj"] for half in ("gate", "up")]
            wanted[f"{own}.mlp.experts.w13"] = both.transpose(1, 2).flatten(1, 2)
            wanted[f"{own}.mlp.experts.w2"] = tensors[f"{mlp}.experts.down_proj"]
            wanted[f"{own}.mlp.shared.w13"] = torch.stack(shared, 2).flatten(1, 2)
            wanted[f"{own}.mlp.shared.w2"] = tensors[f"{mlp}.shared_experts.down_proj"]
            wanted[f"{own}.mlp.router.weight"] = tensors[f"{mlp}.gate.weight"]
            wanted[f"{own}.mlp.router.bias"] = tensors[f"{mlp}.gate.e_score_correction_bias"]
            wanted[f"{own}.mlp.router.global_scale"] = tensors[f"{mlp}.gate.global_scale"]
    return wanted


def fill(model, weights):
    """Copy whole weights into a rank's slots."""
    slots = model.slots()
    assert slots.keys() == weights.keys()
    for name, slot in slots.items():
        slot.fill(weights[name])


def randomise(oracle):
    """Weights at which every part of the model matters: spread routing, strong biases, live convolutions."""
    for name, tensor in oracle.state_dict().items():
        noise = torch.randn(tensor.shape)
        if "norm" in name or "global_scale" in name:
            tensor.copy_(1.0 + 0.3 * noise)
        elif "conv1d" in name or "correction_bias" in name:
            tensor.copy_(0.4 * noise)
        elif "rel_logits_proj" in name:
            tensor.copy_(noise)
        else:
            tensor.copy_(1.5 * noise / tensor.shape[-1] ** 0.5)


def build(variant):
    """A random checkpoint of the variant."""
    torch.manual_seed(sorted(VARIANTS).index(variant))
    values = {**BASE, **VARIANTS[variant]}
    dense = values.pop("dense", 2)
    config = InklingConfig(
        **values,
        max_length=1024,
        sconv_kernel_size=4,
        dense_layer_ids=tuple(range(dense)),
        expert_intermediate_size=20,
    )
    values["local_layer_ids"] = list(values["local_layer_ids"])
    oracle = InklingForCausalLM(
        InklingTextConfig(
            **values, dense_mlp_idx=dense, intermediate_size=20, pad_token_id=0, attn_implementation="eager"
        )
    ).eval()
    with torch.inference_mode():
        randomise(oracle)
        model = Inkling(config, Comm.alone(), torch.float32, CPU)
        weights = published(oracle, dense)
        fill(model, weights)
        prompts = [torch.randint(0, 90, (length,)).tolist() for length in (LENGTH, 31, 2)]
        logits = [oracle(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]
    return Case(model, prompts, logits, config, weights)


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def case(request):
    torch.set_num_threads(1)
    return build(request.param)


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


@pytest.mark.parametrize("chunk", [LENGTH, 64, 7, 1])
def test_logits_in_chunks(case, ops, chunk):
    prompt, world = case.prompts[0], World(case.model.states)
    parts = [run(case, world, [(2, at, prompt[at : at + chunk])])[0] for at in range(0, len(prompt), chunk)]
    check(torch.cat(parts), case.logits[0])


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


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_agree_with_the_oracle(size):
    """Heads, widths and words split over ranks; with four, two ranks share a kv head of the global layers."""
    torch.set_num_threads(1)
    case = build("base")

    def work(comm):
        model = Inkling(case.config, comm, torch.float32, CPU)
        fill(model, case.weights)
        own = replace(case, model=model)
        world = World(model.states)
        return [run(own, world, [(1, at, case.prompts[0][at : at + 30])])[0] for at in range(0, LENGTH, 30)]

    bind(CPU)
    for parts in on_ranks(size, work):
        check(torch.cat(parts), case.logits[0])
