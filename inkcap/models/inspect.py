"""`inkcap inspect`: what a checkpoint is and what it takes to run it, from its JSON files and tensor headers alone.

No torch, which takes longer to import than a hundred headers to read.
"""

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from inkcap.base.checkpoint import find_checkpoint, read_config
from inkcap.base.errors import ConfigInvalid
from inkcap.base.formats import WeightFormat
from inkcap.cache.state import ITEM_BYTES, LayerState
from inkcap.models.families import TextConfig, expert_names, find_entry
from inkcap.parallel.share import Place, Share, split, split_or_repeat
from inkcap.weights.headers import Headers
from inkcap.weights.stored import find_formats

TP_SIZES = (1, 2, 4, 8, 16)
GPU_BYTES = (24e9, 80e9, 141e9, 192e9)
WEIGHT_SHARE = 0.85  # of a GPU; the rest is for the cache, activations and the runtime
NOT_LOADED = ("draft layers", "towers")
CLASSES = (  # what a tensor's name contains, and its class: the first that matches
    ("mtp.", "draft layers"),
    ("model.visual.", "towers"),
    ("model.audio.", "towers"),
    ("vision_tower.", "towers"),
    ("audio_tower.", "towers"),
    (".shared_experts.", "shared experts"),
    (".mlp.experts.", "routed experts"),
    (".mlp.gate.", "routers"),
    ("controllers.", "message gates"),
    ("message_gate.", "message gates"),
    ("sconv", "convolutions"),
    ("convolution", "convolutions"),
    ("norm", "norms and queries"),
    ("quer", "norms and queries"),
    ("l2_clip", "norms and queries"),
    (".attn.", "attention"),
    (".self_attn.", "attention"),
    (".mlp.", "dense MLPs"),
    ("unembed", "head"),
    ("lm_head", "head"),
    ("embed", "embedding"),
)


