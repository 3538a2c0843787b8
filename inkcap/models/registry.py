"""Which models there are, and how one is built and loaded from a checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from inkcap.base.checkpoint import read_config
from inkcap.base.errors import CheckpointMismatch, ConfigInvalid
from inkcap.models.base import Model
from inkcap.models.inkling.config import InklingConfig
from inkcap.models.inkling.demo import write as write_inkling_demo
from inkcap.models.inkling.model import Inkling
from inkcap.models.inkling.weights import TABLES as INKLING_TABLES
from inkcap.parallel.comm import Comm
from inkcap.weights.load import load
from inkcap.weights.reader import Checkpoint


@dataclass(frozen=True)
class Entry:
    """One kind of model, as named in config.json."""

    architecture: str  # an entry of `architectures`
    model_type: str
    family: str
    reads: str  # for people: what a checkpoint of this kind gives
    load: Callable[[Path, Mapping[str, object], Comm, torch.dtype, torch.device, bool], Model]


def load_inkling(
    directory: Path,
    config: Mapping[str, object],
    comm: Comm,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
) -> Inkling:
    """The text model of an Inkling checkpoint; towers and prediction depths in it are left alone."""
    model = Inkling(InklingConfig.from_json(config), comm, dtype, device)
    load(Checkpoint(directory), model.slots(), INKLING_TABLES, progress=progress)
    return model


REGISTRY = (
    Entry(
        "InklingForConditionalGeneration", "inkling_mm_model", "inkling", "text of the published models", load_inkling
    ),
    Entry("InklingForCausalLM", "inkling_text", "inkling", "text-only models saved by transformers", load_inkling),
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
    directory: Path, *, comm: Comm, dtype: torch.dtype, device: torch.device, progress: bool = True
) -> Model:
    """Build the model that `directory` (see base.checkpoint.find_checkpoint) holds, and load this rank's part of it.

    Raises CheckpointUnreadable, CheckpointMismatch, and ConfigInvalid when the ranks cannot share the model evenly.
    """
    config = read_config(directory)
    entry = find_entry(config)
    if (directory / "hf_quant_config.json").exists() or config.get("quantization_config") is not None:
        raise CheckpointMismatch(
            f"{directory} holds quantised weights, which this version does not read; use a BF16 one"
        )
    return entry.load(directory, config, comm, dtype, device, progress)


DEMOS = {"inkling": write_inkling_demo}


def write_demo(directory: Path, *, family: str = "inkling", seed: int = 0) -> None:
    """A small random checkpoint of `family`, the same bytes for the same seed.

    Raises ConfigInvalid for an unknown family or a directory in use, ModelNotFound when the tokenizer is not installed.
    """
    if family not in DEMOS:
        raise ConfigInvalid(f"there is no demo of family {family!r}; there are {', '.join(DEMOS)}")
    DEMOS[family](directory, seed=seed)
