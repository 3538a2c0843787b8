"""Checkpoints with one thing changed, and what became of one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from inkcap.weights.reader import DTYPES, Checkpoint
from inkcap.weights.writer import Planned, write_file


def rewrite(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a checkpoint in one file, with `change` applied to its tensors: name -> tensor."""
    checkpoint = Checkpoint(source)
    checkpoint.open(checkpoint.files)
    tensors = {}
    for name in checkpoint.files:
        stored = checkpoint.stored(name)
        whole = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        checkpoint.read(name, tuple(slice(0, size) for size in stored.shape), whole)
        tensors[name] = whole
    change(tensors)
    target.mkdir()
    write_file(
        target / "model.safetensors",
        {name: Planned(tuple(t.shape), t.dtype, lambda t=t: t) for name, t in tensors.items()},
    )
    for name in ("config.json", "hf_quant_config.json"):
        (target / name).write_text((source / name).read_text())
    return target


def experts_of(layer: Any) -> Any:
    """A layer's experts; inside a loop a layer is wrapped."""
    return getattr(layer, "layer", layer).mlp