SPREAD = (  # what a tensor's name contains, and the units of which ranks have shares: the first that matches
    ("unembed.", "words"),
    ("lm_head.", "words"),
    ("_proj.proj", "nothing"),
    ("_amax", "nothing"),
    (".scale2", "nothing"),
    ("_denominator", "nothing"),
    (".original_shape", "nothing"),
    (".mlp.gate.", "nothing"),
    (".mlp.experts.", "expert"),
    (".shared_experts.", "expert"),
    (".mlp.w", "dense"),
    (".mlp.gate_proj", "dense"),
    (".mlp.up_proj", "dense"),
    (".mlp.down_proj", "dense"),
    ("attn.wk_", "kv"),
    ("attn.wv_", "kv"),
    ("attn.k_proj", "kv"),
    ("attn.v_proj", "kv"),
    ("attn.k_sconv", "kv"),
    ("attn.v_sconv", "kv"),
    ("attn.w", "query"),
    ("attn.gate_attn", "query"),
    ("attn.attn_sink_proj", "query"),
    ("_l2_clip.", "query"),
    ("attn.q_proj", "query"),
    ("attn.r_proj", "query"),
    ("attn.o_proj", "query"),
)
BLOCKS = {WeightFormat.NVFP4: 16, WeightFormat.NVFP4_SCALE2: 16, WeightFormat.MXFP8: 32}  # columns under one scale
DTYPE = "bfloat16"  # of state, but for keys and values in codes
CACHE_DTYPES = {"auto": None, "bf16": None, "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}


@dataclass(frozen=True)
class Rank:
    """One of `size` ranks."""

    rank: int
    size: int


@dataclass(frozen=True)
class OneSize:
    """What one rank of `tp` holds; `reason` says why there cannot be so many, if so."""

    tp: int
    weight_bytes: int
    token_bytes: int  # of cache that grows with the context
    reason: str | None = None


@dataclass(frozen=True)
class Report:
    """Everything that is printed."""

    architecture: str
    family: str
    layers: int
    visits: int
    max_length: int
    formats: dict[WeightFormat, list[int]]  # layers whose experts have it
    class_bytes: dict[str, int]
    dtype_bytes: dict[str, int]
    token_bytes: int  # of cache per token of context, on one rank
    sequence_bytes: int  # of state that does not grow, per sequence, on one rank
    sizes: list[OneSize]


def inspect(directory: Path, kv_dtype: str | None = None) -> Report:
    """Read a checkpoint's headers; keys and values are cached in bfloat16, or in `kv_dtype`.

    Raises CheckpointUnreadable and CheckpointMismatch.
    """
    declared = read_config(directory)
    entry = find_entry(declared)
    config = entry.generation.read(declared)
    checkpoint = Headers(directory)
    checkpoint.open(checkpoint.files)
    names = expert_names(config.num_hidden_layers)
    stored = find_formats(checkpoint, [name for pair in names.values() for name in pair])
    formats: dict[WeightFormat, list[int]] = {}
    for layer in config.expert_layers():
        formats.setdefault(stored.get(names[layer][0], WeightFormat.DENSE), []).append(layer)
    class_bytes: dict[str, int] = {}
    dtype_bytes: dict[str, int] = {}
    for name in checkpoint.files:
        found = checkpoint.stored(name)
        kind, size = kind_of(name), found.stop - found.start
        class_bytes[kind] = class_bytes.get(kind, 0) + size
        dtype_bytes[found.dtype] = dtype_bytes.get(found.dtype, 0) + size
    states = config.states(Rank(0, 1), DTYPE, kv_dtype)
    grows, fixed = state_bytes(states)
    return Report(
        architecture=entry.architecture,
        family=entry.family,
        layers=config.num_hidden_layers,
        visits=1 + max(state.visit for state in states),
        max_length=config.max_length,
        formats=formats,
        class_bytes=class_bytes,
        dtype_bytes=dtype_bytes,
        token_bytes=grows,
        sequence_bytes=fixed,
        sizes=[one_size(checkpoint, config, stored, tp, kv_dtype) for tp in TP_SIZES],
    )


def kind_of(name: str) -> str:
    """The class of a tensor."""
    return next((kind for part, kind in CLASSES if part in name), "other")


def state_bytes(states: Iterable[LayerState]) -> tuple[int, int]:
    """Bytes per token of context, and bytes of a sequence's windows once they are full."""
    grows = fixed = 0
    for state in states:
        width = sum(prod(plane.shape) * ITEM_BYTES[plane.dtype] for plane in state.planes)
        if state.window is None:
            grows += width
        else:
            fixed += width * state.window
    return grows, fixed


def one_size(
    checkpoint: Headers, config: TextConfig, stored: Mapping[str, WeightFormat], tp: int, kv_dtype: str | None
) -> OneSize:
    """What the first of `tp` ranks holds, with weights as they are stored."""
    place, total = Rank(0, tp), 0
    try:
        for name, form in stored.items():
            if form in BLOCKS and ".w2_" in name:
                split(config.expert_width, place, "width of an expert").check_blocks(BLOCKS[form])
        for name in checkpoint.files:
            if kind_of(name) not in NOT_LOADED:
                found, share = checkpoint.stored(name), share_of(name, config, place)
                total += (found.stop - found.start) * share.count // share.whole
        return OneSize(tp, total, state_bytes(config.states(place, DTYPE, kv_dtype))[0])
    except ConfigInvalid as error:
        return OneSize(tp, 0, 0, str(error))


def share_of(name: str, config: TextConfig, place: Place) -> Share:
    """A rank's part of a tensor. Raises ConfigInvalid when the ranks cannot share it evenly."""
    units = next((units for part, units in SPREAD if part in name), "nothing")
    if units == "words":
        return split(config.vocab_size, place, "vocabulary")
    if units == "expert":
        return split(config.expert_width, place, "width of an expert")
    if units == "dense" and config.dense_width is not None:
        return split(config.dense_width, place, "width of the dense MLP")
    if units in ("query", "kv"):
        size = config.attention(int(name.split(".layers.")[1].split(".")[0]))
        if units == "query":
            return split(size.heads, place, "number of query heads")
        return split_or_repeat(size.kv_heads, place, "number of kv heads")
    return Share(0, 1, 1)


def render(report: Report) -> str:
    """The report as text."""
    total = sum(report.class_bytes.values())
    looped = f", visited {report.visits} times in all" if report.visits != report.layers else ""
    lines = [
        f"{report.architecture} (family {report.family})",
        f"  {report.layers} layers{looped}, context of {report.max_length:,} tokens",
        "",
        "experts",
        *(f"  {form:14} layers {ranges(layers)}" for form, layers in report.formats.items()),
        "",
        f"{'bytes of weights':24}{total:>18,}",
        *(f"  {kind:22}{size:>18,}" for kind, size in sorted(report.class_bytes.items(), key=lambda item: -item[1])),
        "  as " + ", ".join(f"{dtype} {size / total:.1%}" for dtype, size in sorted(report.dtype_bytes.items())),
        "",
        f"{'cache per token':24}{report.token_bytes:>18,}",
        f"{'state per sequence':24}{report.sequence_bytes:>18,}",
        "",
        f"{'TP':>4}{'weights a rank':>18}{'cache a token':>16}   GPUs that hold it, of 24, 80, 141 and 192 GB",
    ]
    for size in report.sizes:
        if size.reason is not None:
            lines.append(f"{size.tp:>4}  not possible: {size.reason}")
            continue
        fits = [f"{gpu / 1e9:.0f}" for gpu in GPU_BYTES if size.weight_bytes <= WEIGHT_SHARE * gpu]
        answer = f"{size.tp} x {fits[0]} GB" if fits else "none"
        lines.append(f"{size.tp:>4}{size.weight_bytes:>18,}{size.token_bytes:>16,}   {answer}")
    return "\n".join(lines)


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{low}-{high}" if high > low else f"{low}" for low, high in parts)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("model", help="a directory or a hub id that is in the local cache")
    parser.add_argument("--kv-cache-dtype", choices=CACHE_DTYPES, default="auto", help="of keys and values")


def run(arguments: argparse.Namespace) -> int:
    """Print the report of one checkpoint."""
    print(render(inspect(find_checkpoint(arguments.model), CACHE_DTYPES[arguments.kv_cache_dtype])))
    return 0
