"""Which tensors of a checkpoint are quantised, and how: read from the headers, not assumed. No torch."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from inkcap.base.checkpoint import read_json
from inkcap.base.errors import CheckpointMismatch
from inkcap.base.formats import WeightFormat
from inkcap.base.log import logger
from inkcap.weights.headers import Headers

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


def find_formats(checkpoint: Headers, names: Iterable[str]) -> dict[str, WeightFormat]:
    """The format of each of these tensors that the checkpoint has, from its dtype and the tensors named after it.

    Raises CheckpointMismatch for a combination that is no format this engine reads.
    """
    present = [name for name in names if name in checkpoint.files]
    checkpoint.open(present)
    return {name: _format(checkpoint, name) for name in present}


def _format(checkpoint: Headers, name: str) -> WeightFormat:
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
