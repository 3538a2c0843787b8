"""Writes safetensors files: the same bytes for the same tensors, one tensor in memory at a time.

Ours because the demo checkpoint promises its bytes, and forty lines spare a dependency.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from inkcap.weights.headers import INDEX
from inkcap.weights.reader import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Planned:
    """A tensor to be written; `make` is called when its turn comes, and must give this shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * self.dtype.itemsize


def write_file(file: Path, tensors: Mapping[str, Planned]) -> None:
    """One safetensors file, tensors in the order given."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, planned in tensors.items():
        offsets = [end, end := end + planned.size]
        header[name] = {"dtype": NAMES[planned.dtype], "shape": list(planned.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for name, planned in tensors.items():
            made = planned.make().contiguous()
            assert (tuple(made.shape), made.dtype) == (planned.shape, planned.dtype), f"{name} is not as planned"
            opened.write(made.flatten().view(torch.uint8).numpy().data)


def write_shards(directory: Path, tensors: Mapping[str, Planned], shards: int) -> None:
    """`shards` files of about equal size, and the index that names them."""
    total = sum(planned.size for planned in tensors.values())
    parts: list[dict[str, Planned]] = [{} for _ in range(shards)]
    before = 0
    for name, planned in tensors.items():
        parts[min(shards - 1, (before + planned.size // 2) * shards // max(1, total))][name] = planned
        before += planned.size
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}-of-{shards:05}.safetensors"
        write_file(directory / file, part)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
