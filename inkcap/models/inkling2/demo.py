"""A small Inkling 2 checkpoint, with or without a loop, in the published layout with random weights.

It keeps the chat format (see models/demo.py): only the embedding has the kept channels, so the last query looks for
them. All else is noise of a size that keeps activations near one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import torch
from torch import Tensor

from inkcap.models.demo import (
    CHAT_VOCABULARY,
    CLOSED,
    END_SAMPLING,
    KEPT,
    ROLE,
    TEXT,
    Noise,
    embedding,
    kept,
    noise_of,
    unembedding,
    uniform,
    write_checkpoint,
)
from inkcap.weights.writer import Planned


@dataclass(frozen=True, kw_only=True)
class DemoShape:
    """Numbers of a demo. The default is small, yet every feature of the architecture is at work within 100 tokens."""

    hidden: int = 64
    layers: int = 6
    full_every: int = 3  # layers 2, 5, ... see everything
    block: int = 3  # layers in a residual block
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    window: int = 16  # tokens
    d_rel: int = 8
    extent: int = 48  # tokens
    floor: int = 64  # tokens, of the log scaling
    expert_width: int = 32
    experts: int = 8
    chosen: int = 2
    loop: tuple[int, int] | None = None  # first layer of the loop and the one behind it
    passes: int = 3
    gate_rank: int = 4
    vocabulary: int = CHAT_VOCABULARY
    padded_vocabulary: int = 201024
    max_length: int = 32768  # tokens
    shards: int = 3

    def config(self) -> dict[str, object]:
        """config.json in the published dialect."""
        text: dict[str, object] = {
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
            "swa_num_key_value_heads": self.kv_heads,
            "swa_head_dim": self.head_dim,
            "sliding_window_size": self.window,
            "local_layer_ids": [layer for layer in range(self.layers) if self.sliding(layer)],
            "d_rel": self.d_rel,
            "rel_extent": self.extent,
            "log_scaling_n_floor": self.floor,
            "log_scaling_alpha": 0.1,
            "rms_norm_eps": 1e-6,
            "sconv_kernel_size": 4,
            "intermediate_size": self.expert_width,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "routed_scaling_factor": float(self.chosen),
            "scoring_func": "sigmoid",
            "mlp_gate_softcap": 4.0,
            "mlp_up_softcap": 25.0,
            "final_logit_softcapping": 30.0,
            "qk_l2_clip_threshold": 2 * sqrt(self.head_dim),
            "rel_l2_clip_threshold": 2 * sqrt(self.d_rel),
            "n_layers_per_attnres_block": self.block,
            "use_value_norm_no_gamma": True,
        }
        if self.loop is not None:
            start, stop = self.loop
            names = {"core_start": start, "core_end": stop, "num_passes": self.passes, "gate_rank": self.gate_rank}
            text["loop_config"] = names
        kind = "Inkling2" if self.loop is None else "Inkling2Loop"
        return {
            "architectures": [f"{kind}ForConditionalGeneration"],
            "model_type": "inkling2" if self.loop is None else "inkling2_loop",
            "eos_token_id": END_SAMPLING,
            "text_config": text,
        }

    def sliding(self, layer: int) -> bool:
        """Whether the layer has a sliding window."""
        return layer % self.full_every != self.full_every - 1

    def looped(self, layer: int) -> bool:
        """Whether the layer belongs to the loop."""
        return self.loop is not None and self.loop[0] <= layer < self.loop[1]


MINI = DemoShape(layers=9, loop=(3, 6))


def write(directory: Path, *, seed: int = 0, shape: DemoShape | None = None) -> None:
    """Write a checkpoint: the same bytes for the same seed and shape. Tokenizer files only with the chat vocabulary.

    Raises ConfigInvalid for a directory that holds something else, ModelNotFound when the rank file is not installed.
    """
    shape = DemoShape() if shape is None else shape
    length = shape.max_length if shape.vocabulary == CHAT_VOCABULARY else None
    tensors = dict(_tensors(shape, seed))
    write_checkpoint(directory, seed, shape.config(), tensors, shape.shards, tokenizer_length=length)


def write_mini(directory: Path, *, seed: int = 0) -> None:
    """The same with a loop."""
    write(directory, seed=seed, shape=MINI)


def _tensors(shape: DemoShape, seed: int) -> Iterator[tuple[str, Planned]]:
    """Name and contents of every tensor, in the order of the files."""
    noise = noise_of(seed)
    hidden, size = shape.hidden, (shape.padded_vocabulary, shape.hidden)
    llm = "model.llm."
    embed = Planned(size, torch.bfloat16, lambda: embedding(seed, shape.vocabulary, size))
    yield llm + "embed.weight", embed
    yield noise(llm + "embed_norm.weight", (hidden,), 0.0, mean=1.0)
    for layer in range(shape.layers):
        prefix = f"{llm}layers.{layer}."
        yield from _attention(prefix, shape, layer, noise)
        yield from _mlp(prefix, shape, noise)
        if shape.looped(layer):
            yield from _gates(prefix, shape, noise)
        if layer:
            queries = (hidden,) if shape.sliding(layer) else (3, hidden)
            yield noise(f"{llm}attn_res.attn_queries.{layer - 1}", queries, 1.0, dtype=torch.float32)
        yield noise(f"{llm}attn_res.mlp_queries.{layer}", (hidden,), 1.0, dtype=torch.float32)
    if shape.loop is not None:
        rows = 2 * (shape.loop[1] - shape.loop[0])
        yield noise(llm + "middle_cycle_cross_pass_queries", (rows, hidden), 1.0, dtype=torch.float32)
        yield noise(llm + "middle_cycle_cross_pass_kv_queries", (rows, hidden), 1.0, dtype=torch.float32)
    yield llm + "attn_res.output_query", Planned((hidden,), torch.float32, lambda: _output_query(seed, hidden))
    yield noise(llm + "norm.weight", (hidden,), 0.0, mean=1.0)
    # at these, one token in a hundred ends an answer, and the soft cap leaves the others far behind a forced one
    unembed = Planned(
        size, torch.bfloat16, lambda: unembedding(seed, shape.vocabulary, size, ends=17, forced=32, spread=0.5)
    )
    yield llm + "unembed.weight", unembed


def _output_query(seed: int, hidden: int) -> Tensor:
    """Finds the embedding by its kept channels: about half of the mixture for text, most of it for control tokens."""
    query = uniform(seed, "output_query", (hidden,)) * 0.3
    query[:KEPT] = 0
    query[[TEXT, CLOSED, ROLE]] = 6.0
    return query


def _attention(prefix: str, shape: DemoShape, layer: int, noise: Noise) -> Iterator[tuple[str, Planned]]:
    hidden, heads, size = shape.hidden, shape.heads, shape.head_dim
    queries, keys, sliding = heads * size, shape.kv_heads * size, shape.sliding(layer)
    unit = hidden**-0.5
    for name in ("attn_norm",) if sliding else ("q_input_norm", "k_input_norm", "v_input_norm"):
        yield noise(f"{prefix}{name}.weight", (hidden,), 0.1, mean=1.0)
    yield noise(prefix + "attn.wq_du.weight", (queries, hidden), unit)
    yield noise(prefix + "attn.wk_dv.weight", (keys, hidden), unit)
    yield noise(prefix + "attn.wv_dv.weight", (keys, hidden), unit)
    yield noise(prefix + "attn.wr_du.weight", (heads * shape.d_rel, hidden), unit)
    yield noise(prefix + "attn.gate_attn.weight", (queries, hidden), unit)
    yield noise(prefix + "attn.attn_sink_proj.weight", (heads, hidden), unit)
    yield kept(noise(prefix + "attn.wo_ud.weight", (hidden, queries), 2 * queries**-0.5), dim=0)
    yield noise(prefix + "attn.q_l2_clip.scale", (heads, size), 0.1, mean=1.0)
    yield noise(prefix + "attn.rel_l2_clip.scale", (heads, shape.d_rel), 0.1, mean=1.0)
    extent = shape.window if sliding else shape.extent
    yield noise(prefix + "attn.rel_logits_proj.proj", (shape.d_rel, extent), shape.d_rel**-0.5)
    for name in ("k_sconv", "v_sconv"):
        if sliding:
            yield noise(f"{prefix}attn.{name}.weight", (keys, 1, 4), 0.3)
        else:
            yield noise(f"{prefix}attn.{name}.static_w", (4, keys), 0.3)
            yield noise(f"{prefix}attn.{name}.weight_proj", (4 * shape.kv_heads, hidden), 0.3 * unit)
    yield noise(prefix + "attn_sconv.weight", (hidden, 1, 4), 0.3)


def _mlp(prefix: str, shape: DemoShape, noise: Noise) -> Iterator[tuple[str, Planned]]:
    hidden, experts, width = shape.hidden, shape.experts, shape.expert_width
    unit = hidden**-0.5
    yield noise(prefix + "mlp_norm.weight", (hidden,), 0.1, mean=1.0)
    yield noise(prefix + "mlp.experts.w13_weight", (experts, 2 * width, hidden), unit)
    yield kept(noise(prefix + "mlp.experts.w2_weight", (experts, hidden, width), 2 * width**-0.5), dim=1)
    yield noise(prefix + "mlp.gate.weight", (experts, hidden), unit)
    yield noise(prefix + "mlp.gate.bias", (experts,), 0.05, dtype=torch.float32)
    yield noise(prefix + "mlp_sconv.weight", (hidden, 1, 4), 0.3)


def _gates(prefix: str, shape: DemoShape, noise: Noise) -> Iterator[tuple[str, Planned]]:
    hidden, rank = shape.hidden, shape.gate_rank
    for role in ("attn", "k", "v", "mlp"):
        yield noise(f"{prefix}controllers.{role}.down_weight", (rank, 2 * hidden), (2 * hidden) ** -0.5)
        yield noise(f"{prefix}controllers.{role}.forget_weight", (hidden, rank), 0.5 * rank**-0.5)
        yield noise(f"{prefix}controllers.{role}.gain_weight", (hidden, rank), 0.5 * rank**-0.5)
