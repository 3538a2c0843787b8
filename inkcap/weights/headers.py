"""What safetensors files say they hold, of which nothing is believed that the files do not bear out. No torch.

A file is 8 bytes of header length, a JSON header, and data. Everything the header claims is compared with the size of
the file before a byte of data is touched.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from inkcap.base.checkpoint import read_json, without_repetition
from inkcap.base.errors import CheckpointMismatch, CheckpointUnreadable

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEADER_BYTES = 100 << 20  # the format's own limit
ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file: `shape` of `dtype` at bytes [start, stop) of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def parse_header(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file. Raises CheckpointUnreadable when the header does not fit the file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            if size < 8:
                raise _corrupt(file, f"it has {size} bytes, less than a header's length takes")
            length = int.from_bytes(opened.read(8), "little")
            if length > min(size - 8, HEADER_BYTES):
                raise _corrupt(file, f"its header claims {length} bytes; {min(size - 8, HEADER_BYTES)} are possible")
            text = opened.read(length)
    except FileNotFoundError:
        raise CheckpointUnreadable(f"{file} is missing") from None
    except OSError as error:
        raise CheckpointUnreadable(f"{file} cannot be read: {error}") from error
    try:
        header = json.loads(text, object_pairs_hook=without_repetition)
    except (ValueError, RecursionError) as error:
        raise _corrupt(file, f"its header is not readable: {error}") from error
    if not isinstance(header, dict):
        raise _corrupt(file, "its header is no JSON object")
    header.pop("__metadata__", None)
    data = 8 + length
    tensors = {name: _entry(file, name, entry, data) for name, entry in header.items()}
    _check_coverage(file, tensors, data, size)
    return tensors


@dataclass(slots=True)
class Headers:
    """The tensors of a directory: one `model.safetensors`, or the shards an index names. Headers are read when wanted.

    Raises CheckpointUnreadable for files that are missing or broken, CheckpointMismatch for an index and files that
    disagree.
    """

    directory: Path
    files: dict[str, Path] = field(init=False)  # of each tensor
    tensors: dict[Path, dict[str, Stored]] = field(init=False, default_factory=dict)  # of the files read so far

    def __post_init__(self) -> None:
        single, index = self.directory / SINGLE, self.directory / INDEX
        if single.exists():
            self.tensors[single] = parse_header(single)
            self.files = dict.fromkeys(self.tensors[single], single)
        elif index.exists():
            self.files = _read_index(index)
        else:
            raise CheckpointUnreadable(
                f"{self.directory} has neither {SINGLE} nor {INDEX}; weights are read from safetensors files only"
            )

    def open(self, names: Iterable[str]) -> None:
        """Read the headers of the files that hold these tensors, so that `stored` finds them."""
        wanted: dict[Path, list[str]] = {}
        for name in names:
            wanted.setdefault(self.files[name], []).append(name)
        absent = sorted(file.name for file in wanted if not file.exists())
        if absent:
            raise CheckpointUnreadable(
                f"{self.directory} lacks {_few(absent)}, named in {INDEX}: the copy is incomplete, fetch it again"
            )
        for file, held in wanted.items():
            if file not in self.tensors:
                self.tensors[file] = parse_header(file)
            if lost := [name for name in held if name not in self.tensors[file]]:
                raise CheckpointMismatch(f"{INDEX} places {_few(lost)} in {file.name}, which has no such tensor")
            if twice := [name for name in self.tensors[file] if self.files.get(name, file) != file]:
                other = self.files[twice[0]].name
                raise CheckpointMismatch(f"{file.name} holds {_few(twice)}, which {INDEX} places in {other}")

    def stored(self, name: str) -> Stored:
        """Where and what a tensor of an open file is."""
        return self.tensors[self.files[name]][name]


def _entry(file: Path, name: str, entry: object, data: int) -> Stored:
    """One header entry, checked by itself."""
    if not isinstance(entry, dict):
        raise _corrupt(file, f"its entry for {name} is no JSON object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _corrupt(file, f"{name} has dtype {dtype!r}; known are {', '.join(ITEM_BYTES)}")
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 1 << 48 for size in shape):
        raise _corrupt(file, f"{name} has shape {shape!r}")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(offset) is int for offset in offsets)
        or not 0 <= offsets[0] <= offsets[1]
    ):
        raise _corrupt(file, f"{name} has data_offsets {offsets!r}")
    size = prod(shape) * ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != size:
        raise _corrupt(file, f"{name} is {dtype} {shape}, {size} bytes, but has {offsets[1] - offsets[0]}")
    return Stored(dtype, tuple(shape), data + offsets[0], data + offsets[1])


def _check_coverage(file: Path, tensors: dict[str, Stored], data: int, size: int) -> None:
    """Tensors follow each other without gap or overlap and end where the file ends, as the format demands."""
    end, before = data, "the header"
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if stored.start != end:
            fault = "overlaps" if stored.start < end else "leaves a gap after"
            raise _corrupt(file, f"{name} {fault} {before}")
        end, before = stored.stop, name
    if end > size:
        raise _corrupt(file, f"it is truncated: its tensors end at byte {end}, the file has {size}")
    if end < size:
        raise _corrupt(file, f"{size - end} bytes follow its last tensor")


def _read_index(index: Path) -> dict[str, Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointUnreadable(f"{index} has no weight_map")
    for name, file in weight_map.items():
        # A name with a folder in it could point outside the checkpoint.
        if not isinstance(file, str) or not file.endswith(".safetensors") or os.path.basename(file) != file:
            raise CheckpointUnreadable(f"{index} places {name} in {file!r}, which is no name of a safetensors file")
    return {name: index.parent / file for name, file in weight_map.items()}


def _corrupt(file: Path, what: str) -> CheckpointUnreadable:
    return CheckpointUnreadable(f"{file} is no sound safetensors file: {what}")


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
