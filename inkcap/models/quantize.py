"""`inkcap quantize`: a dense checkpoint to NVFP4, MXFP8 or both, in the published layout of its generation.

Streams shard by shard and expert by expert; a shard is written under another name and renamed once complete, so that a
run that was killed goes on where it stopped. `quantize.json` in the target remembers the settings and the errors.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from tqdm import tqdm

from inkcap.base.checkpoint import find_checkpoint, read_config, read_json
from inkcap.base.errors import CheckpointMismatch, ConfigInvalid, NotEnoughMemory
from inkcap.base.formats import WeightFormat
from inkcap.models.families import expert_names, find_entry
from inkcap.models.registry import write_demo
from inkcap.ops.dispatch import bind
from inkcap.ops.quantize import lookup as _lookup  # noqa: F401  declares the fast decoding
from inkcap.ops.quantize.ref import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_TINY,
    FOUR_OVER_SIX_LIMIT,
    MXFP8_BLOCK,
    NVFP4_BLOCK,
    mxfp8_decode,
    mxfp8_encode,
    nvfp4_decode,
    nvfp4_encode,
    nvfp4_encode_four_over_six,
)
from inkcap.weights.headers import INDEX, SINGLE
from inkcap.weights.reader import DTYPES, Checkpoint
from inkcap.weights.stored import find_formats
from inkcap.weights.writer import Planned, write_file

FORMATS = ("nvfp4", "mxfp8", "mixed")
PROGRESS = "quantize.json"
PASS_ENTRIES = 1 << 17  # encoded at once, so that intermediate tensors stay in the cache
UNCALIBRATED_AMAX = E2M1_MAX * E4M3_MAX  # of inputs nobody measured: a scale of one
KEPT_FILES = ("*.json", "*.jinja", "tiktoken/*", "LICENSE*", "README.md")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to write. `mixed` is NVFP4 for the first five sixths of the layers and MXFP8 for the rest, as published."""

    format: str  # nvfp4, mxfp8, mixed
    four_over_six: bool = False

    def of_layer(self, layer: int, layers: int) -> str:
        """nvfp4 or mxfp8."""
        if self.format == "mixed":
            return "nvfp4" if layer < layers - layers // 6 else "mxfp8"
        return self.format


@dataclass(frozen=True)
class TensorError:
    """How far a tensor's decoded values are from the original ones."""

    name: str
    format: str
    relative: float  # root of mean squared error, over the root of the mean square
    largest: float  # absolute


@dataclass(frozen=True)
class Plan:
    """What one source tensor becomes."""

    name: str
    stored: WeightFormat
    settings: Settings
    experts: int
    rows: int
    columns: int


def quantize(source: Path, target: Path, settings: Settings, *, progress: bool = True) -> list[TensorError]:
    """Write a quantised copy of checkpoint `source` into `target`; returns the errors of all quantised tensors.

    Memory: the codes and scales of one tensor, and one expert in fp32. Raises ConfigInvalid for a target in use or
    other settings than those it was begun with, CheckpointMismatch for a source that is quantised or has nothing to
    quantise, NotEnoughMemory when the disk is too small, CheckpointUnreadable.
    """
    checkpoint = Checkpoint(source)
    plans = plan(checkpoint, settings)
    begin(target, source, settings)
    files: dict[Path, list[str]] = {}
    for name, file in checkpoint.files.items():
        files.setdefault(file, []).append(name)
    pending = {file: names for file, names in files.items() if not (target / file.name).exists()}
    check_disk(target, checkpoint, plans, [name for names in pending.values() for name in names])
    errors = recall(target)
    weight_map: dict[str, str] = {}
    with tqdm(total=len(pending), unit="shard", desc="quantizing", disable=None if progress else True) as bar:
        for file, names in files.items():
            planned: dict[str, Planned] = {}
            for name in names:
                planned.update(outputs(checkpoint, name, plans.get(name), errors))
            weight_map.update(dict.fromkeys(planned, file.name))
            if file in pending:
                partial = target / (file.name + ".partial")
                write_file(partial, planned)
                remember(target, settings, source, errors)
                partial.rename(target / file.name)
                bar.update()
    finish(source, target, settings, plans, weight_map)
    return [errors[name] for name in plans]


