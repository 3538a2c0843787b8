"""Mixtures of a loop in deterministic mode on a GPU: what a few tokens' kernels compute, for any number of tokens.

A few tokens' states are made by one kernel, which makes the mixture over and over. Many take the same sums from pairs
that are made once.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.mix.device import LATE, REGISTERS, loaded, shape, stored
from inkcap.ops.mix.gate import FEW, STATES, apply, between, made, rows_of_down, states_of_few, store_states
from inkcap.ops.mix.ref import message_gate, mix_shares
from inkcap.ops.mix.triton import launch
from inkcap.ops.norm.ref import rms_norm
from inkcap.ops.values import Gates, Normed, Norms


@triton.jit
def pairs_kernel(
    sources, queries, rows, senders, shares, pairs, mix_eps, eps, next_query, next_rows,
    EARLY: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Mixtures, rows [1 or G, T, C], and what `down` multiplies, pairs [G, T, 2 C]."""
    pdl.trigger(PDL)
    token = tl.program_id(0).to(tl.int64)
    gate = tl.program_id(1)
    at = tl.arange(0, BK)
    z, zn, mn = made(
        sources, queries, senders, shares, gate, token, at, mix_eps, eps, next_query,
        EARLY, C, BK, pairs.dtype.element_ty, PDL,
    )  # fmt: skip
    if (gate == 0) | (next_rows > 0):
        stored(rows + gate * next_rows + token * C, z, at, C, BK)
    own = pairs + (gate * tl.num_programs(0) + token) * (2 * C)
    stored(own, zn, at, C, BK)
    stored(own + C, mn, at, C, BK)


@triton.jit
def states_kernel(
    pairs, down, states, C: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, PDL: tl.constexpr
):
    """BR states [G, T, R] of one gate and token, from its pair; summed as in gate.py."""
    pdl.trigger(PDL)
    token = tl.program_id(1).to(tl.int64)
    gate = tl.program_id(2)
    first = tl.program_id(0) * BR
    at = tl.arange(0, BK)
    w = rows_of_down(down + gate * (R * 2 * C), first, at, C, BK, R, BR)
    pdl.wait(PDL)
    own = pairs + (gate * tl.num_programs(1) + token) * (2 * C)
    zn, mn = loaded(own, at, C, BK), loaded(own + C, at, C, BK)
    store_states(states + (gate * tl.num_programs(1) + token) * R, first, w, zn, mn, R, BR)


def states_of_each(
    sources: Sequence[Tensor],
    queries: Tensor,
    mix_eps: float,
    senders: Sequence[Tensor],
    shares: Sequence[Tensor],
    gates: Gates,
    eps: float,
    late: int,
) -> tuple[Tensor, Tensor]:
    """Mixtures and states with the bits of `states_of_few`, for many tokens."""
    (number, rank, _), (tokens, channels), on = gates.down.shape, sources[0].shape, pdl.supported(queries.device)
    rows = torch.empty(len(queries), tokens, channels, dtype=torch.float32, device=queries.device)
    pairs = torch.empty(number, tokens, 2 * channels, dtype=gates.down.dtype, device=rows.device)
    states = torch.empty(number, tokens, rank, dtype=gates.down.dtype, device=rows.device)
    warps, chunk = shape(channels)
    pairs_kernel[(tokens, number)](
        tuple(sources), queries, rows, tuple(senders), tuple(shares), pairs, mix_eps, eps,
        channels if len(queries) > 1 else 0, between(rows), max(0, len(sources) - late), channels, chunk, on,
        num_warps=warps, maxnreg=REGISTERS, **pdl.launch(on),
    )  # fmt: skip
    states_kernel[(triton.cdiv(rank, STATES), tokens, number)](
        pairs, gates.down, states, channels, chunk, rank, STATES, on, num_warps=warps, **pdl.launch(on)
    )
    return rows, states


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
    late: int = LATE,
) -> tuple[Normed, ...]:
    """`message_gate` of the reference."""
    make = states_of_few if len(sources[0]) <= FEW else states_of_each
    rows, states = make(sources, queries, eps, senders, shares, gates, norms.eps, late)
    gated = apply(rows, senders, shares, gates, states, fixed=True)
    if len(norms.weight) == 1:  # one launch for all
        return norms.done(rms_norm(gated, norms.weight[0], norms.eps, norms.dtype))
    return norms.later(gated)
