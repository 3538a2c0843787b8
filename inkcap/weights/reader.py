"""Reads tensors out of safetensors files, slice by slice, straight into the memory they are for.

Files are read, not mapped: new memory fills a third faster so, and a file that is cut short while it is read is an
error instead of the end of the process.
"""

import os
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from inkcap.base.errors import CheckpointUnreadable
from inkcap.weights.headers import Headers

BOUNCE_BYTES = 1 << 20  # of a tensor that changes its dtype or strides, at a time: stays in a core's cache
PINNED_BYTES = 32 << 20  # of one that goes to a GPU: each copy waits for the interpreter's lock, which others hold
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


@dataclass(slots=True)
class Checkpoint(Headers):
    """The tensors of a directory, to be read; by several threads at once, if need be."""

    @torch.inference_mode()  # which a thread begins without
    def read(self, name: str, index: tuple[slice, ...], target: Tensor) -> None:
        """Fill `target`, of any strides, with the part `index` of a tensor, one slice of step 1 per dimension.

        The dtype is converted to the target's, one rounding. Raises CheckpointUnreadable when the file has changed.
        """
        stored, file, dtype = self.stored(name), self.files[name], DTYPES[self.stored(name).dtype]
        if not stored.shape:  # a scalar is read as one entry
            target, index = target.view(1), (slice(0, 1),)
        part = tuple(slice(*cut.indices(size)) for cut, size in zip(index, stored.shape or (1,), strict=True))
        assert all(cut.step == 1 for cut in part), "parts have no step"
        assert tuple(cut.stop - cut.start for cut in part) == tuple(target.shape), f"{name}{index} for {target.shape}"
        if not target.numel():
            return
        try:
            with file.open("rb", buffering=0) as opened:
                _fill(opened.fileno(), stored.start, stored.shape or (1,), part, dtype, target)
        except OSError as error:
            raise CheckpointUnreadable(f"{file} cannot be read: {error}") from error
        except EOFError:
            raise CheckpointUnreadable(
                f"{file} was cut short after its header was read: {name} is beyond its end"
            ) from None


def _fill(
    file: int, at: int, shape: tuple[int, ...], part: tuple[slice, ...], dtype: torch.dtype, target: Tensor
) -> None:
    """`target` with `part` of a tensor of this shape and dtype, which stands at byte `at` of the file."""
    entry = prod(shape[1:]) * dtype.itemsize  # bytes
    at += part[0].start * entry
    whole = all(cut.stop - cut.start == size for cut, size in zip(part[1:], shape[1:], strict=True))
    alike = whole and target.device.type == "cpu" and target.dtype == dtype
    if alike and target.is_contiguous():
        _read_exactly(file, at, target)
        return
    matrices = len(shape) > 2 and (not whole or (alike and target[0].is_contiguous()))
    pinned = target.device.type == "cuda"
    most = PINNED_BYTES if pinned else BOUNCE_BYTES
    if len(shape) > 1 and (entry > most or matrices):
        for row, inner in enumerate(target):
            _fill(file, at + row * entry, shape[1:], part[1:], dtype, inner)
        return
    step = min(len(target), max(1, most // entry))
    # for a GPU it is locked, so that it can copy out of it; a thread begins with the first GPU, which may be another's
    with torch.cuda.device(target.device) if pinned else nullcontext():
        bounce = torch.empty(step * entry, dtype=torch.uint8, pin_memory=pinned)
    for row in range(0, len(target), step):
        rows = target[row : row + step]
        held = bounce[: len(rows) * entry]
        _read_exactly(file, at + row * entry, held)
        rows.copy_(held.view(dtype).view(len(rows), *shape[1:])[(slice(None), *part[1:])])


def _read_exactly(file: int, at: int, target: Tensor) -> None:
    """Fill a contiguous CPU tensor with the bytes from `at` on. Raises EOFError when the file ends before."""
    left = target.view(-1).view(torch.uint8).numpy().data
    while left:  # one call reads at most 2 GiB
        got = os.preadv(file, [left], at)
        if not got:
            raise EOFError
        left, at = left[got:], at + got