def plan(checkpoint: Checkpoint, settings: Settings) -> dict[str, Plan]:
    """The tensors to quantise."""
    if settings.format not in FORMATS:
        raise ConfigInvalid(f"format {settings.format!r} is unknown; there are {', '.join(FORMATS)}")
    declared = read_config(checkpoint.directory)
    entry = find_entry(declared)
    way, config = entry.generation, entry.generation.read(declared)
    if settings.format != "nvfp4" and not way.mxfp8:
        raise ConfigInvalid(f"{settings.format} is no format of {entry.family} checkpoints; they have nvfp4 only")
    named = expert_names(config.num_hidden_layers)
    names = {name: layer for layer in config.quantised_layers() for name in named[layer]}
    formats = find_formats(checkpoint, names)
    if not formats:
        raise CheckpointMismatch(f"{checkpoint.directory} has no experts under their published names")
    plans = {}
    for name, stored in formats.items():
        if stored is not WeightFormat.DENSE:
            raise CheckpointMismatch(f"{name} is quantised already ({stored}); give a BF16 checkpoint")
        chosen = settings.of_layer(names[name], config.num_hidden_layers)
        experts, rows, columns = checkpoint.stored(name).shape
        block = NVFP4_BLOCK if chosen == "nvfp4" else MXFP8_BLOCK
        if columns % block:
            raise CheckpointMismatch(f"{name} has rows of {columns}, which blocks of {block} do not divide")
        target = way.nvfp4 if chosen == "nvfp4" else WeightFormat.MXFP8
        plans[name] = Plan(name, target, settings, experts, rows, columns)
    return plans


def outputs(
    checkpoint: Checkpoint, name: str, wanted: Plan | None, errors: dict[str, TensorError]
) -> dict[str, Planned]:
    """The tensors that source tensor `name` becomes: a copy, or codes and what belongs to them."""
    checkpoint.open([name])
    if wanted is None:
        found = checkpoint.stored(name)

        def copy() -> Tensor:
            whole = torch.empty(found.shape, dtype=DTYPES[found.dtype])
            checkpoint.read(name, tuple(slice(0, size) for size in found.shape), whole)
            return whole

        return {name: Planned(found.shape, DTYPES[found.dtype], copy)}
    made: dict[str, Tensor] = {}

    def part(suffix: str) -> Callable[[], Tensor]:
        def make() -> Tensor:
            if suffix not in made:  # all parts are made together, for the first that is written
                made.update(encode(checkpoint, wanted, errors))
            return made.pop(suffix)

        return make

    return {name + suffix: Planned(shape, dtype, part(suffix)) for suffix, (shape, dtype) in shapes(wanted).items()}


