"""Mixtures on a GPU: a program has one token and one query, and reads each source once.

Its floor is the sources' bytes; at decode it is all latency. See mix/device.py for what is read early.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.mix.device import (
    LATE,
    REGISTERS,
    announced,
    begun,
    compared,
    ended,
    fetched,
    loaded,
    mixed,
    scaled,
    shape,
    stored,
    sums,
    weighted,
)
from inkcap.ops.mix.gate import FEW, MANY, apply, apply_and_norm, states_of_few, states_of_many
from inkcap.ops.mix.ref import message_gate, mix, mix_norm, mix_shares
from inkcap.ops.values import Gates, Normed, Norms


@triton.jit
def mix_kernel(
    sources, queries, weights, out, eps, norm_eps, next_weight,
    NORMED: tl.constexpr, SHARES: tl.constexpr, EARLY: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Writes out [Q, T, C]: the mixture, RMS-normed where NORMED; with SHARES out [Q, T, S]: what it is made of, and
    triggers behind its wait, so that gates may read the sources early."""
    if not SHARES:
        pdl.trigger(PDL)
    token = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1)
    at = tl.arange(0, BK)
    query = loaded(queries + number * C, at, C, BK)
    if NORMED:
        announced(weights + number * next_weight, C, BK, PDL)
    row = out + (number * tl.num_programs(0) + token) * (len(sources) if SHARES else C)
    state = begun(sources, query, token, at, eps, C, BK, EARLY, PDL)
    pdl.wait(PDL)
    if SHARES:
        pdl.trigger(PDL)
    late = fetched(sources, token, at, C, BK, EARLY)
    values = compared(late, state, query, EARLY)
    if NORMED:
        weight = loaded(weights + number * next_weight, at, C, BK)
    of_acc, of_late, squares, total, top, kept = ended(sums(values), late, state, eps, C, EARLY)
    if SHARES:
        for i in tl.static_range(len(sources)):
            tl.store(row + i, tl.exp(kept[i][0] - top) / total * kept[i][1])
    else:
        if NORMED:
            factor = tl.rsqrt(squares / C + norm_eps)
            of_acc *= factor
            of_late = scaled(of_late, factor)
        made = mixed(state[0], of_acc, late, of_late)
        if NORMED:
            made = weighted(made, weight)
        stored(row, made, at, C, BK)


def launch(
    sources: Sequence[Tensor],
    queries: Tensor,
    eps: float,
    out: Tensor,
    norms: Norms | None,
    *,
    shares: bool,
    late: int = LATE,
) -> Tensor:
    """Launch `mix_kernel` for one token or more; returns `out`."""
    (tokens, channels), on = sources[0].shape, pdl.supported(queries.device)
    for source in sources:
        assert source.is_contiguous(), f"a source has strides {source.stride()}; the kernel needs whole rows"
    weight = queries if norms is None else norms.weight
    warps, chunk = shape(channels)
    mix_kernel[(tokens, len(queries))](
        tuple(sources), queries, weight, out, eps, 0.0 if norms is None else norms.eps,
        channels if len(weight) > 1 else 0,
        norms is not None, shares, max(0, len(sources) - late), channels, chunk, on,
        num_warps=warps, maxnreg=REGISTERS, **pdl.launch(on),
    )  # fmt: skip
    return out


@mix.implement("triton", when=lambda device: device.type == "cuda", tokenwise=True)
def mix_triton(sources: Sequence[Tensor], queries: Tensor, eps: float) -> Tensor:
    """`mix` of the reference."""
    out = torch.empty(len(queries), *sources[0].shape, dtype=torch.float32, device=queries.device)
    return launch(sources, queries, eps, out, None, shares=False) if out.numel() else out


@mix_norm.implement("triton", when=lambda device: device.type == "cuda", tokenwise=True)
def mix_norm_triton(
    sources: Sequence[Tensor], queries: Tensor, eps: float, norms: Norms, late: int = LATE
) -> tuple[Normed, ...]:
    """`mix_norm` of the reference; the inputs come normed."""
    out = torch.empty(len(queries), *sources[0].shape, dtype=norms.dtype, device=queries.device)
    return norms.done(launch(sources, queries, eps, out, norms, shares=False, late=late) if out.numel() else out)


@mix_shares.implement("triton", when=lambda device: device.type == "cuda")
def mix_shares_triton(sources: Sequence[Tensor], queries: Tensor, eps: float) -> Tensor:
    """`mix_shares` of the reference, which for many tokens is two products of the library."""
    tokens = len(sources[0])
    if tokens > MANY:
        return mix_shares.reference(sources, queries, eps)
    out = torch.empty(len(queries), tokens, len(sources), dtype=torch.float32, device=queries.device)
    return launch(sources, queries, eps, out, None, shares=True) if out.numel() else out


@message_gate.implement("triton", when=lambda device: device.type == "cuda")
def message_gate_triton(
    sources: Sequence[Tensor],
    queries: Tensor,
    eps: float,
    senders: Sequence[Tensor],
    shares: Sequence[Tensor],
    gates: Gates,
    norms: Norms,
    late: int = LATE,
) -> tuple[Normed, ...]:
    """`message_gate` of the reference. The inputs of many tokens come normed."""
    tokens = len(sources[0])
    if tokens <= FEW:
        rows, states = states_of_few(sources, queries, eps, senders, shares, gates, norms.eps, late)
    else:
        rows = mix_triton(sources, queries, eps)
        states = states_of_many(rows, senders, shares, gates, norms.eps)
    if tokens <= MANY:
        return norms.later(apply(rows, senders, shares, gates, states))
    return norms.done(apply_and_norm(rows, senders, shares, gates, states, norms))
