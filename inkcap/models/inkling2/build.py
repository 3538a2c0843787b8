"""From a config to the parts of a layer, and to the state each visit keeps."""

import torch

from inkcap.cache.state import LayerState, Plane
from inkcap.layers.attention import Heads
from inkcap.layers.blockstream import BlockMix, RunningSum
from inkcap.layers.experts import RoundedRoutedExperts, RoutedExperts
from inkcap.layers.formats import Stored
from inkcap.layers.linear import Row
from inkcap.layers.norm import RMSNorm
from inkcap.layers.router import SigmoidRouter
from inkcap.layers.sconv import ShortConv
from inkcap.models.inkling2.attention import (
    DynamicInput,
    Geometry,
    JointAttention,
    SplitAttention,
    StaticInput,
    dynamic_scale,
    static_scale,
)
from inkcap.models.inkling2.config import Inkling2Config
from inkcap.models.inkling2.layer import (
    FullLayer,
    LoopedLayer,
    SeparateInputs,
    SharedInput,
    SlidingLayer,
    Sublayers,
)
from inkcap.models.inkling2.message import Gates
from inkcap.ops.values import Caps, LogScaling
from inkcap.parallel.comm import Comm
from inkcap.parallel.slot import Share

MIX_EPS = 1e-6  # of the norms inside mixtures; not a setting of the published models
KV_BLOCK = 64  # tokens
CONV_BLOCK = 4  # tokens


def geometry_of(config: Inkling2Config, layer: int, comm: Comm) -> Geometry:
    """The attention of one layer as a rank computes it."""
    if config.sliding[layer]:
        heads = Heads.on(comm, config.swa_num_attention_heads, config.swa_num_key_value_heads, config.swa_head_dim)
        window, extent, scaling = config.sliding_window_size, config.sliding_window_size, None
    else:
        heads = Heads.on(comm, config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        window, extent = None, config.rel_extent
        scaling = LogScaling(config.log_scaling_n_floor, config.log_scaling_alpha)
    return Geometry(
        channels=config.hidden_size,
        heads=heads,
        states=config.d_rel,
        extent=extent,
        window=window,
        scaling=scaling,
        conv_width=config.conv_kernel_size,
        qk_limit=config.qk_l2_clip_threshold,
        r_limit=config.rel_l2_clip_threshold,
        eps=config.rms_norm_eps,
    )


def build_layer(
    config: Inkling2Config, layer: int, stored: Stored, comm: Comm, dtype: torch.dtype, device: torch.device
) -> SlidingLayer | FullLayer:
    """A layer outside the loop."""
    geometry = geometry_of(config, layer, comm)
    sublayers = build_sublayers(config, layer, geometry, stored, comm, dtype, device)
    inputs = 1 if config.sliding[layer] else 3
    mix = BlockMix(config.hidden_size, inputs, MIX_EPS, device) if layer else RunningSum(inputs)
    if config.sliding[layer]:
        attention = JointAttention(geometry, dtype, device)
        return SlidingLayer(attention, mix, build_norm(config, dtype, device), sublayers)
    norms = tuple(build_norm(config, dtype, device) for _ in range(3))
    return FullLayer(build_split(geometry, dtype, device), mix, norms, sublayers)


def build_looped(
    config: Inkling2Config,
    layer: int,
    gate_rank: int,
    stored: Stored,
    comm: Comm,
    dtype: torch.dtype,
    device: torch.device,
) -> LoopedLayer:
    """A layer of the loop."""
    geometry = geometry_of(config, layer, comm)
    channels = config.hidden_size
    if config.sliding[layer]:
        inputs = SharedInput(BlockMix(channels, 1, MIX_EPS, device), build_norm(config, dtype, device))
    else:
        norms = tuple(build_norm(config, dtype, device) for _ in range(3))
        inputs = SeparateInputs(BlockMix(channels, 3, MIX_EPS, device), norms)
    gates = Gates(channels, gate_rank, config.rms_norm_eps, dtype, device)
    sublayers = build_sublayers(config, layer, geometry, stored, comm, dtype, device)
    return LoopedLayer(build_split(geometry, dtype, device), inputs, gates, sublayers)


def build_split(geometry: Geometry, dtype: torch.dtype, device: torch.device) -> SplitAttention:
    """Attention with an input each for queries, keys and values: dynamic convolutions when it sees everything."""
    if geometry.window is None:
        key, value = (DynamicInput(name, geometry, dtype, device) for name in "kv")
        return SplitAttention(geometry, key, value, dynamic_scale(geometry), dtype, device)
    key, value = (StaticInput(name, geometry, plane, dtype, device) for plane, name in enumerate("kv"))
    return SplitAttention(geometry, key, value, static_scale(geometry), dtype, device)


def build_sublayers(
    config: Inkling2Config,
    layer: int,
    geometry: Geometry,
    stored: Stored,
    comm: Comm,
    dtype: torch.dtype,
    device: torch.device,
) -> Sublayers:
    """The parts that all kinds of layers have."""
    channels, heads = config.hidden_size, geometry.heads
    every = Share(0, channels, channels)  # the convolutions behind the sublayers see the sum over ranks
    router = SigmoidRouter(
        channels, config.n_routed_experts, config.num_experts_per_tok, config.route_scale, dtype, device
    )
    caps = Caps(config.mlp_gate_softcap, config.mlp_up_softcap)
    units = config.moe_intermediate_size
    kind = RoundedRoutedExperts if stored.rounds_inputs else RoutedExperts
    return Sublayers(
        attn_out=Row(heads.query.times(heads.size), channels, comm, dtype, device),
        attn_sconv=ShortConv(every, config.conv_kernel_size, 2, device, static_scale(geometry)),
        mlp_mix=BlockMix(channels, 1, MIX_EPS, device),
        mlp_norm=build_norm(config, dtype, device),
        mlp=kind(router, channels, config.n_routed_experts, units, caps, comm, dtype, device, stored),
        mlp_sconv=ShortConv(every, config.conv_kernel_size, 3, device, static_scale(geometry)),
        opens_block=config.opens_block(layer),
    )


def build_norm(config: Inkling2Config, dtype: torch.dtype, device: torch.device) -> RMSNorm:
    """A norm of fp32 mixtures that rounds to the model's dtype."""
    return RMSNorm(config.hidden_size, config.rms_norm_eps, device, dtype)


def declare(config: Inkling2Config, visit: int, geometry: Geometry, dtype: str) -> list[LayerState]:
    """What one visit keeps: keys and values in `full` or `window`, four convolution inputs in `sconv`."""
    kv, size = geometry.heads.kv.count, geometry.heads.size
    channels = {"k": kv * size, "v": kv * size, "attn": config.hidden_size, "mlp": config.hidden_size}
    return [
        LayerState(
            group="full" if geometry.window is None else "window",
            visit=visit,
            planes=(Plane("k", (kv, size), dtype), Plane("v", (kv, size), dtype)),
            window=geometry.window,
            block=KV_BLOCK,
            reads_own_step=True,
        ),
        LayerState(
            group="sconv",
            visit=visit,
            planes=tuple(Plane(name, (count,), dtype) for name, count in channels.items()),
            window=config.conv_kernel_size,
            block=CONV_BLOCK,
            reads_own_step=False,
        ),
    ]