def shapes(wanted: Plan) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of the codes and their companions, by suffix."""
    experts, rows, columns = wanted.experts, wanted.rows, wanted.columns
    if wanted.stored is WeightFormat.MXFP8:
        return {
            "": ((experts, rows, columns), torch.float8_e4m3fn),
            "_scale": ((experts, rows, columns // MXFP8_BLOCK), torch.uint8),
        }
    codes = ((experts, rows, columns // 2), torch.uint8)
    scales = ((experts, rows, columns // NVFP4_BLOCK), torch.float8_e4m3fn)
    if wanted.stored is WeightFormat.NVFP4:
        return {
            "": codes,
            "_scale": scales,
            "_amax": ((experts,), torch.float32),
            "_outer_scale_denominator": ((), torch.float32),
        }
    return {
        "": codes,
        ".scale": scales,
        ".scale2": ((experts,), torch.float32),
        ".input_amax": ((1,), torch.bfloat16),
        ".original_shape": ((3,), torch.int64),
    }


def encode(checkpoint: Checkpoint, wanted: Plan, errors: dict[str, TensorError]) -> dict[str, Tensor]:
    """All parts of one tensor, expert by expert, and its error."""
    made = {suffix: torch.empty(shape, dtype=dtype) for suffix, (shape, dtype) in shapes(wanted).items()}
    codes, scales = made[""], made[".scale" if wanted.stored is WeightFormat.NVFP4_SCALE2 else "_scale"]
    limit = FOUR_OVER_SIX_LIMIT if wanted.settings.four_over_six else E4M3_MAX
    denominator = torch.tensor(E2M1_MAX * limit)
    peaks = torch.zeros(wanted.experts)
    squares, error_squares, largest = 0.0, 0.0, 0.0
    dense = torch.empty(1, wanted.rows, wanted.columns)
    for expert in range(wanted.experts):
        index = (slice(expert, expert + 1), slice(0, wanted.rows), slice(0, wanted.columns))
        checkpoint.read(wanted.name, index, dense)
        if not dense.isfinite().all():
            raise CheckpointMismatch(f"{wanted.name} has values that are not finite in expert {expert}")
        peak = dense.abs().amax()
        peaks[expert] = peak
        factor = peak / denominator
        step = max(1, PASS_ENTRIES // wanted.columns)
        for start in range(0, wanted.rows, step):
            part = slice(start, start + step)
            rows = dense[0, part]
            if wanted.stored is WeightFormat.MXFP8:
                codes[expert, part], scales[expert, part] = mxfp8_encode(rows)
            elif wanted.settings.four_over_six:
                codes[expert, part], scales[expert, part], _ = nvfp4_encode_four_over_six(rows, peak, limit)
            else:
                codes[expert, part], scales[expert, part] = nvfp4_encode(rows, factor, floor=E4M3_TINY)
        if wanted.stored is WeightFormat.MXFP8:
            decoded = mxfp8_decode(codes[expert], scales[expert])
        else:
            decoded = nvfp4_decode(codes[expert], scales[expert], factor)
        difference = decoded - dense[0]
        squares += float(dense.square().sum(dtype=torch.float64))
        error_squares += float(difference.square().sum(dtype=torch.float64))
        largest = max(largest, float(difference.abs().max()))
    if wanted.stored is WeightFormat.NVFP4:
        made["_amax"], made["_outer_scale_denominator"] = peaks, denominator
    elif wanted.stored is WeightFormat.NVFP4_SCALE2:
        made[".scale2"] = peaks / denominator
        made[".input_amax"] = torch.tensor([UNCALIBRATED_AMAX], dtype=torch.bfloat16)
        made[".original_shape"] = torch.tensor([wanted.experts, wanted.rows, wanted.columns])
    relative = sqrt(error_squares / squares) if squares else 0.0
    errors[wanted.name] = TensorError(wanted.name, str(wanted.stored), relative, largest)
    return made


def begin(target: Path, source: Path, settings: Settings) -> None:
    """Make the target's folder, or go on with one that was begun with the same source and settings."""
    if target.exists() and any(target.iterdir()) and not (target / PROGRESS).exists():
        raise ConfigInvalid(f"{target} is not empty and was not begun by this command; choose another directory")
    target.mkdir(parents=True, exist_ok=True)
    if not (target / PROGRESS).exists():
        remember(target, settings, source, {})
        return
    begun = read_json(target / PROGRESS)
    now = {"source": str(source.resolve()), "settings": asdict(settings)}
    for key, value in now.items():
        if begun.get(key) != value:
            raise ConfigInvalid(
                f"{target} was begun with {key} {begun.get(key)!r}, not {value!r}; remove it or choose another place"
            )


def recall(target: Path) -> dict[str, TensorError]:
    """The errors of tensors in finished shards."""
    found = read_json(target / PROGRESS).get("errors")
    if not isinstance(found, list):
        raise ConfigInvalid(f"{target / PROGRESS} holds no list of errors; remove {target} and begin again")
    return {error["name"]: TensorError(**error) for error in found}


