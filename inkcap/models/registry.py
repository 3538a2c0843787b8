"""Which models there are, and how one is built and loaded from a checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from inkcap.base.checkpoint import read_config
from inkcap.base.errors import CheckpointMismatch, ConfigInvalid
from inkcap.base.formats import Numerics, WeightFormat
from inkcap.layers.formats import Stored
from inkcap.models.base import Model
from inkcap.models.inkling.config import InklingConfig
from inkcap.models.inkling.demo import write as write_inkling_demo
from inkcap.models.inkling.model import Inkling
from inkcap.models.inkling.weights import EXPERTS as INKLING_EXPERTS
from inkcap.models.inkling.weights import TABLES as INKLING_TABLES
from inkcap.models.inkling2.config import Inkling2Config
from inkcap.models.inkling2.demo import write as write_inkling2_demo
from inkcap.models.inkling2.demo import write_mini as write_mini_demo
from inkcap.models.inkling2.model import Inkling2
from inkcap.models.inkling2.weights import EXPERTS as INKLING2_EXPERTS
from inkcap.models.inkling2.weights import TABLES as INKLING2_TABLES
from inkcap.parallel.comm import Comm
from inkcap.weights.load import load
from inkcap.weights.reader import Checkpoint
from inkcap.weights.stored import check_declared, check_scales, find_formats


@dataclass(frozen=True)
class Generation:
    """What the models of a generation have in common."""

    experts: tuple[str, str]  # names of w13 and w2 of layer `{n}`
    nvfp4: WeightFormat  # the layout of NVFP4
    mxfp8: bool  # whether there is MXFP8 too
    layers: Callable[[Mapping[str, object]], range]  # that are quantised where any is, from a config.json
    build: Callable[[Mapping[str, object], Comm, torch.dtype, torch.device, Mapping[int, Stored]], Model]


@dataclass(frozen=True)
class Entry:
    """One kind of model, as named in config.json."""

    architecture: str  # an entry of `architectures`
    model_type: str
    family: str
    reads: str  # for people: what a checkpoint of this kind gives
    load: Callable[[Path, Mapping[str, object], Comm, torch.dtype, torch.device, bool, Numerics], Model]
    generation: Generation


def load_inkling(
    directory: Path,
    config: Mapping[str, object],
    comm: Comm,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    numerics: Numerics,
) -> Inkling:
    """The text model of an Inkling checkpoint; towers and prediction depths in it are left alone."""
    if numerics is Numerics.REFERENCE:
        raise ConfigInvalid("reference numerics are there for inkling2 only; run inkling with w4a16")
    read = InklingConfig.from_json(config)
    checkpoint = Checkpoint(directory)
    stored = find_stored(checkpoint, config, read.num_hidden_layers, INKLING_EXPERTS)
    model = Inkling(read, comm, dtype, device, stored)
    load(checkpoint, model.slots(), INKLING_TABLES, progress=progress)
    model.unpack()
    return model


def load_inkling2(
    directory: Path,
    config: Mapping[str, object],
    comm: Comm,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    numerics: Numerics,
) -> Inkling2:
    """The text model of an Inkling 2 checkpoint, looped or not; tower and drafter in it are left alone."""
    read = Inkling2Config.from_json(config)
    checkpoint = Checkpoint(directory)
    stored = find_stored(checkpoint, config, read.num_hidden_layers, INKLING2_EXPERTS, numerics)
    model = Inkling2(read, comm, dtype, device, stored)
    load(checkpoint, model.slots(), INKLING2_TABLES, progress=progress)
    model.unpack()
    return model


def find_stored(
    checkpoint: Checkpoint,
    config: Mapping[str, object],
    layers: int,
    experts: tuple[str, str],
    numerics: Numerics = Numerics.W4A16,
    *,
    check: bool = True,
) -> dict[int, Stored]:
    """How each layer's experts are stored. `experts` names w13 and w2 of layer `{n}`; `check` reads their scales."""
    w13, w2 = experts
    names = {n: (w13.replace("{n}", str(n)), w2.replace("{n}", str(n))) for n in range(layers)}
    formats = find_formats(checkpoint, [name for pair in names.values() for name in pair])
    check_declared(checkpoint.directory, config, formats)
    if check:
        for name, stored in formats.items():
            check_scales(checkpoint, name, stored)
    dense = WeightFormat.DENSE
    return {n: Stored(formats.get(w13, dense), formats.get(w2, dense), numerics) for n, (w13, w2) in names.items()}


