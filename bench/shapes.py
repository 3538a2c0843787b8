"""Models with the widths that one rank of a large one holds, or whole small ones, random weights, and their floors.

Weights are of a size that keeps activations near one. Floors count what a step must read or multiply, no more.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import log2, prod

import torch
from torch import Tensor

from inkcap.base.formats import Numerics, WeightFormat
from inkcap.layers.formats import Stored
from inkcap.models.base import Model
from inkcap.models.inkling.config import InklingConfig
from inkcap.models.inkling.model import Inkling
from inkcap.models.inkling2.config import Inkling2Config, Loop
from inkcap.models.inkling2.model import Inkling2
from inkcap.parallel.comm import Comm

READ_BYTES_A_SECOND = 4.68e12  # what a kernel that only reads reaches on an H200, 2 GiB at a time
DENOMINATOR = 6.0 * 448.0  # of NVFP4: largest code times largest scale
E2M1_SIZE = 2.93  # root mean square of the sixteen codes

SHAPES: dict[str, InklingConfig | Inkling2Config] = {
    # one of eight ranks of the published model: heads, experts' widths and words are divided, layers cut to 24
    "inkling-tp8": InklingConfig(
        hidden_size=6144,
        num_hidden_layers=24,
        vocab_size=25128,
        unpadded_vocab_size=25128,
        max_length=1 << 20,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=128,
        swa_num_attention_heads=8,
        swa_num_key_value_heads=2,
        swa_head_dim=128,
        sliding_window_size=512,
        local_layer_ids=tuple(layer for layer in range(24) if layer % 6 != 5),
        d_rel=16,
        rel_extent=1024,
        log_scaling_n_floor=128_000,
        log_scaling_alpha=0.1,
        rms_norm_eps=1e-6,
        sconv_kernel_size=4,
        dense_layer_ids=(0, 1),
        dense_intermediate_size=3072,
        expert_intermediate_size=384,
        n_routed_experts=256,
        num_experts_per_tok=6,
        n_shared_experts=2,
        route_scale=8.0,
        logits_mup_width_multiplier=1.0,
    ),
    # the whole published model
    "inkling2-mini": Inkling2Config(
        hidden_size=2304,
        num_hidden_layers=24,
        vocab_size=201_024,
        unpadded_vocab_size=200_058,
        max_length=1 << 20,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        swa_num_attention_heads=24,
        swa_num_key_value_heads=8,
        swa_head_dim=128,
        sliding_window_size=1024,
        sliding=tuple(layer % 6 != 5 for layer in range(24)),
        d_rel=16,
        rel_extent=1024,
        log_scaling_n_floor=8192,
        log_scaling_alpha=0.1,
        rms_norm_eps=1e-6,
        conv_kernel_size=4,
        moe_intermediate_size=1152,
        n_routed_experts=128,
        num_experts_per_tok=8,
        route_scale=8.0,
        mlp_gate_softcap=4.0,
        mlp_up_softcap=25.0,
        final_logit_softcapping=30.0,
        qk_l2_clip_threshold=2 * 128**0.5,
        rel_l2_clip_threshold=8.0,
        n_layers_per_attn_res_block=6,
        loop=Loop(start=6, stop=18, passes=3, gate_rank=64),
    ),
}
# one of four ranks of the published model, layers cut to 24
SHAPES["inkling2-small-tp4"] = replace(
    SHAPES["inkling2-mini"],
    hidden_size=4608,
    vocab_size=50_256,
    unpadded_vocab_size=50_256,
    num_attention_heads=12,
    num_key_value_heads=2,
    swa_num_attention_heads=12,
    swa_num_key_value_heads=2,
    log_scaling_n_floor=128_000,
    moe_intermediate_size=576,
    n_routed_experts=384,
    loop=None,
)
# everything of the above at a size that a CPU runs at once
SHAPES["tiny"] = replace(
    SHAPES["inkling-tp8"],
    hidden_size=256,
    num_hidden_layers=8,
    local_layer_ids=(0, 1, 2, 3, 4, 6, 7),
    vocab_size=1000,
    unpadded_vocab_size=1000,
    dense_intermediate_size=128,
    expert_intermediate_size=32,
    n_routed_experts=16,
)
SHAPES["tiny2"] = replace(
    SHAPES["inkling2-mini"],
    hidden_size=128,
    num_hidden_layers=6,
    sliding=(True, False) * 3,
    vocab_size=1000,
    unpadded_vocab_size=1000,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    swa_num_attention_heads=6,
    swa_num_key_value_heads=2,
    swa_head_dim=32,
    moe_intermediate_size=32,
    n_routed_experts=16,
    n_layers_per_attn_res_block=2,
    loop=Loop(start=2, stop=4, passes=3, gate_rank=8),
)

RIVAL = "transformers 5.24, BF16, eager, one H200"  # the only released package that runs it
RIVAL_MS = {("inkling2-mini", 1, 1024): 228.0, ("inkling2-mini", 8, 1024): 226.0, ("inkling2-mini", 1, 8192): 238.0}
RIVAL_PREFILL = {"inkling2-mini": 4100}  # tokens/s


def fewer_layers(shape: InklingConfig | Inkling2Config, layers: int) -> InklingConfig | Inkling2Config:
    """The first layers of a model, without its loop."""
    if isinstance(shape, InklingConfig):
        kept = tuple(n for n in shape.local_layer_ids if n < layers)
        return replace(shape, num_hidden_layers=layers, local_layer_ids=kept)
    return replace(shape, num_hidden_layers=layers, sliding=shape.sliding[:layers], loop=None)


def stored_as(
    shape: InklingConfig | Inkling2Config, weights: str, numerics: Numerics = Numerics.W4A16
) -> dict[int, Stored]:
    """How the experts of each layer are stored. `nvfp4`: as published, where the last sixth may be MXFP8."""
    if weights == "bf16":
        return {}
    packed = Stored(WeightFormat.NVFP4, WeightFormat.NVFP4, numerics)
    layers = range(shape.num_hidden_layers)
    if isinstance(shape, InklingConfig):
        return {n: packed for n in layers if not shape.dense(n)}
    first = len(layers) - len(layers) // 6
    last = Stored(WeightFormat.MXFP8, WeightFormat.MXFP8, numerics)
    return {n: packed if n < first else last for n in layers}


def make_model(
    shape: InklingConfig | Inkling2Config,
    weights: str,
    device: torch.device,
    numerics: Numerics = Numerics.W4A16,
    kv_dtype: torch.dtype | None = None,
) -> tuple[Inkling | Inkling2, dict[str, int]]:
    """A model of random weights, and the bytes of its parameters as stored, by slot."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    stored = stored_as(shape, weights, numerics)
    if isinstance(shape, InklingConfig):
        units = shape.expert_intermediate_size
        model: Inkling | Inkling2 = Inkling(shape, Comm.alone(), dtype, device, stored, kv_dtype)
    else:
        units = shape.moe_intermediate_size
        model = Inkling2(shape, Comm.alone(), dtype, device, stored, kv_dtype)
    fill(model, shape.hidden_size, units, shape.route_scale, device)
    sizes = {name: slot.target.numel() * slot.target.element_size() for name, slot in model.slots().items()}
    model.unpack()
    return model, sizes


