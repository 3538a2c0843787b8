"""Which tensors of a checkpoint are quantised, and whether their scales can be right: read from the files, not assumed.

Done before a model is built, so that a broken file costs no large allocation: headers first, then the small tensors,
then one pass over the bytes of the block scales.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from inkcap.base.checkpoint import read_json
from inkcap.base.errors import CheckpointMismatch
from inkcap.base.formats import WeightFormat
from inkcap.base.log import logger
from inkcap.weights.reader import DTYPES, Checkpoint

DENSE_DTYPES = ("BF16", "F16", "F32")
COMPANIONS = {
    WeightFormat.DENSE: (),
    WeightFormat.NVFP4: ("_scale", "_amax", "_outer_scale_denominator"),
    WeightFormat.NVFP4_SCALE2: (".scale", ".scale2", ".input_amax", ".original_shape"),
    WeightFormat.MXFP8: ("_scale",),
}
EVERY_COMPANION = tuple(dict.fromkeys(suffix for suffixes in COMPANIONS.values() for suffix in suffixes))
DECLARED = {  # words of config files, and the formats that files of that word may hold
    "nvfp4": {WeightFormat.NVFP4, WeightFormat.NVFP4_SCALE2},
    "mxfp8": {WeightFormat.MXFP8},
    "mixed_precision": {WeightFormat.NVFP4, WeightFormat.NVFP4_SCALE2, WeightFormat.MXFP8},
}
E4M3_NAN = 0x7F  # bytes from here on are NaN or have the sign bit
E8M0_NAN = 0xFF


def find_formats(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, WeightFormat]:
    """The format of each of these tensors that the checkpoint has, from its dtype and the tensors named after it.

    Raises CheckpointMismatch for a combination that is no format this engine reads.
    """
    present = [name for name in names if name in checkpoint.files]
    checkpoint.open(present)
    return {name: _format(checkpoint, name) for name in present}


def _format(checkpoint: Checkpoint, name: str) -> WeightFormat:
    dtype = checkpoint.stored(name).dtype
    beside = [suffix for suffix in EVERY_COMPANION if name + suffix in checkpoint.files]
    if dtype in DENSE_DTYPES and not beside:
        return WeightFormat.DENSE
    if dtype == "U8" and beside:
        first = beside[0].startswith(".")
        found = WeightFormat.NVFP4_SCALE2 if first else WeightFormat.NVFP4
    elif dtype == "F8_E4M3":
        found = WeightFormat.MXFP8
    else:
        has = f"with {', '.join(name + suffix for suffix in beside)} beside it" if beside else "without any scale"
        raise CheckpointMismatch(
            f"{name} is {dtype} {has}, which is no known format; known are BF16, F16 or F32 without scales, U8 with "
            "NVFP4 scales and F8_E4M3 with MXFP8 scales"
        )
    lacking = [name + suffix for suffix in COMPANIONS[found] if suffix not in beside]
    if lacking:
        raise CheckpointMismatch(f"{name} is {dtype}, so {found}, but {', '.join(lacking)} is missing")
    return found


def check_declared(directory: Path, config: Mapping[str, object], formats: Mapping[str, WeightFormat]) -> None:
    """Compare what the JSON files declare with what the tensors are. The tensors win, and a difference is logged.

    Raises CheckpointMismatch when a declared algorithm is unknown, and CheckpointUnreadable.
    """
    declarations: list[object] = [config.get("quantization_config")]
    if (directory / "hf_quant_config.json").exists():
        declarations.append(read_json(directory / "hf_quant_config.json"))
    words: set[str] = set()
    for key, value in _entries(declarations):
        if key == "quant_algo" and value is not None:
            word = str(value).lower()
            if word not in DECLARED:
                raise CheckpointMismatch(
                    f"{directory} declares quant_algo {value!r}; known are {', '.join(map(str.upper, DECLARED))}"
                )
            words.add(word)
        if key in ("group_size", "weight_block_size", "block_size") and isinstance(value, list) and len(value) == 2:
            logger.info("%s declares %s %r; the stored scales' shapes are used", directory, key, value)
    allowed = set().union(*(DECLARED[word] for word in words))
    found = {stored for stored in formats.values() if stored is not WeightFormat.DENSE}
    if words and found - allowed:
        said, is_ = ", ".join(sorted(words)), ", ".join(sorted(found))
        logger.warning("%s declares %s, but its tensors are %s; the tensors are believed", directory, said, is_)


def _entries(value: object) -> Iterator[tuple[str, object]]:
    """Every (key, value) in nested JSON."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key), inner
            yield from _entries(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _entries(inner)


def check_scales(checkpoint: Checkpoint, name: str, stored: WeightFormat) -> None:
    """Raise CheckpointMismatch when scales of tensor `name` have the wrong shape or values no quantiser writes."""
    if stored is WeightFormat.DENSE:
        return
    checkpoint.open(name + suffix for suffix in COMPANIONS[stored])
    shape = checkpoint.stored(name).shape
    if len(shape) != 3:
        raise CheckpointMismatch(f"{name} is {stored} {list(shape)}; only [experts, rows, columns] can be")
    per = 32 if stored is WeightFormat.MXFP8 else 8  # entries of a row under one scale
    scale = name + COMPANIONS[stored][0]
    wanted = "U8" if stored is WeightFormat.MXFP8 else "F8_E4M3"
    _expect(checkpoint, scale, wanted, (*shape[:2], shape[2] // per))
    if shape[2] % per:
        raise CheckpointMismatch(f"{name} has rows of {shape[2]} entries, which scales of {per} each do not divide")
    if stored is WeightFormat.NVFP4:
        _expect(checkpoint, name + "_amax", "F32", shape[:1])
        _expect(checkpoint, name + "_outer_scale_denominator", "F32", ())
        _check_positive(checkpoint, name + "_outer_scale_denominator", zero=False)
        factor = _check_positive(checkpoint, name + "_amax", zero=True)
    elif stored is WeightFormat.NVFP4_SCALE2:
        _expect(checkpoint, name + ".scale2", "F32", shape[:1])
        _check_positive(checkpoint, name + ".input_amax", zero=False)
        factor = _check_positive(checkpoint, name + ".scale2", zero=True)
        logical = [*shape[:2], 2 * shape[2]]
        if (said := _small(checkpoint, name + ".original_shape").tolist()) != logical:
            raise CheckpointMismatch(f"{name}.original_shape is {said}, but the tensor holds {logical}")
    else:
        factor = None
    _check_bytes(checkpoint, scale, None if factor is None else factor == 0)


def _expect(checkpoint: Checkpoint, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    found = checkpoint.stored(name)
    if (found.dtype, found.shape) != (dtype, shape):
        raise CheckpointMismatch(f"{name} is {found.dtype} {list(found.shape)}, wanted {dtype} {list(shape)}")


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
    buffer = torch.empty(1, *found.shape[1:], dtype=DTYPES[found.dtype])
    raw = buffer.view(torch.uint8)
    limit = E8M0_NAN if found.dtype == "U8" else E4M3_NAN
    for expert in range(found.shape[0]):
        everything = tuple(slice(0, size) for size in found.shape[1:])
        checkpoint.read(name, (slice(expert, expert + 1), *everything), buffer)
        largest = int(raw.max()) if raw.numel() else 0
        if largest >= limit:
            _, row, column = (raw >= limit).nonzero()[0].tolist()
            kind = "NaN" if limit == E8M0_NAN or raw[0, row, column] in (0x7F, 0xFF) else "negative"
            raise CheckpointMismatch(f"{name}[{expert}, {row}, {column}] is byte {int(raw[0, row, column])}, {kind}")
        if empty is not None and empty[expert] and largest:
            raise CheckpointMismatch(
                f"expert {expert} has scales other than 0 in {name}, but its amax or scale2 is 0, which makes it all 0"
            )
