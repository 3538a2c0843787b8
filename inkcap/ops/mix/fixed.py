"""Mixtures of a loop in deterministic mode on a GPU: the kernels for a few tokens, for any number of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from inkcap.ops.mix.gate import apply, states_of_few
from inkcap.ops.mix.ref import message_gate, mix_shares
from inkcap.ops.mix.triton import launch
from inkcap.ops.norm.ref import rms_norm
from inkcap.ops.values import Gates, Normed, Norms


@mix_shares.implement("fixed", when=lambda device: device.type == "cuda", spare=True)
def mix_shares_fixed(sources: Sequence[Tensor], queries: Tensor, eps: float) -> Tensor:
    """`mix_shares` of the reference."""
    out = torch.empty(len(queries), len(sources[0]), len(sources), dtype=torch.float32, device=queries.device)
    return launch(sources, queries, eps, out, None, shares=True) if out.numel() else out


@message_gate.implement("fixed", when=lambda device: device.type == "cuda", spare=True)
def message_gate_fixed(
    sources: Sequence[Tensor],
    queries: Tensor,
    eps: float,
    senders: Sequence[Tensor],
    shares: Sequence[Tensor],
    gates: Gates,
    norms: Norms,
) -> tuple[Normed, ...]:
    """`message_gate` of the reference."""
    rows, states = states_of_few(sources, queries, eps, senders, shares, gates, norms.eps)
    gated = apply(rows, senders, shares, gates, states, fixed=True)
    if len(norms.weight) == 1:  # one launch for all
        return norms.done(rms_norm(gated, norms.weight[0], norms.eps, norms.dtype))
    return norms.later(gated)
