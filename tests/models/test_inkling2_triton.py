"""The whole model, loop, stored codes and rounded activations included, by its kernels in Triton's interpreter, against
the references."""

import numpy as np
import pytest
import torch
from packed import packed
from toy import run

import inkcap.ops  # noqa: F401  declares the implementations
from inkcap.base.config import CacheConfig, EngineConfig, ModelConfig, SchedConfig
from inkcap.base.formats import Numerics, WeightFormat
from inkcap.base.request import GenerateRequest, SamplingParams
from inkcap.base.sampling import TokenRules
from inkcap.layers import formats
from inkcap.layers.formats import Stored
from inkcap.models.inkling2.config import Inkling2Config, Loop
from inkcap.models.inkling2.model import Inkling2
from inkcap.ops.dispatch import OPS, bind
from inkcap.parallel.comm import Comm
from inkcap.runner.worker import Worker

CPU = torch.device("cpu")
SHAPE = Inkling2Config(
    hidden_size=96,
    num_hidden_layers=3,
    vocab_size=64,
    unpadded_vocab_size=61,
    max_length=256,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=16,
    swa_num_attention_heads=2,
    swa_num_key_value_heads=2,
    swa_head_dim=16,
    sliding_window_size=9,
    sliding=(True, True, False),
    d_rel=4,
    rel_extent=12,
    log_scaling_n_floor=8,
    log_scaling_alpha=0.1,
    rms_norm_eps=1e-6,
    conv_kernel_size=4,
    moe_intermediate_size=32,
    n_routed_experts=6,
    num_experts_per_tok=2,
    route_scale=2.0,
    mlp_gate_softcap=4.0,
    mlp_up_softcap=25.0,
    final_logit_softcapping=30.0,
    qk_l2_clip_threshold=8.0,
    rel_l2_clip_threshold=4.0,
    n_layers_per_attn_res_block=1,
    loop=Loop(start=1, stop=3, passes=2, gate_rank=5),
)
STORED = {
    1: Stored(WeightFormat.NVFP4, WeightFormat.NVFP4, Numerics.REFERENCE),
    2: Stored(WeightFormat.MXFP8, WeightFormat.MXFP8, Numerics.REFERENCE),
}


@pytest.fixture
def kernels(monkeypatch):
    """Lets kernels run on a CPU, on codes too; the value is what an engine's configuration asks for then."""
    torch.set_num_threads(1)
    monkeypatch.setattr(formats, "keeps_codes", lambda device: True)
    wanted = {}
    for name, op in OPS.items():
        if "triton" in op.implementations:
            function, _ = op.implementations["triton"]
            monkeypatch.setitem(op.implementations, "triton", (function, lambda device: True))
            wanted[name] = "triton"
    with np.errstate(all="ignore"):  # blocks of zeros divide by zero
        yield wanted
    monkeypatch.undo()
    bind(CPU)


def value_of(name: str, whole: tuple[int, ...], made: torch.Generator) -> torch.Tensor:
    """Random, of a size that keeps activations near one and lets every part matter."""
    value = torch.randn(whole, generator=made)
    if "norm" in name or "clip" in name:
        return 1 + value / 5
    if name.endswith(("sconv.weight", "static", ".bias", "rel.proj")):
        return value / 4
    if name == "embed.weight" or "query" in name or name.startswith("messenger"):
        return value
    return value * whole[-1] ** -0.5 * (4 if "router" in name else 1)


def model() -> Inkling2:
    made = Inkling2(SHAPE, Comm.alone(), torch.float32, CPU, STORED)
    generator, slots = torch.Generator().manual_seed(0), made.slots()
    for name, slot in slots.items():
        if ".experts." not in name:
            slot.fill(value_of(name, slot.whole, generator))
    inputs, units = SHAPE.hidden_size, SHAPE.moe_intermediate_size
    for layer in range(SHAPE.num_hidden_layers):
        how = STORED.get(layer, Stored())
        for matrix, kind, shape in (("w13", how.w13, (2 * units, inputs)), ("w2", how.w2, (inputs, units))):
            exact = torch.randn(SHAPE.n_routed_experts, *shape, generator=generator) * shape[1] ** -0.5
            for ending, part in packed(exact, kind)[0].items():
                slots[f"layers.{layer}.mlp.experts.{matrix}{ending}"].fill(part)
    made.unpack()
    return made


def generate(ops: dict[str, str]) -> dict[str, tuple]:
    """A step of 18 tokens of two sequences, one of both, and one of one alone."""
    config = EngineConfig(
        model=ModelConfig(path="random"),
        cache=CacheConfig(memory_bytes=8 << 20),
        sched=SchedConfig(rows=3, step_tokens=70, chunk=70),
        ops=ops,
    )
    worker = Worker(config, model(), Comm.alone(), device=CPU, rules=TokenRules())
    for storage in worker.arena.storage.values():
        storage.fill_(0xFF)  # NaN: what was not written must not matter
    made = torch.Generator().manual_seed(1)
    wanted = [
        GenerateRequest(
            request_id=f"{length}",
            token_ids=torch.randint(0, 61, (length,), generator=made).tolist(),
            params=SamplingParams(temperature=0.0, logprobs=0, ignore_eos=True),
            seed=length,
            max_tokens=count,
        )
        for length, count in ((17, 2), (1, 3))
    ]
    return run(worker, wanted, 0)


def test_kernels_agree_with_the_references(kernels):
    expected, found = generate(dict.fromkeys(OPS, "ref")), generate(kernels)
    for name, (tokens, chances, _) in expected.items():
        assert found[name][0] == tokens
        own = torch.tensor([entry.logprobs[0] for entry in found[name][1]])
        torch.testing.assert_close(own, torch.tensor([entry.logprobs[0] for entry in chances]), rtol=0, atol=2e-4)