def inkling_layers(config: Mapping[str, object]) -> range:
    """All layers with experts but the first, which is published in BF16."""
    read = InklingConfig.from_json(config)
    sparse = [layer for layer in range(read.num_hidden_layers) if not read.dense(layer)]
    return range(sparse[0] + 1 if sparse else read.num_hidden_layers, read.num_hidden_layers)


def inkling2_layers(config: Mapping[str, object]) -> range:
    """All layers."""
    return range(Inkling2Config.from_json(config).num_hidden_layers)


def build_inkling(
    config: Mapping[str, object],
    comm: Comm,
    dtype: torch.dtype,
    device: torch.device,
    stored: Mapping[int, Stored],
) -> Inkling:
    """The text model, without weights."""
    return Inkling(InklingConfig.from_json(config), comm, dtype, device, stored)


def build_inkling2(
    config: Mapping[str, object],
    comm: Comm,
    dtype: torch.dtype,
    device: torch.device,
    stored: Mapping[int, Stored],
) -> Inkling2:
    """The text model, without weights."""
    return Inkling2(Inkling2Config.from_json(config), comm, dtype, device, stored)


INKLING = Generation(INKLING_EXPERTS, WeightFormat.NVFP4_SCALE2, False, inkling_layers, build_inkling)
INKLING2 = Generation(INKLING2_EXPERTS, WeightFormat.NVFP4, True, inkling2_layers, build_inkling2)
REGISTRY = tuple(
    Entry(architecture, model_type, family, reads, loader, generation)
    for family, loader, generation, kinds in (
        (
            "inkling",
            load_inkling,
            INKLING,
            (
                ("InklingForConditionalGeneration", "inkling_mm_model", "text of the published models"),
                ("InklingForCausalLM", "inkling_text", "text-only models saved by transformers"),
            ),
        ),
        (
            "inkling2",
            load_inkling2,
            INKLING2,
            (
                ("Inkling2ForConditionalGeneration", "inkling2", "text of the published models"),
                ("Inkling2ForCausalLM", "inkling2_text", "text-only models saved by transformers"),
                ("Inkling2LoopForConditionalGeneration", "inkling2_loop", "text of the published looped models"),
                ("Inkling2LoopForCausalLM", "inkling2_loop_text", "looped text-only models saved by transformers"),
            ),
        ),
    )
    for architecture, model_type, reads in kinds
)


def supported() -> list[tuple[str, str, str, str]]:
    """(architecture, model_type, family, what it gives) of every model that can be loaded."""
    return [(entry.architecture, entry.model_type, entry.family, entry.reads) for entry in REGISTRY]


def find_entry(config: Mapping[str, object]) -> Entry:
    """The model a config.json names. Raises CheckpointMismatch, listing those there are."""
    architectures, model_type = config.get("architectures"), config.get("model_type")
    named = architectures if isinstance(architectures, list) else []
    for entry in REGISTRY:
        if entry.architecture in named or (not named and entry.model_type == model_type):
            return entry
    known = ", ".join(entry.architecture for entry in REGISTRY)
    raise CheckpointMismatch(
        f"config.json names architectures {architectures!r} and model_type {model_type!r}; supported are {known}"
    )


def load_model(
    directory: Path,
    *,
    comm: Comm,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool = True,
    numerics: Numerics = Numerics.W4A16,
) -> Model:
    """Build the model that `directory` (see base.checkpoint.find_checkpoint) holds, and load this rank's part of it.

    Raises CheckpointUnreadable, CheckpointMismatch, and ConfigInvalid when the ranks cannot share the model evenly.
    """
    config = read_config(directory)
    entry = find_entry(config)
    return entry.load(directory, config, comm, dtype, device, progress, numerics)


DEMOS = {"inkling": write_inkling_demo, "inkling2": write_inkling2_demo, "inkling2-mini": write_mini_demo}


def write_demo(directory: Path, *, family: str = "inkling", seed: int = 0) -> None:
    """A small random checkpoint of `family`, the same bytes for the same seed.

    Raises ConfigInvalid for an unknown family or a directory in use, ModelNotFound when the tokenizer is not installed.
    """
    if family not in DEMOS:
        raise ConfigInvalid(f"there is no demo of family {family!r}; there are {', '.join(DEMOS)}")
    DEMOS[family](directory, seed=seed)
