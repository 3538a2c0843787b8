"""Attention over depth: each token mixes the finished blocks of its residual stream. Nothing here crosses tokens."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from inkcap.ops.dispatch import op
from inkcap.ops.values import Gates, Normed, Norms


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
def mix_norm(sources: Sequence[Tensor], queries: Tensor, eps: float, norms: Norms, late: int = 2) -> tuple[Normed, ...]:
    """Mixtures and the norm behind each, one for each query: [T, C], rounded once, by whoever norms.

    late: so many of the last sources may have been written since the last router or first half of experts ran.
    """
    return norms.later(mix(sources, queries, eps))


@op
def mix_shares(sources: Sequence[Tensor], queries: Tensor, eps: float) -> Tensor:
    """What `mix` multiplies each source with, its norm included: [Q, T, S] fp32. Where there are many queries, whoever
    needs a mixture sums it from these."""
    rows = torch.stack([source.float() for source in sources])  # [S, T, C]
    factors = torch.rsqrt(rows.square().mean(-1) + eps)  # [S, T]
    scores = torch.einsum("qc,stc->qts", queries, rows) * factors.t() * queries.shape[1] ** -0.5
    return scores.softmax(-1) * factors.t()


@op
def message_gate(
    sources: Sequence[Tensor],
    queries: Tensor,
    eps: float,
    senders: Sequence[Tensor],
    shares: Sequence[Tensor],
    gates: Gates,
    norms: Norms,
    late: int = 2,
) -> tuple[Normed, ...]:
    """(1 - tanh(forget u)) mixture + tanh(gain u) message, where u = down [rms(mixture) | rms(message)]; then normed.

    sources, eps: of `mix`; queries: [G, C] for G gates, or [1, C] for all of them; senders: [T, C] each; shares: [T, S]
    fp32 for each gate, of which its message is made as in `mix_shares`. What `down` multiplies and its result are
    rounded to its dtype, everything else is fp32. The message enters the sum as it is, not normed. All other norms have
    the eps of `norms`. late: of `mix_norm`.
    Returns [T, C] for each gate.
    """
    gated, rows = [], mix(sources, queries, eps)
    for i, share in enumerate(shares):
        own = rows[min(i, len(rows) - 1)]
        message = torch.einsum("ts,stc->tc", share, torch.stack([sender.float() for sender in senders]))
        both = torch.cat([unit_rms(own, norms.eps), unit_rms(message, norms.eps)], 1)
        state = F.linear(both.to(gates.down.dtype), gates.down[i]).float()  # [T, R]
        kept = 1 - torch.tanh(F.linear(state, gates.forget[i].float()))
        gated.append(kept * own + torch.tanh(F.linear(state, gates.gain[i].float())) * message)
    return norms.later(gated)
