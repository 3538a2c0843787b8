"""`inkcap inspect`: what a checkpoint is and what it takes to run it, from its JSON files and tensor headers alone."""

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from inkcap.base.checkpoint import find_checkpoint, read_config
from inkcap.base.errors import ConfigInvalid
from inkcap.base.formats import WeightFormat
from inkcap.cache.state import LayerState
from inkcap.layers.formats import Stored
from inkcap.models.registry import Entry, find_entry, find_stored
from inkcap.parallel.comm import Comm
from inkcap.weights.reader import Checkpoint

TP_SIZES = (1, 2, 4, 8, 16)
GPU_BYTES = (24e9, 80e9, 141e9, 192e9)
WEIGHT_SHARE = 0.85  # of a GPU; the rest is for the cache, activations and the runtime
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


def inspect(directory: Path) -> Report:
    """Read a checkpoint's headers. Raises CheckpointUnreadable and CheckpointMismatch."""
    config = read_config(directory)
    entry = find_entry(config)
    checkpoint = Checkpoint(directory)
    checkpoint.open(checkpoint.files)
    meta = torch.device("meta")
    dense = entry.generation.build(config, Comm.alone(), torch.bfloat16, meta, {})
    layers = entry.generation.layers(config)
    stored = find_stored(checkpoint, config, layers, entry.generation.experts, check=False)
    formats: dict[WeightFormat, list[int]] = {}
    for layer, form in stored.items():
        if layer in expert_layers(dense.slots()):
            formats.setdefault(form.w13, []).append(layer)
    class_bytes: dict[str, int] = {}
    dtype_bytes: dict[str, int] = {}
    for name in checkpoint.files:
        found = checkpoint.stored(name)
        size = found.stop - found.start
        kind = next((kind for part, kind in CLASSES if part in name), "other")
        class_bytes[kind] = class_bytes.get(kind, 0) + size
        dtype_bytes[found.dtype] = dtype_bytes.get(found.dtype, 0) + size
    grows, fixed = state_bytes(dense.states)
    return Report(
        architecture=entry.architecture,
        family=entry.family,
        layers=layers,
        visits=1 + max(state.visit for state in dense.states),
        max_length=dense.max_length,
        formats=formats,
        class_bytes=class_bytes,
        dtype_bytes=dtype_bytes,
        token_bytes=grows,
        sequence_bytes=fixed,
        sizes=[one_size(entry, config, stored, tp) for tp in TP_SIZES],
    )


def expert_layers(slots: Iterable[str]) -> set[int]:
    """Layers that have experts."""
    return {int(name.split(".")[1]) for name in slots if ".mlp.experts." in name}


def state_bytes(states: Iterable[LayerState]) -> tuple[int, int]:
    """Bytes per token of context, and bytes of a sequence's windows once they are full."""
    grows = fixed = 0
    for state in states:
        width = 0
        for plane in state.planes:
            width += torch.Size(plane.shape).numel() * getattr(torch, plane.dtype).itemsize
        if state.window is None:
            grows += width
        else:
            fixed += width * state.window
    return grows, fixed


def one_size(entry: Entry, config: Mapping[str, object], stored: Mapping[int, Stored], tp: int) -> OneSize:
    """What the first of `tp` ranks holds, with weights as they are stored."""
    try:
        model = entry.generation.build(config, Comm.outline(tp), torch.bfloat16, torch.device("meta"), stored)
    except ConfigInvalid as error:
        return OneSize(tp, 0, 0, str(error))
    weights = sum(slot.target.numel() * slot.target.element_size() for slot in model.slots().values())
    return OneSize(tp, weights, state_bytes(model.states)[0])


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


def run(arguments: argparse.Namespace) -> int:
    """Print the report of one checkpoint."""
    print(render(inspect(find_checkpoint(arguments.model))))
    return 0
