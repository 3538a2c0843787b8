"""A small checkpoint in the published layout, with random weights: for trying the engine, for tests and for benchmarks.

It knows no language, but it keeps the chat format, so that servers and clients have something to show: eight channels
of the residual stream are left alone by every layer; embeddings write into them what kind of token this is, and the
head reads there which control token may follow. All else is noise of a size that keeps activations near one.
"""

import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class DemoShape:
    """Numbers of a demo. The default is small, yet every feature of the architecture is at work within 100 tokens."""

    hidden: int = 64
    layers: int = 8
    global_every: int = 4  # layers 3, 7, ... see everything
    dense: int = 2  # first layers
    heads: int = 4
    kv_heads: int = 2
    local_kv_heads: int = 4
    head_dim: int = 16
    window: int = 16  # tokens
    d_rel: int = 8
    extent: int = 48  # tokens
    floor: int = 64  # tokens, of the log scaling
    dense_width: int = 128
    expert_width: int = 32
    experts: int = 8
    chosen: int = 2
    shared: int = 2
    vocabulary: int = CHAT_VOCABULARY
    padded_vocabulary: int = 201024
    max_length: int = 32768  # tokens
    shards: int = 3

    def config(self) -> dict[str, object]:
        """config.json in the published dialect."""
        text = {
            "model_max_length": self.max_length,
            "torch_dtype": "bfloat16",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "vocab_size": self.padded_vocabulary,
            "unpadded_vocab_size": self.vocabulary,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "swa_num_attention_heads": self.heads,
            "swa_num_key_value_heads": self.local_kv_heads,
            "swa_head_dim": self.head_dim,
            "sliding_window_size": self.window,
            "local_layer_ids": [layer for layer in range(self.layers) if self.local(layer)],
            "d_rel": self.d_rel,
            "rel_extent": self.extent,
            "log_scaling_n_floor": self.floor,
            "log_scaling_alpha": 0.1,
            "q_bias": False,
            "o_bias": False,
            "rms_norm_eps": 1e-6,
            "use_embed_norm": True,
            "use_sconv": True,
            "sconv_kernel_size": 4,
            "dense_mlp_idx": self.dense,
            "dense_intermediate_size": self.dense_width,
            "intermediate_size": self.expert_width,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "n_shared_experts": self.shared,
            "shared_expert_sink": True,
            "gate_activation": "sigmoid",
            "norm_after_topk": True,
            "use_gate_bias": True,
            "use_global_scale": True,
            "route_scale": float(self.chosen + self.shared),
            "logits_mup_width_multiplier": 2.0,
            "final_logit_softcapping": None,
        }
        return {
            "architectures": ["InklingForConditionalGeneration"],
            "model_type": "inkling_mm_model",
            "eos_token_id": END_SAMPLING,
            "text_config": text,
        }

    def local(self, layer: int) -> bool:
        """Whether the layer has a sliding window."""
        return layer % self.global_every != self.global_every - 1


