"""The whole model by its kernels, in Triton's interpreter, against the references: ops bound together, layouts of the
layers' own parameters, prompts in chunks beside rows that decode."""

import pytest
import torch
from guards import guards  # noqa: F401  a fixture
from toy import run

import inkcap.ops  # noqa: F401  declares the implementations
from inkcap.base.config import CacheConfig, EngineConfig, ModelConfig, SchedConfig
from inkcap.base.request import GenerateRequest, SamplingParams
from inkcap.base.sampling import TokenRules
from inkcap.models.inkling.config import InklingConfig
from inkcap.models.inkling.model import Inkling
from inkcap.ops.dispatch import OPS, bind
from inkcap.parallel.comm import Comm
from inkcap.runner.worker import Worker

CPU = torch.device("cpu")
SHAPE = InklingConfig(
    hidden_size=48,
    num_hidden_layers=2,
    vocab_size=64,
    unpadded_vocab_size=61,
    max_length=256,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    swa_num_attention_heads=2,
    swa_num_key_value_heads=1,
    swa_head_dim=16,
    sliding_window_size=24,
    local_layer_ids=(0,),
    d_rel=4,
    rel_extent=40,
    log_scaling_n_floor=50,
    log_scaling_alpha=0.1,
    rms_norm_eps=1e-6,
    sconv_kernel_size=4,
    dense_layer_ids=(0,),
    dense_intermediate_size=32,
    expert_intermediate_size=16,
    n_routed_experts=6,
    num_experts_per_tok=2,
    n_shared_experts=2,
    route_scale=2.0,
    logits_mup_width_multiplier=1.0,
)


@pytest.fixture
def kernels(monkeypatch):
    """Lets kernels run on a CPU; the value is what an engine's configuration asks for then."""
    torch.set_num_threads(1)
    wanted = {}
    for name, op in OPS.items():
        if "triton" in op.implementations:
            function, _ = op.implementations["triton"]
            monkeypatch.setitem(op.implementations, "triton", (function, lambda device: True))
            wanted[name] = "triton"
    yield wanted
    monkeypatch.undo()
    bind(CPU)


def model() -> Inkling:
    """Random parameters, norms and scales among them, that keep activations near one."""
    made = Inkling(SHAPE, Comm.alone(), torch.float32, CPU)
    generator = torch.Generator().manual_seed(0)
    for name, slot in made.slots().items():
        value = torch.randn(slot.target.shape, generator=generator)
        if "norm" in name or name.endswith("global_scale"):
            value = 1 + value / 5
        elif "sconv" in name or name.endswith((".bias", "rel.proj")):
            value = value / 4
        elif name != "embed.weight":
            value = value * slot.whole[-1] ** -0.5 * (4 if "router" in name else 1)
        slot.target.copy_(value)
    return made


def generate(ops: dict[str, str], lengths: list[int], chunk: int) -> dict[str, tuple]:
    config = EngineConfig(
        model=ModelConfig(path="random"),
        cache=CacheConfig(memory_bytes=4 << 20),
        sched=SchedConfig(rows=3, step_tokens=70, chunk=chunk),
        ops=ops,
    )
    worker = Worker(config, model(), Comm.alone(), device=CPU, rules=TokenRules())
    for storage in worker.arena.storage.values():
        storage.fill_(0xFF)  # NaN: what was not written must not matter
    made = torch.Generator().manual_seed(1)
    params = SamplingParams(temperature=0.0, logprobs=0, ignore_eos=True)
    return run(
        worker,
        [
            GenerateRequest(
                request_id=f"{number}",
                token_ids=torch.randint(0, 61, (length,), generator=made).tolist(),
                params=params,
                seed=number,
                max_tokens=3,
            )
            for number, length in enumerate(lengths)
        ],
        0,
    )


@pytest.mark.parametrize(("lengths", "chunk"), [([66], 70), ([1, 30], 20)], ids=["alone", "together"])
def test_kernels_agree_with_the_references(kernels, guards, lengths, chunk):  # noqa: F811
    """Steps of 66 tokens and of one; of 21 and 11 tokens of two sequences, and of one of each."""
    expected = generate(dict.fromkeys(OPS, "ref"), lengths, chunk)
    found = generate(kernels, lengths, chunk)
    assert guards.check() > 100
    for name, (tokens, chances, _) in expected.items():
        assert found[name][0] == tokens
        own = torch.tensor([entry.logprobs[0] for entry in found[name][1]])
        torch.testing.assert_close(own, torch.tensor([entry.logprobs[0] for entry in chances]), rtol=0, atol=2e-4)