def remember(target: Path, settings: Settings, source: Path, errors: Mapping[str, TensorError]) -> None:
    """Write the settings and the errors so far, whole or not at all."""
    state = {
        "source": str(source.resolve()),
        "settings": asdict(settings),
        "errors": [asdict(error) for error in errors.values()],
    }
    partial = target / (PROGRESS + ".partial")
    partial.write_text(json.dumps(state, indent=1) + "\n")
    partial.rename(target / PROGRESS)


def check_disk(target: Path, checkpoint: Checkpoint, plans: Mapping[str, Plan], names: list[str]) -> None:
    """Raise NotEnoughMemory when what is left to write does not fit."""
    checkpoint.open(names)
    needed = 0
    for name in names:
        if name in plans:
            needed += sum(Planned(*part, torch.empty).size for part in shapes(plans[name]).values())
        else:
            found = checkpoint.stored(name)
            needed += found.stop - found.start
    free = shutil.disk_usage(target).free
    if needed > free:
        raise NotEnoughMemory(f"{target} has {free / 1e9:.2f} GB free, {needed / 1e9:.2f} GB are to be written")


def finish(
    source: Path, target: Path, settings: Settings, plans: Mapping[str, Plan], weight_map: Mapping[str, str]
) -> None:
    """The small files: those of the source, the index, and what is quantised how."""
    for pattern in KEPT_FILES:
        for file in source.glob(pattern):
            if file.name not in (INDEX, PROGRESS, "config.json", "hf_quant_config.json"):
                place = target / file.relative_to(source)
                place.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, place)
    if not (target / SINGLE).exists():
        total = sum(file.stat().st_size for file in target.glob("*.safetensors"))
        index = {"metadata": {"total_size": total}, "weight_map": dict(weight_map)}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    words = {WeightFormat.MXFP8: "MXFP8"}
    layers = {
        name.rsplit("_weight", 1)[0]: {"quant_algo": words.get(each.stored, "NVFP4")} for name, each in plans.items()
    }
    algorithm = {"nvfp4": "NVFP4", "mxfp8": "MXFP8", "mixed": "MIXED_PRECISION"}[settings.format]
    declared = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "quantized_layers": layers}
    (target / "hf_quant_config.json").write_text(json.dumps({"quantization": declared}, indent=2) + "\n")
    shutil.copyfile(source / "config.json", target / "config.json")  # last: without it this is no checkpoint


def write_quantised_demo(directory: Path, settings: Settings, *, family: str, seed: int = 0) -> None:
    """The demo checkpoint of `family`, quantised. Raises as `write_demo` and `quantize` do."""
    if directory.exists() and any(directory.iterdir()) and not (directory / "demo.json").exists():
        raise ConfigInvalid(f"{directory} is not empty and holds no demo checkpoint; choose another directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory.parent) as scratch:
        dense, packed = Path(scratch) / "dense", Path(scratch) / "packed"
        write_demo(dense, family=family, seed=seed)
        quantize(dense, packed, settings, progress=False)
        (packed / PROGRESS).unlink()
        if directory.exists():
            shutil.rmtree(directory)
        packed.rename(directory)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("source", help="a BF16 checkpoint: a directory or a hub id that is in the local cache")
    parser.add_argument("target", type=Path, help="the directory to write; an unfinished one is gone on with")
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--four-over-six", action="store_true", help="NVFP4 with the better of two scales per block")


def run(arguments: argparse.Namespace) -> int:
    """Quantise one checkpoint and print the error of each tensor."""
    settings = Settings(format=arguments.format, four_over_six=arguments.four_over_six)
    bind(torch.device("cpu"))
    errors = quantize(find_checkpoint(arguments.source), arguments.target, settings)
    width = max(len(error.name) for error in errors)
    print(f"{'tensor':{width}}  {'format':13}  relative   largest")
    for error in errors:
        print(f"{error.name:{width}}  {error.format:13}  {error.relative:8.5f}  {error.largest:8.5f}")
    return 0
