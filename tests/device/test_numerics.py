"""Reference numerics in a whole small model of each generation: a GPU in bf16 against the references."""

from dataclasses import replace

import pytest
import torch
from device import test_engine, test_engine2
from device.test_engine import CPU, GPU, apart, force, requests
from msgspec import structs
from ops.test_quantize_triton import same
from toy import run

from inkcap.base.config import CacheConfig, EngineConfig, ModelConfig, SchedConfig
from inkcap.base.formats import Numerics, WeightFormat
from inkcap.base.sampling import TokenRules
from inkcap.layers.formats import Stored
from inkcap.models.inkling.model import Inkling
from inkcap.models.inkling2.config import Loop
from inkcap.models.inkling2.model import Inkling2
from inkcap.ops.dispatch import OPS, bind
from inkcap.ops.quantize.ref import round_rows
from inkcap.ops.router.ref import route_sigmoid_rounded
from inkcap.parallel.comm import Comm
from inkcap.runner.worker import Worker

pytestmark = pytest.mark.gpu
LENGTHS = [5, 65, 130, 200]  # of prompts, tokens
ALL = {"n_routed_experts": 4, "num_experts_per_tok": 4}  # a rounding must not change which experts a token uses
NVFP4, SCALE2, MXFP8 = WeightFormat.NVFP4, WeightFormat.NVFP4_SCALE2, WeightFormat.MXFP8
CASES = {
    "one": (
        Inkling,
        replace(test_engine.SHAPE, hidden_size=256, num_hidden_layers=3, local_layer_ids=(0, 1), **ALL),
        {1: SCALE2, 2: NVFP4},
    ),
    "two": (
        Inkling2,
        replace(
            test_engine2.SHAPE, hidden_size=256, num_hidden_layers=3, sliding=(True, False, True),
            n_layers_per_attn_res_block=1, loop=Loop(start=1, stop=2, passes=2, gate_rank=64), **ALL,
        ),
        {1: NVFP4, 2: MXFP8},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def threads():
    """Several cost the references more than they bring."""
    torch.set_num_threads(1)


def fill(model, shape) -> None:
    """Random weights that keep activations near one, the same on every device, all of them bf16 numbers or codes."""
    made = torch.Generator().manual_seed(0)
    units = shape.expert_intermediate_size if isinstance(model, Inkling) else shape.moe_intermediate_size
    for name, slot in model.slots().items():
        target, last = slot.target, name.rsplit(".", 1)[-1]
        inputs = shape.hidden_size if ".w13" in name else units
        if last == "codes" and target.dtype == torch.uint8:
            value = torch.randint(0, 256, target.shape, generator=made, dtype=torch.uint8)
        elif last == "codes":
            value = torch.randn(target.shape, generator=made).to(target.dtype)
        elif last == "scales" and target.dtype == torch.uint8:
            value = torch.full(target.shape, 122, dtype=torch.uint8)
        elif last == "scales":
            value = (torch.rand(target.shape, generator=made) + 0.5).to(target.dtype)
        elif last in ("amax", "denominator", "scale2", "input_amax", "original_shape"):
            plain = {"denominator": 1536.0, "amax": 512.0 * inputs**-0.5, "scale2": inputs**-0.5 / 3, "input_amax": 4.0}
            value = torch.full(target.shape, plain.get(last, 0.0))
        elif "norm" in name or "clip" in name or last == "global_scale":
            value = torch.full(target.shape, 1.0)
        else:
            size = 0.1 if "sconv" in name or last == "bias" else 0.25 if name.endswith("rel.proj") else None
            if size is None:
                near = slot.whole[-1] ** -0.5 * (4 if "router" in name else 0.1 if last == "dynamic" else 1)
                size = 1.0 if name == "embed.weight" or last in ("query", "outer", "inner") else near
            value = (torch.randn(target.shape, generator=made) * size).bfloat16()
        target.copy_(value)
    model.unpack()


def worker(case: str, numerics: Numerics, device: torch.device, dtype: torch.dtype, *, graphs: bool = True) -> Worker:
    kind, shape, formats = CASES[case]
    stored = {layer: Stored(form, form, numerics) for layer, form in formats.items()}
    model = kind(shape, Comm.alone(), dtype, device, stored)
    fill(model, shape)
    config = EngineConfig(
        model=ModelConfig(path="random", graphs=graphs, mixed_graphs=graphs),
        cache=CacheConfig(memory_bytes=512 << 20),
        sched=SchedConfig(rows=4, step_tokens=512, chunk=256),
        ops={} if device.type == "cuda" else dict.fromkeys(OPS, "ref"),
    )
    made = Worker(config, model, Comm.alone(), device=device, dtype=dtype, rules=TokenRules())
    for storage in made.arena.storage.values():
        storage.fill_(0xFF)  # NaN: what was not written must not matter
    return made


def short() -> list:
    """Requests of which the first goes on when the others have ended."""
    return [structs.replace(request, max_tokens=32 if request.seed else 48) for request in requests(LENGTHS)]


@pytest.mark.parametrize("case", CASES)
def test_every_rounding_is_that_of_the_references(case, monkeypatch):
    calls = []

    def recorded(x, how, amax=None):
        out = round_rows.implementations["triton"][0](x, how, amax)
        calls.append((x.cpu(), how, out.cpu()))
        return out

    def routed(rows, weight, bias, how, **settings):
        route, out = route_sigmoid_rounded.implementations["triton"][0](rows, weight, bias, how, **settings)
        calls.append((rows.tensor().cpu(), how, out.cpu()))
        return route, out

    made = worker(case, Numerics.REFERENCE, GPU, torch.bfloat16, graphs=False)
    monkeypatch.setattr(round_rows, "function", recorded)
    monkeypatch.setattr(route_sigmoid_rounded, "function", routed)
    run(made, short(), 0)
    shapes = {x.shape[:-1] for x, _, _ in calls}
    assert {(1,), (4,), (1, 4), (4, 4)} <= shapes  # both halves, of one token and of several
    assert {how.block for _, how, _ in calls} == ({16} if case == "one" else {16, 32})
    bind(CPU)
    for x, how, out in calls:
        here = how if how.factor is None else replace(how, factor=how.factor.cpu())
        same([out], [round_rows.reference(x, here)])
        assert not torch.equal(out, x)


@pytest.mark.parametrize("case", CASES)
def test_a_gpu_agrees_with_the_references(case, monkeypatch):
    """Eager and captured steps are as far from the references in fp32 as the references in bf16 are."""
    wanted, mode = short(), Numerics.REFERENCE
    expected = run(worker(case, mode, CPU, torch.float32), wanted, 0)
    force(monkeypatch, expected, wanted)
    in_bf16 = apart(run(worker(case, mode, CPU, torch.bfloat16), wanted, 0), expected)
    eager = apart(run(worker(case, mode, GPU, torch.bfloat16, graphs=False), wanted, 0), expected)
    captured = apart(run(worker(case, mode, GPU, torch.bfloat16), wanted, 1), expected)
    print(case, *(f"{d.mean():.4f} {d.max():.3f}" for d in (in_bf16, eager, captured)))
    for found in (eager, captured):
        assert found.mean() < 1.3 * in_bf16.mean()
        assert found.max() < 2 * in_bf16.max()
