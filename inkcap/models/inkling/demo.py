"""A small Inkling checkpoint in the published layout, with random weights: to try the engine, for tests and benchmarks.

It keeps the chat format (see models/demo.py). All else is noise of a size that keeps activations near one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from inkcap.models.demo import (
    CHAT_VOCABULARY,
    END_SAMPLING,
    Noise,
    embedding,
    kept,
    noise_of,
    unembedding,
    write_checkpoint,
)
from inkcap.weights.writer import Planned


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
    length = shape.max_length if shape.vocabulary == CHAT_VOCABULARY else None
    tensors = dict(_tensors(shape, seed))
    write_checkpoint(directory, seed, shape.config(), tensors, shape.shards, tokenizer_length=length)


def _tensors(shape: DemoShape, seed: int) -> Iterator[tuple[str, Planned]]:
    """Name and contents of every tensor, in the order of the files."""
    noise = noise_of(seed)
    hidden, padded = shape.hidden, shape.padded_vocabulary
    size = (padded, hidden)
    embed = Planned(size, torch.bfloat16, lambda: embedding(seed, shape.vocabulary, size))
    yield "model.llm.embed.weight", embed
    yield noise("model.llm.embed_norm.weight", (hidden,), 0.0, mean=1.0)
    for layer in range(shape.layers):
        prefix = f"model.llm.layers.{layer}."
        yield from _attention(prefix, shape, shape.local(layer), noise)
        yield from _mlp(prefix, shape, layer < shape.dense, noise)
    yield noise("model.llm.norm.weight", (hidden,), 0.0, mean=1.0)
    # at 45, answers end after about a hundred tokens
    unembed = Planned(size, torch.bfloat16, lambda: unembedding(seed, shape.vocabulary, size, ends=45))
    yield "model.llm.unembed.weight", unembed


def _attention(prefix: str, shape: DemoShape, local: bool, noise: Noise) -> Iterator[tuple[str, Planned]]:
    hidden, size = shape.hidden, shape.head_dim
    queries, keys = shape.heads * size, (shape.local_kv_heads if local else shape.kv_heads) * size
    unit = hidden**-0.5
    yield noise(prefix + "attn_norm.weight", (hidden,), 0.1, mean=1.0)
    yield noise(prefix + "attn.wq_du.weight", (queries, hidden), unit)
    yield noise(prefix + "attn.wk_dv.weight", (keys, hidden), unit)
    yield noise(prefix + "attn.wv_dv.weight", (keys, hidden), unit)
    yield noise(prefix + "attn.wr_du.weight", (shape.heads * shape.d_rel, hidden), unit)
    yield kept(noise(prefix + "attn.wo_ud.weight", (hidden, queries), 0.5 * queries**-0.5), dim=0)
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
        yield kept(noise(prefix + "mlp.w2_md.weight", (hidden, width), 0.6 * width**-0.5), dim=0)
        yield noise(prefix + "mlp.global_scale", (1,), 0.1, mean=1.0)
    else:
        width = shape.expert_width
        down = 0.6 * width**-0.5 * (shape.chosen + shared) ** -0.5
        yield noise(prefix + "mlp.experts.w13_weight", (experts, 2 * width, hidden), unit)
        yield kept(noise(prefix + "mlp.experts.w2_weight", (experts, hidden, width), down), dim=1)
        yield noise(prefix + "mlp.gate.weight", (experts + shared, hidden), unit)
        yield noise(prefix + "mlp.gate.bias", (experts,), 0.05, dtype=torch.float32)
        yield noise(prefix + "mlp.gate.global_scale", (1,), 0.1, mean=1.0, dtype=torch.float32)
        yield noise(prefix + "mlp.shared_experts.shared_w13_weight", (shared, 2 * width, hidden), unit)
        yield kept(noise(prefix + "mlp.shared_experts.shared_w2_weight", (shared, hidden, width), down), dim=1)
    yield noise(prefix + "mlp_sconv.weight", (hidden, 1, 4), 0.3)
