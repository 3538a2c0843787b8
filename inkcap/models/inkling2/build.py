"""From a config to the parts of a layer, and to the state each visit keeps."""

import torch

from inkcap.layers.attention import Heads
from inkcap.layers.blockstream import BlockMix, RunningSum, build_norms
from inkcap.layers.experts import RoundedRoutedExperts, RoutedExperts
from inkcap.layers.formats import Stored
from inkcap.layers.linear import Row
from inkcap.layers.router import SigmoidRouter
from inkcap.layers.sconv import ShortConv
from inkcap.models.inkling2.attention import Attention, Geometry, static_scale
from inkcap.models.inkling2.config import Inkling2Config
from inkcap.models.inkling2.layer import DecoderLayer, LoopedLayer
from inkcap.models.inkling2.message import MessageGates
from inkcap.ops.values import Caps, LogScaling
from inkcap.parallel.comm import Comm
from inkcap.parallel.share import Share

MIX_EPS = 1e-6  # of the norms inside mixtures; not a setting of the published models
QKV_NORMS = ("q_norm", "k_norm", "v_norm")


def geometry_of(config: Inkling2Config, layer: int, comm: Comm) -> Geometry:
    """The attention of one layer as a rank computes it."""
    size = config.attention(layer)
    scaling = LogScaling(config.log_scaling_n_floor, config.log_scaling_alpha) if size.window is None else None
    return Geometry(
        channels=config.hidden_size,
        heads=Heads.on(comm, size.heads, size.kv_heads, size.head_dim),
        states=config.d_rel,
        extent=size.extent,
        window=size.window,
        scaling=scaling,
        conv_width=config.conv_kernel_size,
        qk_limit=config.qk_l2_clip_threshold,
        r_limit=config.rel_l2_clip_threshold,
        eps=config.rms_norm_eps,
    )


def build_layer(
    config: Inkling2Config,
    layer: int,
    stored: Stored,
    comm: Comm,
    dtype: torch.dtype,
    device: torch.device,
    coded: bool = False,
) -> DecoderLayer:
    """A layer outside the loop; `coded`: its keys and values are cached as codes."""
    names = ("attn_norm",) if config.sliding[layer] else QKV_NORMS
    norms = build_norms(names, config.hidden_size, config.rms_norm_eps, dtype, device)
    if not layer:
        return assemble(config, layer, RunningSum(names, norms), stored, comm, dtype, device, coded)
    mix = BlockMix("attn_mix", len(names), names, norms, MIX_EPS)
    return assemble(config, layer, mix, stored, comm, dtype, device, coded)


def build_looped(
    config: Inkling2Config,
    layer: int,
    gate_rank: int,
    stored: Stored,
    comm: Comm,
    dtype: torch.dtype,
    device: torch.device,
    coded: bool = False,
) -> LoopedLayer:
    """A layer of the loop."""
    made = build_layer(config, layer, stored, comm, dtype, device, coded)
    mix = made.attn_input
    assert isinstance(mix, BlockMix), "the loop begins behind the first layer"
    return LoopedLayer(made, mix, MessageGates(config.hidden_size, gate_rank, dtype, device))


def assemble(
    config: Inkling2Config,
    layer: int,
    attn_input: BlockMix | RunningSum,
    stored: Stored,
    comm: Comm,
    dtype: torch.dtype,
    device: torch.device,
    coded: bool = False,
) -> DecoderLayer:
    """A layer whose attention reads the stream so."""
    channels, geometry = config.hidden_size, geometry_of(config, layer, comm)
    every = Share(0, channels, channels)  # the convolutions behind the sublayers see the sum over ranks
    width, scale = config.conv_kernel_size, static_scale(config.conv_kernel_size)
    router = SigmoidRouter(
        channels, config.n_routed_experts, config.num_experts_per_tok, config.route_scale, dtype, device
    )
    caps = Caps(config.mlp_gate_softcap, config.mlp_up_softcap)
    units = config.moe_intermediate_size
    kind = RoundedRoutedExperts if stored.rounds_inputs else RoutedExperts
    return DecoderLayer(
        attn_input=attn_input,
        attention=Attention(geometry, dtype, device, coded),
        attn_out=Row(geometry.heads.query.times(geometry.heads.size), channels, comm, dtype, device),
        attn_sconv=ShortConv(every, width, 2, device, scale),
        mlp_input=build_mix("mlp_mix", "mlp_norm", config, dtype, device),
        mlp=kind(router, channels, config.n_routed_experts, units, caps, comm, dtype, device, stored),
        mlp_sconv=ShortConv(every, width, 3, device, scale),
        opens_block=config.opens_block(layer),
    )


def build_mix(name: str, norm: str, config: Inkling2Config, dtype: torch.dtype, device: torch.device) -> BlockMix:
    """A mixture for one input."""
    norms = build_norms((norm,), config.hidden_size, config.rms_norm_eps, dtype, device)
    return BlockMix(name, 1, (norm,), norms, MIX_EPS)