def fill(model: Model, hidden: int, units: int, route_scale: float, device: torch.device) -> None:
    """Random weights of a model with experts of `units` columns."""
    made = torch.Generator(device).manual_seed(0)
    slots = model.slots()
    for name, slot in slots.items():
        inputs, (base, _, part) = hidden if ".w13" in name else units, name.rpartition(".")
        if part == "original_shape":
            experts, rows, pairs = slots[base + ".codes"].whole
            slot.target.copy_(torch.tensor([experts, rows, 2 * pairs]))
        elif ".experts." in name and part not in ("w13", "w2"):
            fill_stored(part, slot.target, inputs, made)
        else:
            fill_plain(name, slot.target, slot.whole, route_scale, made)


def fill_stored(part: str, target: Tensor, inputs: int, made: torch.Generator) -> None:
    """One part of matrices in codes with `inputs` columns: NVFP4, or MXFP8, whose codes are numbers."""
    if part == "codes" and target.dtype == torch.uint8:
        target.random_(0, 256, generator=made)
    elif part == "codes":
        for matrix in target:
            matrix.copy_(torch.randn(matrix.shape, generator=made, device=target.device))
    elif part == "scales" and target.dtype == torch.uint8:
        target.fill_(127 - round(log2(inputs) / 2))
    elif part == "scales":
        target.copy_(torch.rand(target.shape, generator=made, device=target.device) + 0.5)
    elif part in ("denominator", "input_amax"):
        target.fill_(DENOMINATOR)
    else:  # scale2: what codes of this size must be multiplied by; amax: that times the denominator
        target.fill_((DENOMINATOR if part == "amax" else 1.0) * inputs**-0.5 / E2M1_SIZE / 1.04)


