"""Mixtures of a loop in deterministic mode on a GPU: what a few tokens' kernels compute, for any number of tokens.

A few tokens' states are made by one kernel, which makes the mixture over and over. Many take the same sums from rows
that are made once.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.mix.gate import FEW, STATES, apply, between, pair_kernel, states_of_few
from inkcap.ops.mix.ref import message_gate, mix_shares
from inkcap.ops.mix.triton import launch
from inkcap.ops.norm.ref import rms_norm
from inkcap.ops.values import Gates, Normed, Norms

WARPS = 8  # of the kernel for a few tokens, whose sums these are


@triton.jit
def states_kernel(
    pairs, down, states, C: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, PDL: tl.constexpr
):
    """BR states [G, T, R] of one gate and token, from its rounded rows [G, T, 2 C]; summed as in gate.py."""
    pdl.trigger(PDL)
    token = tl.program_id(1).to(tl.int64)
    gate = tl.program_id(2)
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    at = tl.arange(0, BLOCK)
    held = at < C
    w = down + (gate * R + r)[:, None] * (2 * C) + at[None, :]
    inside = (r < R)[:, None] & held[None, :]
    of_row = tl.load(w, mask=inside, other=0.0)
    of_message = tl.load(w + C, mask=inside, other=0.0)
    pdl.wait(PDL)
    own = pairs + (gate * tl.num_programs(1) + token) * (2 * C) + at
    zn = tl.load(own, mask=held, other=0.0).to(tl.float32)
    mn = tl.load(own + C, mask=held, other=0.0).to(tl.float32)
    out = tl.sum(of_row.to(tl.float32) * zn[None, :] + of_message.to(tl.float32) * mn[None, :], 1)
    tl.store(states + (gate * tl.num_programs(1) + token) * R + r, out.to(states.dtype.element_ty), mask=r < R)


def states_of_many(
    rows: Tensor, senders: Sequence[Tensor], shares: Sequence[Tensor], gates: Gates, eps: float
) -> Tensor:
    """States [G, T, R] of known mixtures, with the bits of `states_of_few`."""
    (number, rank, _), (_, tokens, channels), on = gates.down.shape, rows.shape, pdl.supported(rows.device)
    pairs = torch.empty(number, tokens, 2 * channels, dtype=gates.down.dtype, device=rows.device)
    states = torch.empty(number, tokens, rank, dtype=gates.down.dtype, device=rows.device)
    block = triton.next_power_of_2(channels)
    pair_kernel[(tokens, number)](
        rows, tuple(senders), tuple(shares), pairs, eps, between(rows), channels, block, on,
        num_warps=WARPS, **pdl.launch(on),
    )  # fmt: skip
    states_kernel[(triton.cdiv(rank, STATES), tokens, number)](
        pairs, gates.down, states, channels, block, rank, STATES, on, num_warps=WARPS, **pdl.launch(on)
    )
    return states


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
    if len(sources[0]) <= FEW:
        rows, states = states_of_few(sources, queries, eps, senders, shares, gates, norms.eps)
    else:
        rows = torch.empty(len(queries), *sources[0].shape, dtype=torch.float32, device=queries.device)
        launch(sources, queries, eps, rows, None, shares=False, warps=WARPS)
        states = states_of_many(rows, senders, shares, gates, norms.eps)
    gated = apply(rows, senders, shares, gates, states, fixed=True)
    if len(norms.weight) == 1:  # one launch for all
        return norms.done(rms_norm(gated, norms.weight[0], norms.eps, norms.dtype))
    return norms.later(gated)
