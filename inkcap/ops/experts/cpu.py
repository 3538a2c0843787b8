"""Experts on a CPU: each weight is read once, for the tokens that chose it, in order of expert."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from inkcap.ops.act.ref import swiglu, swiglu_capped
from inkcap.ops.experts.ref import experts_down, experts_up, routed_down, routed_up
from inkcap.ops.quantize.coded import Weights
from inkcap.ops.values import Activated, Caps, Normed, Routed


@dataclass(frozen=True, slots=True)
class Sorted:
    """The T * K uses of experts in order of expert, then of token."""

    order: Tensor  # [T * K] index into the uses in order of token
    inverse: Tensor  # [T * K] the way back
    ends: Tensor  # [E] int32: where the uses of each expert end


def by_expert(route: Routed, experts: int) -> Sorted:
    """Computed once a step and layer, for both halves of the experts."""
    if Sorted in route.memo:
        return route.memo[Sorted]  # pyright: ignore[reportReturnType]  # a memo has no types
    chosen = route.choice.flatten()
    order = chosen.argsort(stable=True)
    ends = torch.bincount(chosen, minlength=experts).cumsum(0, dtype=torch.int32)
    made = Sorted(order, order.argsort(), ends)
    route.memo[Sorted] = made
    return made


def multiply(x: Tensor, weight: Weights, uses: Sorted) -> Tensor:
    """Rows x [T * K, N] in order of expert times each one's `weight` [E, M, N]: [T * K, M]."""
    if isinstance(weight, Tensor) and aligned(weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=uses.ends)
    counts = uses.ends.diff(prepend=uses.ends.new_zeros(1)).tolist()
    parts = zip(range(len(weight)), x.split(counts), strict=True)
    return torch.cat([F.linear(part, weight[expert]) for expert, part in parts if len(part)])


def aligned(weight: Tensor) -> bool:
    """Whether rows take whole multiples of 16 bytes, as the library's grouped product wants it."""
    return weight.stride(1) * weight.element_size() % 16 == 0


@experts_up.implement("cpu", when=lambda device: device.type == "cpu")
def experts_up_cpu(rows: Normed, route: Routed, w13: Weights, shared_w13: Tensor) -> Activated:
    """`experts_up` of the reference."""
    x = rows.tensor()
    shared = F.linear(x, shared_w13.flatten(0, 1)).unflatten(1, (len(shared_w13), -1))
    return Activated(up_cpu(x, route, w13, swiglu), swiglu(shared, route.gammas), route)


def up_cpu(x: Tensor, route: Routed, w13: Weights, act: Callable[[Tensor], Tensor]) -> Tensor:
    """x [T, C] to the activations `act` of the chosen experts: [T, K, I]."""
    tokens, top_k = route.choice.shape
    if tokens == 1:
        return act(torch.cat([F.linear(x, w13[expert]) for expert in route.choice[0].tolist()])).unsqueeze(0)
    uses = by_expert(route, len(w13))
    made = act(multiply(x.index_select(0, uses.order // top_k), w13, uses))
    return made.index_select(0, uses.inverse).unflatten(0, (tokens, top_k))


def down_cpu(act: Tensor, route: Routed, w2: Weights) -> Tensor:
    """Activations [T, K, I] to the products of the chosen experts in fp32: [T, K, C], in order of choice."""
    tokens, top_k = route.choice.shape
    if tokens == 1:
        chosen = zip(route.choice[0].tolist(), act[0].split(1), strict=True)
        products = torch.cat([F.linear(part, w2[expert]) for expert, part in chosen])
    else:
        uses = by_expert(route, len(w2))
        products = multiply(act.flatten(0, 1).index_select(0, uses.order), w2, uses).index_select(0, uses.inverse)
    return products.float().unflatten(0, (tokens, top_k))


@experts_down.implement("cpu", when=lambda device: device.type == "cpu")
def experts_down_cpu(act: Activated, w2: Weights, shared_w2: Tensor) -> Tensor:
    """`experts_down` of the reference; the sum over experts goes in order of choice."""
    shared = F.linear(act.shared.flatten(1), shared_w2.flatten(1)).float()
    products = down_cpu(act.routed, act.route, w2)
    return torch.baddbmm(shared.unsqueeze(1), act.route.weights.unsqueeze(1), products).squeeze(1).to(act.shared.dtype)


@routed_up.implement("cpu", when=lambda device: device.type == "cpu")
def routed_up_cpu(rows: Normed, route: Routed, w13: Weights, caps: Caps | None) -> Tensor:
    """`routed_up` of the reference."""
    return up_cpu(rows.tensor(), route, w13, swiglu if caps is None else partial(swiglu_capped, caps=caps))


@routed_down.implement("cpu", when=lambda device: device.type == "cpu")
def routed_down_cpu(act: Tensor, route: Routed, w2: Weights) -> Tensor:
    """`routed_down` of the reference; the sum over experts goes in order of choice."""
    return torch.bmm(route.weights.unsqueeze(1), down_cpu(act, route, w2)).squeeze(1).to(act.dtype)
