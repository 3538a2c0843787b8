"""The text model's numbers, read from config.json in the published dialect or in that of transformers."""

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
    "q_bias": False,
    "o_bias": False,
    "use_embed_norm": True,
    "use_sconv": True,
    "gate_activation": "sigmoid",
    "norm_after_topk": True,
    "use_gate_bias": True,
    "use_global_scale": True,
    "shared_expert_sink": True,
    "final_logit_softcapping": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, kw_only=True)
class InklingConfig:
    """Numbers of one checkpoint, under their published names where one exists.

    Local layers use the `swa_` geometry and see `sliding_window_size` tokens, which is also the extent of their
    relative bias; the others see everything and have a bias up to `rel_extent` tokens back.
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
    local_layer_ids: tuple[int, ...]
    d_rel: int
    rel_extent: int  # tokens
    log_scaling_n_floor: int | None  # tokens; None: no log scaling
    log_scaling_alpha: float
    rms_norm_eps: float
    sconv_kernel_size: int
    dense_layer_ids: tuple[int, ...]
    dense_intermediate_size: int  # width of a dense MLP
    expert_intermediate_size: int  # width of one routed or shared expert
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    route_scale: float
    logits_mup_width_multiplier: float  # logits are divided by this

    def local(self, layer: int) -> bool:
        """Whether the layer has a sliding window."""
        return layer in self.local_layer_ids

    def dense(self, layer: int) -> bool:
        """Whether the layer has a dense MLP instead of experts."""
        return layer in self.dense_layer_ids

    @property
    def dense_width(self) -> int:
        """Of a dense MLP."""
        return self.dense_intermediate_size

    @property
    def expert_width(self) -> int:
        """Of one expert."""
        return self.expert_intermediate_size

    def attention(self, layer: int) -> AttentionSize:
        """The heads of a layer."""
        if self.local(layer):
            heads = (self.swa_num_attention_heads, self.swa_num_key_value_heads, self.swa_head_dim)
            return AttentionSize(*heads, self.sliding_window_size, self.sliding_window_size)
        return AttentionSize(self.num_attention_heads, self.num_key_value_heads, self.head_dim, None, self.rel_extent)

    def expert_layers(self) -> tuple[int, ...]:
        """Layers that have experts."""
        return tuple(layer for layer in range(self.num_hidden_layers) if not self.dense(layer))

    def quantised_layers(self) -> tuple[int, ...]:
        """All layers with experts but the first, which is published in BF16."""
        return self.expert_layers()[1:]

    def states(self, place: Place, dtype: str, kv_dtype: str | None = None) -> list[LayerState]:
        """What every layer keeps on one rank; keys and values in `dtype` too unless in `kv_dtype`."""
        layers = map(self.attention, range(self.num_hidden_layers))
        return declare(layers, self.hidden_size, self.sconv_kernel_size, place, dtype, kv_dtype or dtype)

    @staticmethod
    def from_json(config: Mapping[str, object]) -> "InklingConfig":
        """The text model of a parsed config.json. Raises CheckpointMismatch, naming field, value and what is allowed.

        Class defaults of other libraries are never used: they differ from the published models.
        """
        text = text_of(config, ONLY)
        layers = text.integer("num_hidden_layers")
        dense_width, expert_width = _widths(text)
        floor = None if text.null("log_scaling_n_floor") else text.integer("log_scaling_n_floor")
        read = InklingConfig(
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
            local_layer_ids=local_layers(text, layers),
            d_rel=text.integer("d_rel"),
            rel_extent=text.integer("rel_extent"),
            log_scaling_n_floor=floor,
            log_scaling_alpha=0.0 if floor is None else text.number("log_scaling_alpha"),
            rms_norm_eps=text.number("rms_norm_eps"),
            sconv_kernel_size=conv_width(text),
            dense_layer_ids=_dense_layers(text, layers),
            dense_intermediate_size=dense_width,
            expert_intermediate_size=expert_width,
            n_routed_experts=text.integer("n_routed_experts"),
            num_experts_per_tok=text.integer("num_experts_per_tok"),
            n_shared_experts=text.integer("n_shared_experts"),
            route_scale=text.number("route_scale"),
            logits_mup_width_multiplier=text.number("logits_mup_width_multiplier"),
        )
        check_together(text)
        return read


def _widths(text: Fields) -> tuple[int, int]:
    """(dense, expert). `intermediate_size` is an expert's width in one dialect and the dense MLP's in the other."""
    if text.has("dense_intermediate_size"):
        return text.integer("dense_intermediate_size"), text.integer("intermediate_size", "moe_intermediate_size")
    if text.has("moe_intermediate_size"):
        return text.integer("intermediate_size"), text.integer("moe_intermediate_size")
    raise CheckpointMismatch(
        f"{text.where} has neither dense_intermediate_size (published configs) nor moe_intermediate_size "
        "(transformers' configs), so the widths of dense MLP and experts are unknown"
    )


def _dense_layers(text: Fields, layers: int) -> tuple[int, ...]:
    first = None if text.null("dense_mlp_idx") else text.integer("dense_mlp_idx", least=0, most=layers)
    if text.null("mlp_layer_types"):
        if first is None:
            raise CheckpointMismatch(f"{text.where} has neither dense_mlp_idx nor mlp_layer_types")
        return tuple(range(first))
    kinds = text.choices("mlp_layer_types", ("dense", "sparse"), layers)
    named = tuple(i for i, kind in enumerate(kinds) if kind == "dense")
    if first is not None and named != tuple(range(first)):
        raise text.wrong("dense_mlp_idx", f"{len(named)}, as mlp_layer_types has it")
    return named
