"""A whole small model of the second generation, with a loop and codes, through the worker: a GPU in bf16 against the
references in fp32, and captured steps against the same work uncaptured.

Against eager steps nothing can be said but in deterministic mode (test_deterministic.py): they take kernels for other
numbers of tokens, and the loop amplifies their roundings. The references in bf16 are 0.16 (median) to 1.7 from those in
fp32 after ten tokens, and 0.08 (mean) from themselves in other company."""

import pytest
import torch
from device.test_engine import CPU, GPU, apart, force, requests, same_bits_uncaptured
from toy import run

from inkcap.base.config import CacheConfig, EngineConfig, ModelConfig, SchedConfig
from inkcap.base.formats import WeightFormat
from inkcap.base.sampling import TokenRules
from inkcap.layers.formats import Stored
from inkcap.models.inkling2.config import Inkling2Config, Loop
from inkcap.models.inkling2.model import Inkling2
from inkcap.ops.dispatch import OPS
from inkcap.parallel.comm import Comm
from inkcap.runner.worker import Worker

pytestmark = pytest.mark.gpu
SHAPE = Inkling2Config(
    hidden_size=768,
    num_hidden_layers=6,
    vocab_size=2048,
    unpadded_vocab_size=2000,
    max_length=2048,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=128,
    swa_num_attention_heads=6,
    swa_num_key_value_heads=2,
    swa_head_dim=128,
    sliding_window_size=128,
    sliding=(True, True, False, True, True, False),
    d_rel=16,
    rel_extent=256,
    log_scaling_n_floor=300,
    log_scaling_alpha=0.1,
    rms_norm_eps=1e-6,
    conv_kernel_size=4,
    moe_intermediate_size=128,
    n_routed_experts=16,
    num_experts_per_tok=4,
    route_scale=2.0,
    mlp_gate_softcap=4.0,
    mlp_up_softcap=25.0,
    final_logit_softcapping=30.0,
    qk_l2_clip_threshold=2 * 128**0.5,
    rel_l2_clip_threshold=8.0,
    n_layers_per_attn_res_block=2,
    loop=Loop(start=2, stop=4, passes=3, gate_rank=64),
)
LENGTHS = [1, 63, 65, 300]  # of prompts, tokens
STORED = {
    1: Stored(WeightFormat.NVFP4, WeightFormat.NVFP4),
    3: Stored(WeightFormat.NVFP4, WeightFormat.NVFP4),
    5: Stored(WeightFormat.MXFP8, WeightFormat.MXFP8),
}


def fill(model: Inkling2) -> None:
    """Random weights that keep activations near one, the same on every device, all of them bf16 numbers or codes."""
    made = torch.Generator().manual_seed(0)
    for name, slot in model.slots().items():
        shape, last = slot.target.shape, name.rsplit(".", 1)[-1]
        inputs = SHAPE.hidden_size if ".w13" in name else SHAPE.moe_intermediate_size
        if last == "codes" and slot.target.dtype == torch.uint8:
            value = torch.randint(0, 256, shape, generator=made, dtype=torch.uint8)
        elif last == "codes":
            value = torch.randn(shape, generator=made).to(slot.target.dtype)
        elif last == "scales" and slot.target.dtype == torch.uint8:
            value = torch.randint(120, 124, shape, generator=made, dtype=torch.uint8)
        elif last == "scales":
            value = (torch.rand(shape, generator=made) + 0.5).to(slot.target.dtype)
        elif last in ("amax", "denominator"):
            value = torch.full(shape, 2688.0 if last == "denominator" else 2688.0 * inputs**-0.5 / 3)
        elif "norm" in name or "clip" in name:
            value = torch.full(shape, 1.0)
        else:
            size = slot.whole[-1] ** -0.5 * (4 if "router" in name else 1)
            if name == "embed.weight" or last in ("query", "outer", "inner"):
                size = 1.0
            elif last == "dynamic":
                size *= 0.1
            elif "sconv" in name or last == "bias":
                size = 0.1
            elif name.endswith("rel.proj"):
                size = 0.25
            value = (torch.randn(shape, generator=made) * size).bfloat16()
        slot.target.copy_(value)
    model.unpack()


def worker(
    device: torch.device,
    dtype: torch.dtype,
    *,
    graphs: bool = True,
    rows: int = 4,
    chunk: int = 256,
    deterministic: bool = False,
) -> Worker:
    model = Inkling2(SHAPE, Comm.alone(), dtype, device, STORED)
    fill(model)
    config = EngineConfig(
        model=ModelConfig(path="random", graphs=graphs, mixed_graphs=graphs, deterministic=deterministic),
        cache=CacheConfig(memory_bytes=512 << 20),
        sched=SchedConfig(rows=rows, step_tokens=512, chunk=chunk),
        ops={} if device.type == "cuda" else dict.fromkeys(OPS, "ref"),
    )
    made = Worker(config, model, Comm.alone(), device=device, dtype=dtype, rules=TokenRules())
    for storage in made.arena.storage.values():
        storage.fill_(0xFF)  # NaN: what was not written must not matter
    return made


def test_a_gpu_agrees_with_the_references(monkeypatch):
    wanted = requests(LENGTHS)
    expected = run(worker(CPU, torch.float32), wanted, 0)
    force(monkeypatch, expected, wanted)
    rounded = apart(run(worker(CPU, torch.bfloat16), wanted, 0), expected)
    on_gpu = apart(run(worker(GPU, torch.bfloat16), wanted, 1), expected)
    # the kernels round in other places than the references in bf16, but no more of it
    assert on_gpu.mean() < 1.3 * rounded.mean()
    assert on_gpu.max() < 2 * rounded.max()


@pytest.mark.parametrize("rows", [1, 4])
def test_captured_steps_have_the_bits_of_the_same_work_uncaptured(monkeypatch, rows):
    same_bits_uncaptured(monkeypatch, lambda: worker(GPU, torch.bfloat16, rows=rows), requests(LENGTHS))