def write(directory: Path, *, seed: int = 0, shape: DemoShape | None = None) -> None:
    """Write a checkpoint: the same bytes for the same seed and shape. Tokenizer files only with the chat vocabulary.

    Raises ConfigInvalid for a directory that holds something else, ModelNotFound when the rank file is not installed.
    """
    shape = DemoShape() if shape is None else shape
    if directory.exists() and any(directory.iterdir()) and not (directory / "demo.json").exists():
        raise ConfigInvalid(f"{directory} is not empty and holds no demo checkpoint; choose another directory")
    ranks = _rank_file() if shape.vocabulary == CHAT_VOCABULARY else None
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").unlink(missing_ok=True)  # last to be written: without it this is no checkpoint
    (directory / "demo.json").write_text(json.dumps({"seed": seed}) + "\n")
    write_shards(directory, dict(_tensors(shape, seed)), shape.shards)
    if ranks is not None:
        (directory / "tiktoken").mkdir(exist_ok=True)
        shutil.copyfile(ranks, directory / "tiktoken" / "tokenizer.model")
        tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape.max_length}
        (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2) + "\n")
    (directory / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n")


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


def _tensors(shape: DemoShape, seed: int) -> Iterator[tuple[str, Planned]]:
    """Name and contents of every tensor, in the order of the files."""

    def noise(
        name: str, size: tuple[int, ...], spread: float, *, mean: float = 0.0, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[str, Planned]:
        return name, Planned(size, dtype, lambda: (_uniform(seed, name, size) * spread + mean).to(dtype))

    hidden, padded = shape.hidden, shape.padded_vocabulary
    embed = Planned((padded, hidden), torch.bfloat16, lambda: _embedding(seed, shape))
    yield "model.llm.embed.weight", embed
    yield noise("model.llm.embed_norm.weight", (hidden,), 0.0, mean=1.0)
    for layer in range(shape.layers):
        prefix = f"model.llm.layers.{layer}."
        yield from _attention(prefix, shape, shape.local(layer), noise)
        yield from _mlp(prefix, shape, layer < shape.dense, noise)
    yield noise("model.llm.norm.weight", (hidden,), 0.0, mean=1.0)
    yield "model.llm.unembed.weight", Planned((padded, hidden), torch.bfloat16, lambda: _unembedding(seed, shape))


Noise = Callable[..., tuple[str, Planned]]


def _attention(prefix: str, shape: DemoShape, local: bool, noise: Noise) -> Iterator[tuple[str, Planned]]:
    hidden, size = shape.hidden, shape.head_dim
    queries, keys = shape.heads * size, (shape.local_kv_heads if local else shape.kv_heads) * size
    unit = hidden**-0.5
    yield noise(prefix + "attn_norm.weight", (hidden,), 0.1, mean=1.0)
    yield noise(prefix + "attn.wq_du.weight", (queries, hidden), unit)
    yield noise(prefix + "attn.wk_dv.weight", (keys, hidden), unit)
    yield noise(prefix + "attn.wv_dv.weight", (keys, hidden), unit)
    yield noise(prefix + "attn.wr_du.weight", (shape.heads * shape.d_rel, hidden), unit)
    yield _kept(noise(prefix + "attn.wo_ud.weight", (hidden, queries), 0.5 * queries**-0.5), dim=0)
    # scores are q.k / size, so that these give them a spread of one
    yield noise(prefix + "attn.q_norm.weight", (size,), 0.1, mean=size**0.25)
    yield noise(prefix + "attn.k_norm.weight", (size,), 0.1, mean=size**0.25)
    yield noise(prefix + "attn.k_sconv.weight", (keys, 1, 4), 0.3)
    yield noise(prefix + "attn.v_sconv.weight", (keys, 1, 4), 0.3)
    extent = shape.window if local else shape.extent
    yield noise(prefix + "attn.rel_logits_proj.proj", (shape.d_rel, extent), shape.d_rel**-0.5)
    yield noise(prefix + "attn_sconv.weight", (hidden, 1, 4), 0.3)


def _mlp(prefix: str, shape: DemoShape, dense: bool, noise: Noise) -> Iterator[tuple[str, Planned]]:
    hidden, experts, shared = shape.hidden, shape.experts, shape.shared
    unit = hidden**-0.5
    yield noise(prefix + "mlp_norm.weight", (hidden,), 0.1, mean=1.0)
    if dense:
        width = shape.dense_width
        yield noise(prefix + "mlp.w13_dn.weight", (2 * width, hidden), unit)
        yield _kept(noise(prefix + "mlp.w2_md.weight", (hidden, width), 0.6 * width**-0.5), dim=0)
        yield noise(prefix + "mlp.global_scale", (1,), 0.1, mean=1.0)
    else:
        width = shape.expert_width
        down = 0.6 * width**-0.5 * (shape.chosen + shared) ** -0.5
        yield noise(prefix + "mlp.experts.w13_weight", (experts, 2 * width, hidden), unit)
        yield _kept(noise(prefix + "mlp.experts.w2_weight", (experts, hidden, width), down), dim=1)
        yield noise(prefix + "mlp.gate.weight", (experts + shared, hidden), unit)
        yield noise(prefix + "mlp.gate.bias", (experts,), 0.05, dtype=torch.float32)
        yield noise(prefix + "mlp.gate.global_scale", (1,), 0.1, mean=1.0, dtype=torch.float32)
        yield noise(prefix + "mlp.shared_experts.shared_w13_weight", (shared, 2 * width, hidden), unit)
        yield _kept(noise(prefix + "mlp.shared_experts.shared_w2_weight", (shared, hidden, width), down), dim=1)
    yield noise(prefix + "mlp_sconv.weight", (hidden, 1, 4), 0.3)


def _uniform(seed: int, name: str, size: tuple[int, ...]) -> Tensor:
    """Noise of mean 0 and spread 1, a function of seed and name alone.

    Made of raw bits and one exact scaling, because libraries promise the bits of a generator but not its distributions.
    """
    count = int(np.prod(size))
    raw = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())])).random_raw(-(-count // 4))
    steps = torch.from_numpy(raw.astype("<u8", copy=False).view("<u2")[:count].astype(np.float32)).view(size)
    return (steps - 32767.5) * (3**0.5 / 32768)


def _kept(planned: tuple[str, Planned], dim: int) -> tuple[str, Planned]:
    """The same matrix with zeros where it would write to the kept channels."""
    name, inner = planned

    def make() -> Tensor:
        made = inner.make()
        made.narrow(dim, 0, KEPT).zero_()
        return made

    return name, Planned(inner.shape, inner.dtype, make)


def _embedding(seed: int, shape: DemoShape) -> Tensor:
    rows = _uniform(seed, "embed", (shape.padded_vocabulary, shape.hidden))
    rows[:, :KEPT] = 0
    rows[:ORDINARY, TEXT] = 1
    if shape.vocabulary == CHAT_VOCABULARY:
        rows[END_MESSAGE, CLOSED] = 4
        rows[MESSAGE_MODEL, ROLE] = 4
    return rows.to(torch.bfloat16)


def _unembedding(seed: int, shape: DemoShape) -> Tensor:
    rows = _uniform(seed, "unembed", (shape.padded_vocabulary, shape.hidden))
    rows[:, :KEPT] = 0
    if shape.vocabulary == CHAT_VOCABULARY:
        rows[ORDINARY : shape.vocabulary] = 0
        rows[MESSAGE_MODEL, CLOSED] = 32
        rows[CONTENT_TEXT, ROLE] = 32
        rows[END_SAMPLING, TEXT] = 45  # ends answers after about a hundred tokens
    return rows.to(torch.bfloat16)
