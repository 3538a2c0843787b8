"""Attention over depth: each token mixes the finished blocks of its residual stream. Nothing here crosses tokens."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from inkcap.ops.dispatch import op


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, in fp32."""
    rows = x.float()
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)


@op
def mix(sources: Sequence[Tensor], queries: Tensor, eps: float) -> Tensor:
    """For each query, the softmax-weighted sum of the RMS-normed sources: [Q, T, C] fp32.

    sources: [T, C] each, of any float dtype; queries: [Q, C] fp32. A source scores query . normed source / sqrt(C);
    keys and values are both the normed source, and no norm has a weight. Source: Attention Residuals, which mixes
    values without norm.
    """
    normed = torch.stack([unit_rms(source, eps) for source in sources])  # [S, T, C]
    scores = torch.einsum("qc,stc->qts", queries, normed) * queries.shape[1] ** -0.5
    return torch.einsum("qts,stc->qtc", scores.softmax(-1), normed)


@op
def message_gate(rows: Tensor, message: Tensor, down: Tensor, forget: Tensor, gain: Tensor, eps: float) -> Tensor:
    """(1 - tanh(forget u)) rows + tanh(gain u) message, where u = down [rms(rows) | rms(message)]: [T, C] fp32.

    rows, message: [T, C] fp32; down: [R, 2 C]; forget, gain: [C, R] fp32. Both the input and the result of `down` are
    rounded to its dtype, everything else is fp32. The message enters the sum as it is, not normed.
    """
    both = torch.cat([unit_rms(rows, eps), unit_rms(message, eps)], 1)
    state = F.linear(both.to(down.dtype), down).float()  # [T, R]
    return (1 - torch.tanh(F.linear(state, forget))) * rows + torch.tanh(F.linear(state, gain)) * message
