"""What the demo checkpoints of all generations share: noise, the channels that keep the chat format, and the files.

The models know no language, but they keep the chat format, so that servers and clients have something to show: eight
channels of the residual stream are left alone by every layer; embeddings write into them what kind of token this is,
and the head reads there which control token may follow.
"""

import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from inkcap.base.errors import ConfigInvalid, ModelNotFound
from inkcap.weights.writer import Planned, write_shards

END_MESSAGE, MESSAGE_MODEL, CONTENT_TEXT, END_SAMPLING = 200010, 200001, 200004, 200006
ORDINARY = 199998  # ids below it are text
CHAT_VOCABULARY = 200058
KEPT = 8  # channels no layer writes to
TEXT, CLOSED, ROLE = range(3)  # channel: the token is text, ends a message, names a role

Noise = Callable[..., tuple[str, Planned]]


def write_checkpoint(
    directory: Path,
    seed: int,
    config: Mapping[str, object],
    tensors: Mapping[str, Planned],
    shards: int,
    *,
    tokenizer_length: int | None,
) -> None:
    """Write a checkpoint, with tokenizer files of that length in tokens unless it is None.

    Raises ConfigInvalid for a directory that holds something else, ModelNotFound when the rank file is not installed.
    """
    if directory.exists() and any(directory.iterdir()) and not (directory / "demo.json").exists():
        raise ConfigInvalid(f"{directory} is not empty and holds no demo checkpoint; choose another directory")
    ranks = None if tokenizer_length is None else _rank_file()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").unlink(missing_ok=True)  # last to be written: without it this is no checkpoint
    (directory / "demo.json").write_text(json.dumps({"seed": seed}) + "\n")
    write_shards(directory, tensors, shards)
    if ranks is not None:
        (directory / "tiktoken").mkdir(exist_ok=True)
        shutil.copyfile(ranks, directory / "tiktoken" / "tokenizer.model")
        tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": tokenizer_length}
        (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2) + "\n")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _rank_file() -> Path:
    """The byte-pair ranks that tml-renderers carries. The package itself is not imported."""
    spec = find_spec("tml_renderers")
    file = Path(spec.origin).parent / "data" / "o200k_base.tiktoken" if spec and spec.origin else None
    if file is None or not file.is_file():
        raise ModelNotFound(
            "the demo's tokenizer comes from the package tml-renderers, which is not installed: "
            "pip install 'inkcap[demo]'"
        )
    return file


def noise_of(seed: int) -> Noise:
    """Makes planned tensors of noise from a name, a size, a spread and a mean."""

    def noise(
        name: str, size: tuple[int, ...], spread: float, *, mean: float = 0.0, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[str, Planned]:
        return name, Planned(size, dtype, lambda: (uniform(seed, name, size) * spread + mean).to(dtype))

    return noise


def uniform(seed: int, name: str, size: tuple[int, ...]) -> Tensor:
    """Noise of mean 0 and spread 1, a function of seed and name alone.

    Made of raw bits and one exact scaling, because libraries promise the bits of a generator but not its distributions.
    """
    count = int(np.prod(size))
    raw = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())])).random_raw(-(-count // 4))
    steps = torch.from_numpy(raw.astype("<u8", copy=False).view("<u2")[:count].astype(np.float32)).view(size)
    return (steps - 32767.5) * (3**0.5 / 32768)


def kept(planned: tuple[str, Planned], dim: int) -> tuple[str, Planned]:
    """The same matrix with zeros where it would write to the kept channels."""
    name, inner = planned

    def make() -> Tensor:
        made = inner.make()
        made.narrow(dim, 0, KEPT).zero_()
        return made

    return name, Planned(inner.shape, inner.dtype, make)


def embedding(seed: int, vocabulary: int, size: tuple[int, int]) -> Tensor:
    """Noise, and what kind of token a row is for."""
    rows = uniform(seed, "embed", size)
    rows[:, :KEPT] = 0
    rows[:ORDINARY, TEXT] = 1
    if vocabulary == CHAT_VOCABULARY:
        rows[END_MESSAGE, CLOSED] = 4
        rows[MESSAGE_MODEL, ROLE] = 4
    return rows.to(torch.bfloat16)


def unembedding(
    seed: int, vocabulary: int, size: tuple[int, int], *, ends: float, forced: float = 32, spread: float = 1.0
) -> Tensor:
    """Noise of that spread, and how the kind of a token raises the logits of what may follow.

    `ends`: of the end of an answer behind text; `forced`: of the only token that may follow.
    """
    rows = uniform(seed, "unembed", size) * spread
    rows[:, :KEPT] = 0
    if vocabulary == CHAT_VOCABULARY:
        rows[ORDINARY:vocabulary] = 0
        rows[MESSAGE_MODEL, CLOSED] = forced
        rows[CONTENT_TEXT, ROLE] = forced
        rows[END_SAMPLING, TEXT] = ends
    return rows.to(torch.bfloat16)
