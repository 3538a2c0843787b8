"""Inkling's text model: decoder layers over a residual stream, and the head.

Slots of the model, with the shapes of the published tensors (V padded vocabulary, H hidden, W convolution width):

    embed.weight [V, H]                   embed.norm.weight [H]
    norm.weight [H]                       head.weight [V, H]
    layers.N.attn_norm.weight [H]         layers.N.mlp_norm.weight [H]
    layers.N.attention.{q,k,v,r}.weight   layers.N.attn_out.weight
    layers.N.attention.{q_norm,k_norm}.weight [head]
    layers.N.attention.{k_sconv,v_sconv}.weight [channels, 1, W]
    layers.N.attention.rel.proj [d_rel, extent]
    layers.N.{attn_sconv,mlp_sconv}.weight [H, 1, W]
    dense:   layers.N.mlp.w13.weight [2 I, H] rows interleaved, .w2.weight [H, I], .global_scale [1]
    experts: layers.N.mlp.router.weight [E + S, H], .router.bias [E], .router.global_scale [1]
             layers.N.mlp.experts.w13 [E, 2 I, H], .experts.w2 [E, H, I], .shared.w13 [S, 2 I, H], .shared.w2 [S, H, I]
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from inkcap.layers.attention import Heads, RelBias
from inkcap.layers.batch import Batch
from inkcap.layers.embed import Head, NormedEmbedding
from inkcap.layers.experts import Experts, RoundedExperts
from inkcap.layers.formats import Stored
from inkcap.layers.linear import Row, prefixed
from inkcap.layers.mlp import GatedMlp
from inkcap.layers.norm import RMSNorm
from inkcap.layers.router import SinkRouter
from inkcap.layers.sconv import ShortConv
from inkcap.layers.stream import ResidualStream, Settles
from inkcap.models.inkling.attention import Attention
from inkcap.models.inkling.config import InklingConfig
from inkcap.ops.values import LogScaling, Normed
from inkcap.parallel.comm import Comm
from inkcap.parallel.share import Share
from inkcap.parallel.slot import Slot

DENSE: Mapping[int, Stored] = {}


class Mlp(Settles[Any], Protocol):
    """A dense MLP or experts: what it makes of normed rows is for its own `settle` only."""

    def slots(self) -> dict[str, Slot]: ...

    def __call__(self, rows: Normed) -> Any: ...


class DecoderLayer:
    """Attention, then a dense MLP or experts; each is written to the stream through a convolution."""

    def __init__(self, attention: Attention, out: Row, mlp: Mlp, config: InklingConfig, device: torch.device) -> None:
        channels, eps = config.hidden_size, config.rms_norm_eps
        every = Share(0, channels, channels)  # these two convolve the sum over ranks, whole on every rank
        self.attn_norm = RMSNorm(channels, eps, device)
        self.attention = attention
        self.attn_out = out
        self.attn_sconv = ShortConv(every, config.sconv_kernel_size, 2, device)
        self.mlp_norm = RMSNorm(channels, eps, device)
        self.mlp = mlp
        self.mlp_sconv = ShortConv(every, config.sconv_kernel_size, 3, device)

    def slots(self) -> dict[str, Slot]:
        """One layer's slots; see the top of the file."""
        parts = {
            "attn_norm": self.attn_norm,
            "attention": self.attention,
            "attn_out": self.attn_out,
            "attn_sconv": self.attn_sconv,
            "mlp_norm": self.mlp_norm,
            "mlp": self.mlp,
            "mlp_sconv": self.mlp_sconv,
        }
        return {key: slot for name, part in parts.items() for key, slot in prefixed(name, part.slots()).items()}

    def unpack(self) -> None:
        """Decode what is stored in codes, and make the scales of what the cache stores in them."""
        if isinstance(self.mlp, Experts):
            self.mlp.routed.unpack()
        self.attention.bound_codes(self.attn_norm.weight)

    def forward(self, stream: ResidualStream, batch: Batch) -> None:
        """One visit."""
        stream.write(self.attention(stream.read(self.attn_norm), batch), self.attn_out, self.attn_sconv, batch)
        stream.write(self.mlp(stream.read(self.mlp_norm)), self.mlp, self.mlp_sconv, batch)


