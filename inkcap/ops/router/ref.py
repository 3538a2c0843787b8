"""Choice of experts and their weights."""

import torch
import torch.nn.functional as F
from torch import Tensor

from inkcap.ops.dispatch import op
from inkcap.ops.quantize.ref import Rounding, round_rows
from inkcap.ops.values import Normed, Routed


@op
def route_sink(
    rows: Normed, weight: Tensor, bias: Tensor, global_scale: Tensor, *, top_k: int, route_scale: float
) -> Routed:
    """The top_k routed experts by sigmoid(logit) + bias; weights normalised over them and the shared experts.

    rows: [T, C]; weight: [E + S, C], routed experts first; bias: [E] fp32, for the choice only; global_scale: [1] fp32.
    Logits are fp32. Among equal scores the lowest index wins. The weights of a token sum to route_scale * global_scale.
    """
    logits = F.linear(rows.tensor().float(), weight.float())  # [T, E + S]
    routed, shared = logits.split_with_sizes([len(bias), len(weight) - len(bias)], 1)
    scores = routed.sigmoid() + bias
    choice = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :top_k]
    chosen = F.logsigmoid(torch.cat([routed.gather(1, choice), shared], 1))
    weights = chosen.softmax(1) * (route_scale * global_scale)  # [T, K + S]
    return Routed(choice, weights[:, :top_k], weights[:, top_k:])


@op
def route_sigmoid(rows: Normed, weight: Tensor, bias: Tensor, *, top_k: int, route_scale: float) -> Routed:
    """The top_k experts by sigmoid(logit) + bias, weighted by their sigmoids, which are normalised over the chosen.

    rows: [T, C]; weight: [E, C]; bias: [E] fp32, for the choice only. All in fp32. Among equal scores the lowest index
    wins. The weights of a token sum to route_scale; there are no shared experts, so gammas are [T, 0].
    """
    scores = F.linear(rows.tensor().float(), weight.float()).sigmoid()  # [T, E]
    choice = torch.sort(scores + bias, dim=1, descending=True, stable=True).indices[:, :top_k]
    chosen = scores.gather(1, choice)
    weights = chosen / (chosen.sum(1, keepdim=True) + 1e-20) * route_scale
    return Routed(choice, weights, weights.new_empty(len(weights), 0))


@op
def route_sigmoid_rounded(
    rows: Normed, weight: Tensor, bias: Tensor, how: Rounding, *, top_k: int, route_scale: float
) -> tuple[Routed, Tensor]:
    """`route_sigmoid`, and the normed rows [T, C] rounded, for the experts: the router does not see them so."""
    route = route_sigmoid(rows, weight, bias, top_k=top_k, route_scale=route_scale)
    return route, round_rows(rows.tensor(), how)
