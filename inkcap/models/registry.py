"""How a model is built and loaded from a checkpoint, and which demos there are."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from inkcap.base.checkpoint import read_config
from inkcap.base.errors import ConfigInvalid
from inkcap.base.formats import Numerics, WeightFormat
from inkcap.layers.formats import Stored
from inkcap.models.base import Model
from inkcap.models.families import Entry, TextConfig, expert_names, find_entry
from inkcap.models.inkling.demo import write as write_inkling_demo
from inkcap.models.inkling.model import Inkling
from inkcap.models.inkling.weights import TABLES as INKLING_TABLES
from inkcap.models.inkling2.demo import write as write_inkling2_demo
from inkcap.models.inkling2.demo import write_mini as write_mini_demo
from inkcap.models.inkling2.model import Inkling2
from inkcap.models.inkling2.weights import TABLES as INKLING2_TABLES
from inkcap.parallel.comm import Comm
from inkcap.weights.headers import Headers
from inkcap.weights.load import Loaded, check, load, readers
from inkcap.weights.reader import Checkpoint
from inkcap.weights.rules import Table
from inkcap.weights.scales import check_scales
from inkcap.weights.stored import check_declared, find_formats

MODELS: dict[str, tuple[Callable[..., Model], tuple[Table, ...]]] = {  # of a family: the model, dialects of checkpoints
    "inkling": (Inkling, INKLING_TABLES),
    "inkling2": (Inkling2, INKLING2_TABLES),
}
DEMOS = {"inkling": write_inkling_demo, "inkling2": write_inkling2_demo, "inkling2-mini": write_mini_demo}


def find_stored(
    checkpoint: Headers, declared: Mapping[str, object], layers: int, numerics: Numerics = Numerics.W4A16
) -> dict[int, Stored]:
    """How each layer's experts are stored. `declared`: the parsed config.json. Raises CheckpointMismatch."""
    names = expert_names(layers)
    formats = find_formats(checkpoint, [name for pair in names.values() for name in pair])
    check_declared(checkpoint.directory, declared, formats)
    dense = WeightFormat.DENSE
    return {n: Stored(formats.get(w13, dense), formats.get(w2, dense), numerics) for n, (w13, w2) in names.items()}


def build(
    entry: Entry,
    config: TextConfig,
    comm: Comm,
    dtype: torch.dtype,
    device: torch.device,
    stored: Mapping[int, Stored],
    kv_dtype: torch.dtype | None = None,
) -> Model:
    """The text model without weights; towers and drafters of a checkpoint are left alone."""
    return MODELS[entry.family][0](config, comm, dtype, device, stored, kv_dtype)


def open_model(
    directory: Path,
    *,
    comm: Comm,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool = True,
    numerics: Numerics = Numerics.W4A16,
    kv_dtype: torch.dtype | None = None,
) -> tuple[Model, Callable[[], Loaded]]:
    """Build the model that `directory` (see base.checkpoint.find_checkpoint) holds. Also gives what reads this rank's
    part of it, from any thread; `unpack` comes behind that.

    Names, shapes and scales are checked before anything large is allocated. Both raise CheckpointUnreadable, the first
    also CheckpointMismatch, and ConfigInvalid when the ranks cannot share the model evenly.
    """
    declared = read_config(directory)
    entry = find_entry(declared)
    config, tables = entry.generation.read(declared), MODELS[entry.family][1]
    checkpoint = Checkpoint(directory)
    stored = find_stored(checkpoint, declared, config.num_hidden_layers, numerics)
    check(checkpoint, build(entry, config, comm, dtype, torch.device("meta"), stored).slots(), tables)
    names = [name for pair in expert_names(config.num_hidden_layers).values() for name in pair]
    forms = [form for n in expert_names(config.num_hidden_layers) for form in (stored[n].w13, stored[n].w2)]
    with readers() as pool:
        for _ in pool.map(partial(check_scales, checkpoint), names, forms):
            pass
    model = build(entry, config, comm, dtype, device, stored, kv_dtype)
    return model, partial(load, checkpoint, model.slots(), tables, progress=progress)


def load_model(
    directory: Path,
    *,
    comm: Comm,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool = True,
    numerics: Numerics = Numerics.W4A16,
    kv_dtype: torch.dtype | None = None,
) -> Model:
    """As `open_model`, with everything read."""
    model, read = open_model(
        directory, comm=comm, dtype=dtype, device=device, progress=progress, numerics=numerics, kv_dtype=kv_dtype
    )
    read()
    model.unpack()
    return model


def write_demo(directory: Path, *, family: str = "inkling", seed: int = 0) -> None:
    """A small random checkpoint of `family`, the same bytes for the same seed.

    Raises ConfigInvalid for an unknown family or a directory in use, ModelNotFound when the tokenizer is not installed.
    """
    if family not in DEMOS:
        raise ConfigInvalid(f"there is no demo of family {family!r}; there are {', '.join(DEMOS)}")
    DEMOS[family](directory, seed=seed)
