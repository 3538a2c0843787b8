"""Gated MLPs chosen per token, and the shared ones that every token uses."""

import torch
import torch.nn.functional as F
from torch import Tensor

from inkcap.ops.act.ref import swiglu, swiglu_capped
from inkcap.ops.dispatch import op
from inkcap.ops.quantize.coded import Weights
from inkcap.ops.sconv.ref import sconv
from inkcap.ops.values import Activated, Caps, GroupView, Normed, Packing, Routed


@op
def experts_up(rows: Normed, route: Routed, w13: Weights, shared_w13: Tensor) -> Activated:
    """First half of all experts: product and activation; gammas multiply the shared ones before rounding.

    rows: [T, C]; w13: [E, 2 I, C], shared_w13: [S, 2 I, C], gate and up rows interleaved.
    """
    x = rows.tensor()
    shared = F.linear(x, shared_w13.flatten(0, 1)).unflatten(1, (len(shared_w13), -1))  # [T, S, 2 I]
    up = x.new_empty(*route.choice.shape, w13.shape[1])  # [T, K, 2 I]
    for expert in range(len(w13)):
        token, place = (route.choice == expert).nonzero(as_tuple=True)
        up[token, place] = F.linear(x[token], w13[expert])
    return Activated(swiglu(up), swiglu(shared, route.gammas), route)


@op
def experts_down(act: Activated, w2: Weights, shared_w2: Tensor) -> Tensor:
    """Second half: sum over routed experts of weight * product, plus the shared products. fp32 sum, rounded once.

    w2: [E, C, I]; shared_w2: [C, S, I]: the shared products are one, with inner size S I. Returns [T, C].
    """
    out = F.linear(act.shared.flatten(1), shared_w2.flatten(1)).float()
    for expert in range(len(w2)):
        token, place = (act.route.choice == expert).nonzero(as_tuple=True)
        product = F.linear(act.routed[token, place], w2[expert]).float()
        out.index_add_(0, token, product * act.route.weights[token, place].unsqueeze(1))
    return out.to(act.shared.dtype)


@op
def experts_settle(
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
    """`settle` behind experts: residual + sconv(experts_down(act)). Returns as `settle` does."""
    return sconv(experts_down(act, w2, shared_w2), taps, view, packing, plane=plane, residual=residual), None


@op
def routed_up(rows: Normed, route: Routed, w13: Weights, caps: Caps | None) -> Tensor:
    """First half of routed experts alone: product and activation, soft-capped where there are caps, [T, K, I].

    rows: [T, C]; w13: [E, 2 I, C], gate and up rows interleaved. The product is rounded before the activation.
    """
    x = rows.tensor()
    up = x.new_empty(*route.choice.shape, w13.shape[1])  # [T, K, 2 I]
    for expert in route.choice.unique().tolist():
        token, place = (route.choice == expert).nonzero(as_tuple=True)
        up[token, place] = F.linear(x[token], w13[expert])
    return swiglu(up) if caps is None else swiglu_capped(up, caps)


@op
def routed_down(act: Tensor, route: Routed, w2: Weights) -> Tensor:
    """Second half: sum over a token's experts of weight * product, in fp32, rounded once: [T, C].

    act: [T, K, I]; w2: [E, C, I].
    """
    out = act.new_zeros(len(act), w2.shape[1], dtype=torch.float32)
    for expert in route.choice.unique().tolist():
        token, place = (route.choice == expert).nonzero(as_tuple=True)
        product = F.linear(act[token, place], w2[expert]).float()
        out.index_add_(0, token, product * route.weights[token, place].unsqueeze(1))
    return out.to(act.dtype)


@op
def routed_settle(
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
    """`settle` behind routed experts: residual + sconv(routed_down(act)) * conv_scale. Returns as `settle` does."""
    product = routed_down(act, route, w2)
    settled = sconv(product, taps, view, packing, plane=plane, scale=conv_scale, residual=residual, dtype=dtype)
    return settled, None
