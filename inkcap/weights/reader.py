"""Reads tensors out of safetensors files, slice by slice, and believes nothing the files say about themselves.

A file is 8 bytes of header length, a JSON header, and data. Everything the header claims is compared with the size of
the file before a byte of data is touched; tensors are then windows of a memory map, so a rank reads only its part.
"""

import json
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from inkcap.base.checkpoint import read_json, without_repetition
from inkcap.base.errors import CheckpointMismatch, CheckpointUnreadable

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEADER_BYTES = 100 << 20  # the format's own limit
BOUNCE_BYTES = 8 << 20  # of a tensor that changes its dtype or device, at a time
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
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
class Checkpoint:
    """The tensors of a directory: one `model.safetensors`, or the shards an index names. Files open when wanted.

    Raises CheckpointUnreadable for files that are missing or broken, CheckpointMismatch for an index and files that
    disagree.
    """

    directory: Path
    files: dict[str, Path] = field(init=False)  # of each tensor
    bytes_read: int = field(init=False, default=0)
    _tensors: dict[Path, dict[str, Stored]] = field(init=False, default_factory=dict)
    _maps: dict[Path, mmap.mmap] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        single, index = self.directory / SINGLE, self.directory / INDEX
        if single.exists():
            self._tensors[single] = parse_header(single)
            self.files = dict.fromkeys(self._tensors[single], single)
        elif index.exists():
            self.files = _read_index(index)
        else:
            raise CheckpointUnreadable(
                f"{self.directory} has neither {SINGLE} nor {INDEX}; weights are read from safetensors files only"
            )

    def open(self, names: Iterable[str]) -> None:
        """Read the headers of the files that hold these tensors, so that `stored` and `read` find them."""
        wanted: dict[Path, list[str]] = {}
        for name in names:
            wanted.setdefault(self.files[name], []).append(name)
        absent = sorted(file.name for file in wanted if not file.exists())
        if absent:
            raise CheckpointUnreadable(
                f"{self.directory} lacks {_few(absent)}, named in {INDEX}: the copy is incomplete, fetch it again"
            )
        for file, held in wanted.items():
            if file not in self._tensors:
                self._tensors[file] = parse_header(file)
            if lost := [name for name in held if name not in self._tensors[file]]:
                raise CheckpointMismatch(f"{INDEX} places {_few(lost)} in {file.name}, which has no such tensor")
            if twice := [name for name in self._tensors[file] if self.files.get(name, file) != file]:
                other = self.files[twice[0]].name
                raise CheckpointMismatch(f"{file.name} holds {_few(twice)}, which {INDEX} places in {other}")

    def stored(self, name: str) -> Stored:
        """Where and what a tensor of an open file is."""
        return self._tensors[self.files[name]][name]

    def read(self, name: str, index: tuple[slice, ...], target: Tensor) -> None:
        """Fill `target`, of any strides, with the part `index` of a tensor, one slice of step 1 per dimension.

        The dtype is converted to the target's, one rounding. Only the pages that hold the part are touched.
        """
        stored = self.stored(name)
        if not stored.shape:  # a scalar is read as one entry
            target = target.view(1)
        source = self._window(self.files[name], stored)[_byte_index(index, stored)]
        dtype = DTYPES[stored.dtype]
        assert source.shape[:-1] == target.shape[:-1], f"{name}{index} is {source.shape}, target {target.shape}"
        assert source.shape[-1] == target.shape[-1] * dtype.itemsize, f"{name}{index}: width {source.shape[-1]} bytes"
        if source.size == 0:
            return
        if target.device.type == "cpu" and target.dtype == dtype and (target.stride(-1) == 1 or target.shape[-1] == 1):
            np.copyto(_bytes_of(target), source)
        else:
            _copy_by_bounce(source, dtype, target)
        self.bytes_read += source.size
        # Pages stay in the page cache but no longer count as this process's memory.
        first = stored.start // mmap.PAGESIZE * mmap.PAGESIZE
        self._maps[self.files[name]].madvise(mmap.MADV_DONTNEED, first, stored.stop - first)

    def _window(self, file: Path, stored: Stored) -> np.ndarray:
        """A tensor's bytes, [..., last dimension's bytes], uint8: data may start at odd offsets. Never written to."""
        if file not in self._maps:
            with file.open("rb") as opened:
                # A private writable map, because torch warns about arrays that cannot be written.
                self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        flat = np.frombuffer(self._maps[file], np.uint8, stored.stop - stored.start, stored.start)
        shape = stored.shape or (1,)
        return flat.reshape(*shape[:-1], shape[-1] * DTYPES[stored.dtype].itemsize)


def _entry(file: Path, name: str, entry: object, data: int) -> Stored:
    """One header entry, checked by itself."""
    if not isinstance(entry, dict):
        raise _corrupt(file, f"its entry for {name} is no JSON object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _corrupt(file, f"{name} has dtype {dtype!r}; known are {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 1 << 48 for size in shape):
        raise _corrupt(file, f"{name} has shape {shape!r}")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(offset) is int for offset in offsets)
        or not 0 <= offsets[0] <= offsets[1]
    ):
        raise _corrupt(file, f"{name} has data_offsets {offsets!r}")
    size = prod(shape) * DTYPES[dtype].itemsize
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


def _byte_index(index: tuple[slice, ...], stored: Stored) -> tuple[slice, ...]:
    """The same part of the [..., bytes] window."""
    if not stored.shape:
        return (slice(None),)
    width = DTYPES[stored.dtype].itemsize
    start, stop, step = index[-1].indices(stored.shape[-1])
    assert step == 1, "parts have no step"
    return (*index[:-1], slice(start * width, stop * width))


def _bytes_of(target: Tensor) -> np.ndarray:
    """A view of a CPU tensor whose last dimension is dense, as [..., bytes]."""
    if target.shape[-1] == 1:  # any stride is dense then, but torch wants to see a 1
        target = target.as_strided(target.shape, (*target.stride()[:-1], 1))
    return target.view(torch.uint8).numpy()


def _copy_by_bounce(source: np.ndarray, dtype: torch.dtype, target: Tensor) -> None:
    """Through an aligned buffer, some leading rows at a time."""
    if source.size > BOUNCE_BYTES and source.ndim > 1:
        if len(source) == 1:
            _copy_by_bounce(source[0], dtype, target[0])
            return
        rows = max(1, BOUNCE_BYTES * len(source) // source.size)
        for at in range(0, len(source), rows):
            _copy_by_bounce(source[at : at + rows], dtype, target[at : at + rows])
        return
    if not source.flags.c_contiguous or source.ctypes.data % dtype.itemsize:
        source = source.copy()
    target.copy_(torch.from_numpy(source).view(dtype))


def _corrupt(file: Path, what: str) -> CheckpointUnreadable:
    return CheckpointUnreadable(f"{file} is no sound safetensors file: {what}")


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