def fill_plain(name: str, target: Tensor, whole: tuple[int, ...], route_scale: float, made: torch.Generator) -> None:
    last = name.rsplit(".", 1)[-1]
    if "norm" in name or last in ("global_scale", "scale"):
        target.fill_(1.0 / route_scale if "router" in name else 1.0)
    elif last == "bias":
        target.zero_()
    elif last == "dynamic":
        target.normal_(0, 0.1 * whole[-1] ** -0.5, generator=made)
    elif "sconv" in name:
        target.normal_(0, 0.1, generator=made)
    elif name.endswith("rel.proj"):
        target.normal_(0, 0.25, generator=made)
    elif name == "embed.weight" or last in ("query", "outer", "inner"):
        target.normal_(0, 1.0, generator=made)
    else:
        target.normal_(0, whole[-1] ** -0.5, generator=made)


def visits_of(shape: InklingConfig | Inkling2Config, name: str) -> int:
    """How often a step uses a parameter. What a loop uses again has left the L2 cache: it is read again."""
    loop = shape.loop if isinstance(shape, Inkling2Config) else None
    if loop is None:
        return 1
    if name.startswith("messenger") or ".gates." in name:
        return loop.passes - 1
    parts = name.split(".")
    inside = parts[0] == "layers" and loop.start <= int(parts[1]) < loop.stop
    return loop.passes if inside else 1


def seen(model: Inkling | Inkling2) -> Iterator[tuple[int | None, int, int]]:
    """(window, numbers of a token's keys and values, their bytes in bf16 or E4M3) of each visit."""
    for state in model.states:
        if state.group in ("full", "window"):
            count = sum(prod(plane.shape) for plane in state.planes)
            yield state.window, count, count * (1 if state.planes[0].dtype == "float8_e4m3fn" else 2)


def floor_seconds(
    shape: InklingConfig | Inkling2Config,
    model: Inkling | Inkling2,
    sizes: dict[str, int],
    batch: int,
    context: int,
    experts: float,
) -> float:
    """Time to read what one step must read: weights used, `experts` of a visit, and keys and values in sight."""
    used = {name: size * visits_of(shape, name) for name, size in sizes.items() if name != "embed.weight"}
    share = experts / shape.n_routed_experts
    total = sum(size * share if ".experts." in name else size for name, size in used.items())
    total += sum(batch * size * min(context, window or context) for window, _, size in seen(model))
    return total / READ_BYTES_A_SECOND


def prefill_operations(
    shape: InklingConfig | Inkling2Config, model: Inkling | Inkling2, sizes: dict[str, int], tokens: int
) -> float:
    """Additions and multiplications of a prompt: products with weights, and scores and sums of attention."""
    each = 0.0
    for name, size in sizes.items():
        if ".experts." not in name and name not in ("embed.weight", "head.weight"):
            each += 2 * size / model.embed.table.element_size() * visits_of(shape, name)
    if isinstance(shape, InklingConfig):
        units, routed = (
            shape.expert_intermediate_size,
            [n for n in range(shape.num_hidden_layers) if not shape.dense(n)],
        )
    else:
        units, routed = shape.moe_intermediate_size, list(range(shape.num_hidden_layers))
    visits = sum(visits_of(shape, f"layers.{n}.") for n in routed)
    each += visits * shape.num_experts_per_tok * 2 * 3 * units * shape.hidden_size
    total = each * tokens
    for window, count, _ in seen(model):
        full = window is None
        heads = shape.num_attention_heads if full else shape.swa_num_attention_heads
        kv = shape.num_key_value_heads if full else shape.swa_num_key_value_heads
        pairs = tokens * (tokens + 1) / 2
        if window is not None and tokens > window:
            pairs = window * (window + 1) / 2 + (tokens - window) * window
        total += pairs * 4 * heads * (count / 2 / kv)
    return total


def measured_peak(device: torch.device, side: int = 8192, count: int = 20) -> float:
    """bf16 operations a second of the library's product of two square matrices."""
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty(side, side, device=device, dtype=torch.bfloat16)
    torch.mm(a, b, out=out)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        torch.mm(a, b, out=out)
    end.record()
    end.synchronize()
    return 2 * side**3 * count / (begin.elapsed_time(end) / 1e3)
