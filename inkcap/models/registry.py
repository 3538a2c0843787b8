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
from inkcap.weights.rules import Table
from inkcap.weights.stored import check_declared, check_scales, find_formats


@dataclass(frozen=True)
class Generation:
    """What the models of a generation have in common. Functions of a Mapping read a config.json."""

    experts: tuple[str, str]  # names of w13 and w2 of layer `{n}`
    tables: tuple[Table, ...]  # the dialects of its checkpoints
    nvfp4: WeightFormat  # the layout of NVFP4
    mxfp8: bool  # whether there is MXFP8 too
    layers: Callable[[Mapping[str, object]], int]  # how many there are
    quantised: Callable[[Mapping[str, object]], range]  # layers that are quantised where any is
    build: Callable[[Mapping[str, object], Comm, torch.dtype, torch.device, Mapping[int, Stored]], Model]
    """The text model, without weights."""


@dataclass(frozen=True)
class Entry:
    """One kind of model, as named in config.json."""

    architecture: str  # an entry of `architectures`
    model_type: str
    family: str
    reads: str  # for people: what a checkpoint of this kind gives
    generation: Generation


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


def build_inkling(
    config: Mapping[str, object], comm: Comm, dtype: torch.dtype, device: torch.device, stored: Mapping[int, Stored]
) -> Inkling:
    """See Generation; towers and prediction depths of a checkpoint are left alone."""
    return Inkling(InklingConfig.from_json(config), comm, dtype, device, stored)


def count_inkling(config: Mapping[str, object]) -> int:
    """See Generation."""
    return InklingConfig.from_json(config).num_hidden_layers


def quantised_inkling(config: Mapping[str, object]) -> range:
    """All layers with experts but the first, which is published in BF16."""
    read = InklingConfig.from_json(config)
    sparse = [layer for layer in range(read.num_hidden_layers) if not read.dense(layer)]
    return range(sparse[0] + 1 if sparse else read.num_hidden_layers, read.num_hidden_layers)


def build_inkling2(
    config: Mapping[str, object], comm: Comm, dtype: torch.dtype, device: torch.device, stored: Mapping[int, Stored]
) -> Inkling2:
    """See Generation, looped or not; tower and drafter of a checkpoint are left alone."""
    return Inkling2(Inkling2Config.from_json(config), comm, dtype, device, stored)


def count_inkling2(config: Mapping[str, object]) -> int:
    """See Generation."""
    return Inkling2Config.from_json(config).num_hidden_layers


def quantised_inkling2(config: Mapping[str, object]) -> range:
    """All layers."""
    return range(count_inkling2(config))


INKLING = Generation(
    experts=INKLING_EXPERTS,
    tables=INKLING_TABLES,
    nvfp4=WeightFormat.NVFP4_SCALE2,
    mxfp8=False,
    layers=count_inkling,
    quantised=quantised_inkling,
    build=build_inkling,
)
INKLING2 = Generation(
    experts=INKLING2_EXPERTS,
    tables=INKLING2_TABLES,
    nvfp4=WeightFormat.NVFP4,
    mxfp8=True,
    layers=count_inkling2,
    quantised=quantised_inkling2,
    build=build_inkling2,
)
PUBLISHED, SAVED = "text of the published models", "text-only models saved by transformers"
REGISTRY = (
    Entry("InklingForConditionalGeneration", "inkling_mm_model", "inkling", PUBLISHED, INKLING),
    Entry("InklingForCausalLM", "inkling_text", "inkling", SAVED, INKLING),
    Entry("Inkling2ForConditionalGeneration", "inkling2", "inkling2", PUBLISHED, INKLING2),
    Entry("Inkling2ForCausalLM", "inkling2_text", "inkling2", SAVED, INKLING2),
    Entry(
        "Inkling2LoopForConditionalGeneration",
        "inkling2_loop",
        "inkling2",
        "text of the published looped models",
        INKLING2,
    ),
    Entry(
        "Inkling2LoopForCausalLM",
        "inkling2_loop_text",
        "inkling2",
        "looped text-only models saved by transformers",
        INKLING2,
    ),
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
    generation = entry.generation
    checkpoint = Checkpoint(directory)
    stored = find_stored(checkpoint, config, generation.layers(config), generation.experts, numerics)
    model = generation.build(config, comm, dtype, device, stored)
    load(checkpoint, model.slots(), generation.tables, progress=progress)
    model.unpack()
    return model


DEMOS = {"inkling": write_inkling_demo, "inkling2": write_inkling2_demo, "inkling2-mini": write_mini_demo}


def write_demo(directory: Path, *, family: str = "inkling", seed: int = 0) -> None:
    """A small random checkpoint of `family`, the same bytes for the same seed.

    Raises ConfigInvalid for an unknown family or a directory in use, ModelNotFound when the tokenizer is not installed.
    """
    if family not in DEMOS:
        raise ConfigInvalid(f"there is no demo of family {family!r}; there are {', '.join(DEMOS)}")
    DEMOS[family](directory, seed=seed)