class Inkling:
    """The text model on one rank of `comm`. Parameters are empty until the slots are filled.

    `stored` says how the routed experts of a layer are stored, where that is not dense; `kv_dtype` is E4M3 where keys
    and values are cached in codes. Both need `unpack` once the slots are filled. Raises ConfigInvalid when the ranks
    cannot share the heads, widths or words evenly.
    """

    family = "inkling"

    def __init__(
        self,
        config: InklingConfig,
        comm: Comm,
        dtype: torch.dtype,
        device: torch.device,
        stored: Mapping[int, Stored] = DENSE,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.vocab_size = config.unpadded_vocab_size
        self.max_length = config.max_length
        self.embed = NormedEmbedding(config.vocab_size, config.hidden_size, config.rms_norm_eps, dtype, device)
        self.layers = [
            build_layer(config, layer, stored.get(layer, Stored()), comm, dtype, device, kv_dtype is not None)
            for layer in range(config.num_hidden_layers)
        ]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.output = Head(
            config.vocab_size,
            config.unpadded_vocab_size,
            config.hidden_size,
            1.0 / config.logits_mup_width_multiplier,
            comm,
            dtype,
            device,
        )
        self.states = config.states(comm, *(str(kind or dtype).removeprefix("torch.") for kind in (dtype, kv_dtype)))

    def slots(self) -> dict[str, Slot]:
        """Every tensor the model wants; see the top of the file."""
        layers = {f"layers.{n}": layer.slots() for n, layer in enumerate(self.layers)}
        return {
            **prefixed("embed", self.embed.slots()),
            **{key: slot for name, slots in layers.items() for key, slot in prefixed(name, slots).items()},
            **prefixed("norm", self.norm.slots()),
            **prefixed("head", self.output.slots()),
        }

    def code_slots(self) -> dict[str, Slot]:
        """Scales of the cache's codes, `layers.N.attention.{k,v}_scale`, which `unpack` makes."""
        layers = {f"layers.{n}.attention": layer.attention.code_slots() for n, layer in enumerate(self.layers)}
        return {key: slot for name, slots in layers.items() for key, slot in prefixed(name, slots).items()}

    def unpack(self) -> None:
        """Decode what is stored in codes, layer by layer."""
        for layer in self.layers:
            layer.unpack()

    def forward(self, batch: Batch) -> Tensor:
        """All layers over the step's T tokens: hidden states [T, H] after the final norm."""
        stream = ResidualStream(self.embed(batch.ids))
        for visit, layer in enumerate(self.layers):
            layer.forward(stream, batch.at(visit))
        return stream.read(self.norm).tensor()

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states [S, H] to logits [S, vocab_size] in fp32, whole on every rank."""
        return self.output(hidden)


def build_layer(
    config: InklingConfig,
    layer: int,
    stored: Stored,
    comm: Comm,
    dtype: torch.dtype,
    device: torch.device,
    coded: bool = False,
) -> DecoderLayer:
    """One decoder layer of the kind its number says."""
    size = config.attention(layer)
    heads = Heads.on(comm, size.heads, size.kv_heads, size.head_dim)
    scaling = None
    if size.window is None and config.log_scaling_n_floor is not None:
        scaling = LogScaling(config.log_scaling_n_floor, config.log_scaling_alpha)
    attention = Attention(
        config.hidden_size,
        heads,
        RelBias(config.d_rel, size.extent, dtype, device),
        config.sconv_kernel_size,
        config.rms_norm_eps,
        size.window,
        scaling,
        dtype,
        device,
        coded,
    )
    out = Row(heads.query.times(heads.size), config.hidden_size, comm, dtype, device)
    return DecoderLayer(attention, out, build_mlp(config, layer, stored, comm, dtype, device), config, device)


def build_mlp(
    config: InklingConfig, layer: int, stored: Stored, comm: Comm, dtype: torch.dtype, device: torch.device
) -> GatedMlp | Experts:
    """Dense in the first layers, experts behind them."""
    if config.dense(layer):
        return GatedMlp(config.hidden_size, config.dense_intermediate_size, comm, dtype, device)
    router = SinkRouter(
        config.hidden_size,
        config.n_routed_experts,
        config.n_shared_experts,
        config.num_experts_per_tok,
        config.route_scale,
        dtype,
        device,
    )
    kind = RoundedExperts if stored.rounds_inputs else Experts
    return kind(
        router,
        config.hidden_size,
        config.n_routed_experts,
        config.n_shared_experts,
        config.expert_intermediate_size,
        comm,
        dtype,
        device,
        stored,
    )
