"""Experts in deterministic mode on a GPU: sums in one order for any number of tokens, see `fixed_products`."""

import torch
from torch import Tensor

from inkcap.ops.experts.ref import experts_down, experts_settle, experts_up, routed_down, routed_settle, routed_up
from inkcap.ops.experts.triton import down, up
from inkcap.ops.quantize.coded import Weights
from inkcap.ops.values import Activated, Caps, GroupView, Normed, Packing, Routed


@experts_up.implement("fixed", when=lambda device: device.type == "cuda", spare=True)
def experts_up_fixed(rows: Normed, route: Routed, w13: Weights, shared_w13: Tensor) -> Activated:
    """`experts_up` of the reference."""
    return Activated(*up(rows, route, w13, shared_w13, None, fixed=True), route)


@experts_down.implement("fixed", when=lambda device: device.type == "cuda", spare=True)
def experts_down_fixed(act: Activated, w2: Weights, shared_w2: Tensor) -> Tensor:
    """`experts_down` of the reference."""
    return down(act.routed, act.shared, act.route, w2, shared_w2, None, None, None, None, 0, 1.0, fixed=True)[0]


@experts_settle.implement("fixed", when=lambda device: device.type == "cuda", spare=True)
def experts_settle_fixed(
    act: Activated,
    w2: Weights,
    shared_w2: Tensor,
    residual: Tensor | None,
    taps: Tensor,
    view: GroupView,
    packing: Packing,
    *,
    plane: int,
) -> tuple[Tensor, Tensor | None]:
    """`experts_settle` of the reference."""
    return down(
        act.routed, act.shared, act.route, w2, shared_w2, residual, taps, view, packing, plane, 1.0, fixed=True
    )  # fmt: skip


@routed_up.implement("fixed", when=lambda device: device.type == "cuda", spare=True)
def routed_up_fixed(rows: Normed, route: Routed, w13: Weights, caps: Caps | None) -> Tensor:
    """`routed_up` of the reference."""
    return up(rows, route, w13, None, caps, fixed=True)[0]


@routed_down.implement("fixed", when=lambda device: device.type == "cuda", spare=True)
def routed_down_fixed(act: Tensor, route: Routed, w2: Weights) -> Tensor:
    """`routed_down` of the reference."""
    return down(act, None, route, w2, None, None, None, None, None, 0, 1.0, fixed=True)[0]


@routed_settle.implement("fixed", when=lambda device: device.type == "cuda", spare=True)
def routed_settle_fixed(
    act: Tensor,
    route: Routed,
    w2: Weights,
    residual: Tensor | None,
    taps: Tensor,
    view: GroupView,
    packing: Packing,
    *,
    plane: int,
    conv_scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`routed_settle` of the reference."""
    return down(
        act, None, route, w2, None, residual, taps, view, packing, plane, conv_scale, dtype, fixed=True
    )  # fmt: skip
