"""The numbers of Inkling 2, looped or not, read from config.json in the published or in the transformers dialect."""

from collections.abc import Mapping
from dataclasses import dataclass

from inkcap.base.errors import CheckpointMismatch
from inkcap.base.fields import Fields
from inkcap.cache.state import LayerState
from inkcap.models.config import check_together, conv_width, local_layers, text_of, unpadded
from inkcap.models.states import AttentionSize, declare
from inkcap.parallel.share import Place

# Settings of which the published models use one value, and this engine implements that one.
ONLY = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "use_value_norm_no_gamma": True,
    "attention_dropout": 0.0,
}


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Layers [start, stop) are visited `passes` times; each later pass reads messages from the one before."""

    start: int
    stop: int
    passes: int
    gate_rank: int


@dataclass(frozen=True, kw_only=True)
class Inkling2Config:
    """Numbers of one checkpoint, under the names of transformers.

    Sliding layers use the `swa_` geometry and see `sliding_window_size` tokens, which is also the extent of their
    relative bias; full layers see everything and have a bias up to `rel_extent` tokens back.
    """

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int  # rows of the embedding and of the head
    unpadded_vocab_size: int  # ids below this exist
    max_length: int  # tokens
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    swa_num_attention_heads: int
    swa_num_key_value_heads: int
    swa_head_dim: int
    sliding_window_size: int  # tokens, the token itself included
    sliding: tuple[bool, ...]  # per layer
    d_rel: int
    rel_extent: int  # tokens
    log_scaling_n_floor: int  # tokens
    log_scaling_alpha: float
    rms_norm_eps: float
    conv_kernel_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    route_scale: float
    mlp_gate_softcap: float
    mlp_up_softcap: float
    final_logit_softcapping: float
    qk_l2_clip_threshold: float
    rel_l2_clip_threshold: float
    n_layers_per_attn_res_block: int
    loop: Loop | None  # None: every layer is visited once

    def opens_block(self, layer: int) -> bool:
        """Whether the sum so far is finished, and a new one begins, in this layer."""
        return layer % self.n_layers_per_attn_res_block == 0

    def visits(self) -> tuple[tuple[int, int], ...]:
        """(layer, pass) of each visit in the order they run; pass 0 is the first, and the only one outside the loop."""
        every = range(self.num_hidden_layers)
        if self.loop is None:
            return tuple((layer, 0) for layer in every)
        inside = every[self.loop.start : self.loop.stop]
        passes = [(layer, number) for number in range(self.loop.passes) for layer in inside]
        before = [(layer, 0) for layer in every[: self.loop.start]]
        return (*before, *passes, *((layer, 0) for layer in every[self.loop.stop :]))

    @property
    def dense_width(self) -> None:
        """All layers have experts."""
        return None

    @property
    def expert_width(self) -> int:
        """Of one expert."""
        return self.moe_intermediate_size

    def attention(self, layer: int) -> AttentionSize:
        """The heads of a layer."""
        if self.sliding[layer]:
            heads = (self.swa_num_attention_heads, self.swa_num_key_value_heads, self.swa_head_dim)
            return AttentionSize(*heads, self.sliding_window_size, self.sliding_window_size)
        return AttentionSize(self.num_attention_heads, self.num_key_value_heads, self.head_dim, None, self.rel_extent)

    def expert_layers(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(range(self.num_hidden_layers))

    def quantised_layers(self) -> tuple[int, ...]:
        """All of them."""
        return self.expert_layers()

    def states(self, place: Place, dtype: str, kv_dtype: str | None = None) -> list[LayerState]:
        """What every visit keeps on one rank; keys and values in `dtype` too unless in `kv_dtype`."""
        visits = (self.attention(layer) for layer, _ in self.visits())
        return declare(visits, self.hidden_size, self.conv_kernel_size, place, dtype, kv_dtype or dtype)

    @staticmethod
    def from_json(config: Mapping[str, object]) -> "Inkling2Config":
        """The text model of a parsed config.json. Raises CheckpointMismatch, naming field, value and what is allowed.

        Class defaults of other libraries are never used: they differ between the published models.
        """
        text = text_of(config, ONLY)
        layers = text.integer("num_hidden_layers")
        local = local_layers(text, layers)
        read = Inkling2Config(
            hidden_size=text.integer("hidden_size"),
            num_hidden_layers=layers,
            vocab_size=text.integer("vocab_size"),
            unpadded_vocab_size=unpadded(text),
            max_length=text.integer("model_max_length", "max_position_embeddings"),
            num_attention_heads=text.integer("num_attention_heads"),
            num_key_value_heads=text.integer("num_key_value_heads"),
            head_dim=text.integer("head_dim"),
            swa_num_attention_heads=text.integer("swa_num_attention_heads"),
            swa_num_key_value_heads=text.integer("swa_num_key_value_heads"),
            swa_head_dim=text.integer("swa_head_dim"),
            sliding_window_size=text.integer("sliding_window_size"),
            sliding=tuple(layer in local for layer in range(layers)),
            d_rel=text.integer("d_rel"),
            rel_extent=text.integer("rel_extent"),
            log_scaling_n_floor=text.integer("log_scaling_n_floor"),
            log_scaling_alpha=text.number("log_scaling_alpha"),
            rms_norm_eps=text.number("rms_norm_eps"),
            conv_kernel_size=conv_width(text),
            moe_intermediate_size=text.integer("moe_intermediate_size", "intermediate_size"),
            n_routed_experts=text.integer("n_routed_experts"),
            num_experts_per_tok=text.integer("num_experts_per_tok"),
            route_scale=text.number("route_scale", "routed_scaling_factor"),
            mlp_gate_softcap=text.number("mlp_gate_softcap"),
            mlp_up_softcap=text.number("mlp_up_softcap"),
            final_logit_softcapping=text.number("final_logit_softcapping"),
            qk_l2_clip_threshold=text.number("qk_l2_clip_threshold"),
            rel_l2_clip_threshold=text.number("rel_l2_clip_threshold"),
            n_layers_per_attn_res_block=text.integer("n_layers_per_attn_res_block", "n_layers_per_attnres_block"),
            loop=_loop(text, layers),
        )
        check_together(text)
        _check_loop(text, read)
        return read


def _loop(text: Fields, layers: int) -> Loop | None:
    """Published configs nest the loop in `loop_config`; transformers writes four fields."""
    if not text.null("loop_config"):
        nested = text.block("loop_config")
        names = (nested, "core_start", "core_end", "num_passes", "gate_rank")
    elif text.has("loop_num_passes"):
        names = (text, "loop_layer_index_start", "loop_layer_index_end", "loop_num_passes", "loop_gate_rank")
    else:
        return None
    fields, first, last, passes, rank = names
    start = fields.integer(first, most=layers)
    return Loop(
        start=start,
        stop=fields.integer(last, least=start + 1, most=layers),
        passes=fields.integer(passes),
        gate_rank=fields.integer(rank),
    )


def _check_loop(text: Fields, read: Inkling2Config) -> None:
    block = read.n_layers_per_attn_res_block
    if read.loop is not None and (read.loop.start % block or read.loop.stop % block):
        raise CheckpointMismatch(
            f"{text.where}: the loop covers layers {read.loop.start} to {read.loop.stop}, but must begin and end at "
            f"multiples of n_layers_per_attn_res_block, {block}"
        )
