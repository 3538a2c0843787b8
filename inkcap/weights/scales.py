"""Whether the scales of quantised tensors can be right.

Asked before a model is built, so that a broken file costs no large allocation: first the small tensors, then one pass
over the bytes of the block scales.
"""

from math import prod

import torch
from torch import Tensor

from inkcap.base.errors import CheckpointMismatch
from inkcap.base.formats import WeightFormat
from inkcap.weights.reader import DTYPES, Checkpoint
from inkcap.weights.stored import COMPANIONS

E4M3_NAN = 0x7F  # bytes from here on are NaN or have the sign bit
E8M0_NAN = 0xFF
CHECKED_BYTES = 2 << 20  # at a time


def check_scales(checkpoint: Checkpoint, name: str, stored: WeightFormat) -> None:
    """Raise CheckpointMismatch when scales of tensor `name` have values that no quantiser writes; shapes are right."""
    if stored is WeightFormat.DENSE:
        return
    checkpoint.open(name + suffix for suffix in COMPANIONS[stored])
    shape = checkpoint.stored(name).shape
    if stored is WeightFormat.NVFP4:
        _check_positive(checkpoint, name + "_outer_scale_denominator", zero=False)
        factor = _check_positive(checkpoint, name + "_amax", zero=True)
    elif stored is WeightFormat.NVFP4_SCALE2:
        _check_positive(checkpoint, name + ".input_amax", zero=False)
        factor = _check_positive(checkpoint, name + ".scale2", zero=True)
        logical = [*shape[:2], 2 * shape[2]]
        if (said := _small(checkpoint, name + ".original_shape").tolist()) != logical:
            raise CheckpointMismatch(f"{name}.original_shape is {said}, but the tensor holds {logical}")
    else:
        factor = None
    _check_bytes(checkpoint, name + COMPANIONS[stored][0], None if factor is None else factor == 0)


def _small(checkpoint: Checkpoint, name: str) -> Tensor:
    """A whole small tensor."""
    found = checkpoint.stored(name)
    target = torch.empty(found.shape, dtype=DTYPES[found.dtype])
    checkpoint.read(name, tuple(slice(0, size) for size in found.shape), target)
    return target


def _check_positive(checkpoint: Checkpoint, name: str, *, zero: bool) -> Tensor:
    """The values, each finite and above zero, or zero where that may be."""
    values = _small(checkpoint, name).float()
    wrong = ~(values.isfinite() & (values >= 0 if zero else values > 0)).flatten()
    if wrong.any():
        at = int(wrong.nonzero()[0])
        place, least = f"[{at}]" if values.dim() else "", "not negative" if zero else "above 0"
        raise CheckpointMismatch(f"{name}{place} is {values.flatten()[at].item()}; it must be finite and {least}")
    return values


def _check_bytes(checkpoint: Checkpoint, name: str, empty: Tensor | None) -> None:
    """No scale byte is NaN or negative; experts that are `empty` (their factor is 0) have no scale but 0."""
    found = checkpoint.stored(name)
    experts, *rest = found.shape
    several = min(experts, max(1, CHECKED_BYTES // max(1, prod(rest))))
    buffer = torch.empty(several, *rest, dtype=DTYPES[found.dtype])
    limit = E8M0_NAN if found.dtype == "U8" else E4M3_NAN
    for first in range(0, experts, several):
        some = buffer[: experts - first]
        checkpoint.read(name, (slice(first, first + len(some)), *(slice(0, size) for size in rest)), some)
        raw = some.view(torch.uint8)
        # torch would wake its threads for each
        for expert, largest in enumerate(raw.numpy().reshape(len(some), -1).max(1, initial=0).tolist()):
            if largest >= limit:
                row, column = (raw[expert] >= limit).nonzero()[0].tolist()
                byte = int(raw[expert, row, column])
                kind = "NaN" if limit == E8M0_NAN or byte in (0x7F, 0xFF) else "negative"
                raise CheckpointMismatch(f"{name}[{first + expert}, {row}, {column}] is byte {byte}, {kind}")
            if empty is not None and empty[first + expert] and largest:
                raise CheckpointMismatch(
                    f"expert {first + expert} has scales other than 0 in {name}, but its amax or scale2 is 0, which "
                    f"makes it all 0"
                )
