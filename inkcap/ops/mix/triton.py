"""Mixtures on a GPU: a program has one token and one query, and reads each source once.

Its floor is the sources' bytes; at decode it is all latency. See mix/device.py for what is read early.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.mix.device import LATE, begun, ended, fetched
from inkcap.ops.mix.gate import FEW, MANY, apply, apply_and_norm, states_of_few, states_of_many
from inkcap.ops.mix.ref import message_gate, mix, mix_norm, mix_shares
from inkcap.ops.values import Gates, Normed, Norms


@triton.jit
def mix_kernel(
    sources, queries, weights, out, eps, norm_eps, next_weight,
    NORMED: tl.constexpr, SHARES: tl.constexpr, EARLY: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Writes out [Q, T, C]: the mixture, RMS-normed where NORMED; with SHARES out [Q, T, S]: what it is made of."""
    pdl.trigger(PDL)
    token = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    held = at < C
    query = tl.load(queries + number * C + at, mask=held, other=0.0)
    if NORMED:
        weight = tl.load(weights + number * next_weight + at, mask=held, other=0.0)
    row = (number * tl.num_programs(0) + token) * (len(sources) if SHARES else C)
    state, kept = begun(sources, query, token, at, held, eps, C, EARLY)
    pdl.wait(PDL)
    late = fetched(sources, token, at, held, C, EARLY)
    state, kept = ended(late, state, kept, query, eps, C)
    acc, total, top = state
    if SHARES:
        for i in tl.static_range(len(sources)):
            tl.store(out + row + i, tl.exp(kept[i][0] - top) / total * kept[i][1])
    else:
        acc /= total
        if NORMED:
            acc *= tl.rsqrt(tl.sum(acc * acc, 0) / C + norm_eps) * weight
        tl.store(out + row + at, acc.to(out.dtype.element_ty), mask=held)


def launch(
    sources: Sequence[Tensor],
    queries: Tensor,
    eps: float,
    out: Tensor,
    norms: Norms | None,
    *,
    shares: bool,
    warps: int | None = None,
) -> Tensor:
    """Launch `mix_kernel` for one token or more; returns `out`."""
    (tokens, channels), on = sources[0].shape, pdl.supported(queries.device)
    for source in sources:
        assert source.is_contiguous(), f"a source has strides {source.stride()}; the kernel needs whole rows"
    weight = queries if norms is None else norms.weight
    block = triton.next_power_of_2(channels)
    mix_kernel[(tokens, len(queries))](
        tuple(sources), queries, weight, out, eps, 0.0 if norms is None else norms.eps,
        channels if len(weight) > 1 else 0,
        norms is not None, shares, max(0, len(sources) - LATE), channels, block, on,
        num_warps=warps or max(1, min(16, block // 512)), **pdl.launch(on),
    )  # fmt: skip
    return out


@mix.implement("triton", when=lambda device: device.type == "cuda", tokenwise=True)
def mix_triton(sources: Sequence[Tensor], queries: Tensor, eps: float) -> Tensor:
    """`mix` of the reference."""
    out = torch.empty(len(queries), *sources[0].shape, dtype=torch.float32, device=queries.device)
    return launch(sources, queries, eps, out, None, shares=False) if out.numel() else out


@mix_norm.implement("triton", when=lambda device: device.type == "cuda", tokenwise=True)
def mix_norm_triton(sources: Sequence[Tensor], queries: Tensor, eps: float, norms: Norms) -> tuple[Normed, ...]:
    """`mix_norm` of the reference; the inputs come normed."""
    out = torch.empty(len(queries), *sources[0].shape, dtype=norms.dtype, device=queries.device)
    return norms.done(launch(sources, queries, eps, out, norms, shares=False) if out.numel() else out)


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
) -> tuple[Normed, ...]:
    """`message_gate` of the reference. The inputs of many tokens come normed."""
    tokens = len(sources[0])
    if tokens <= FEW:
        rows, states = states_of_few(sources, queries, eps, senders, shares, gates, norms.eps)
    else:
        rows = mix_triton(sources, queries, eps)
        states = states_of_many(rows, senders, shares, gates, norms.eps)
    if tokens <= MANY:
        return norms.later(apply(rows, senders, shares, gates, states))
    return norms.done(apply_and_norm(rows, senders, shares, gates, states, norms))
