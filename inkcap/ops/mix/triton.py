"""Mixtures on a GPU: a program has one token and one query, and reads each source once.

Its floor is the sources' bytes; at decode it is all latency. Blocks are finished long before they are mixed, so all
sources but the last two, of which one may be a block just closed, are read before the dependency wait. For the same
reason the kernel triggers after its wait: what it waited for is complete when anything behind it starts.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.mix.gate import FEW, MANY, apply, apply_and_norm, states_of_few, states_of_many
from inkcap.ops.mix.ref import message_gate, mix, mix_norm, mix_shares
from inkcap.ops.values import Gates, Normed, Norms

LATE = 2  # sources that may have been written just now


@triton.jit
def both(a, b, c, d):
    return a + c, b + d


@triton.jit
def score(x, query, eps, C: tl.constexpr):
    """(score of a source's row, its 1 / rms)."""
    squares, product = tl.reduce((x * x, x * query), 0, both)
    factor = tl.rsqrt(squares / C + eps)
    return product * factor * (C**-0.5), factor


@triton.jit
def mix_kernel(
    sources, queries, weights, out, eps, norm_eps, next_weight,
    NORMED: tl.constexpr, SHARES: tl.constexpr, EARLY: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Writes out [Q, T, C]: the mixture, RMS-normed where NORMED; with SHARES out [Q, T, S]: what it is made of."""
    token = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    held = at < C
    query = tl.load(queries + number * C + at, mask=held, other=0.0)
    if NORMED:
        weight = tl.load(weights + number * next_weight + at, mask=held, other=0.0)
    row = (number * tl.num_programs(0) + token) * (len(sources) if SHARES else C)
    acc = tl.zeros([BLOCK], tl.float32)
    top = -float("inf")
    total = 0.0
    kept = ()
    for i in tl.static_range(EARLY):
        x = tl.load(sources[i] + token * C + at, mask=held, other=0.0).to(tl.float32)
        z, factor = score(x, query, eps, C)
        higher = tl.maximum(top, z)
        shrink, p = tl.exp(top - higher), tl.exp(z - higher)
        acc = acc * shrink + x * (p * factor)
        total = total * shrink + p
        top = higher
        kept += ((z, factor),)
    pdl.wait(PDL)
    pdl.trigger(PDL)
    late = ()
    for i in tl.static_range(EARLY, len(sources)):  # all loads before the first sum
        late += (tl.load(sources[i] + token * C + at, mask=held, other=0.0).to(tl.float32),)
    for i in tl.static_range(len(sources) - EARLY):
        z, factor = score(late[i], query, eps, C)
        higher = tl.maximum(top, z)
        shrink, p = tl.exp(top - higher), tl.exp(z - higher)
        acc = acc * shrink + late[i] * (p * factor)
        total = total * shrink + p
        top = higher
        kept += ((z, factor),)
    if SHARES:
        for i in tl.static_range(len(sources)):
            tl.store(out + row + i, tl.exp(kept[i][0] - top) / total * kept[i][1])
    else:
        acc /= total
        if NORMED:
            acc *= tl.rsqrt(tl.sum(acc * acc, 0) / C + norm_eps) * weight
        tl.store(out + row + at, acc.to(out.dtype.element_ty), mask=held)


def launch(
    sources: Sequence[Tensor], queries: Tensor, eps: float, out: Tensor, norms: Norms | None, *, shares: bool
) -> Tensor:
    """Launch `mix_kernel` for one token or more; returns `out`."""
    (tokens, channels), on = sources[0].shape, pdl.supported(queries.device)
    for source in sources:
        assert source.is_contiguous(), (
            f"a source of a mixture has strides {source.stride()}; the kernel needs whole rows"
        )
    weight = queries if norms is None else norms.weight
    block = triton.next_power_of_2(channels)
    mix_kernel[(tokens, len(queries))](
        tuple(sources), queries, weight, out, eps, 0.0 if norms is None else norms.eps,
        channels if len(weight) > 1 else 0,
        norms is not None, shares, max(0, len(sources) - LATE), channels, block, on,
        num_warps=max(1, min(16, block // 512)), **pdl.launch(on),
    )  # fmt: skip
    return out


@mix.implement("triton", when=lambda device: device.type == "cuda")
def mix_triton(sources: Sequence[Tensor], queries: Tensor, eps: float) -> Tensor:
    """`mix` of the reference."""
    out = torch.empty(len(queries), *sources[0].shape, dtype=torch.float32, device=queries.device)
    return launch(sources, queries, eps, out, None, shares=False) if out.numel() else out


@mix_norm.implement("triton", when=lambda device: device.type == "cuda")
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
    rows: Tensor, sources: Sequence[Tensor], shares: Sequence[Tensor], gates: Gates, eps: float, norms: Norms
) -> tuple[Normed, ...]:
    """`message_gate` of the reference. The inputs of many tokens come normed."""
    tokens = rows.shape[1]
    states = (states_of_few if tokens <= FEW else states_of_many)(rows, sources, shares, gates, eps)
    if tokens <= MANY:
        return norms.later(apply(rows, sources, shares, gates, states))
    return norms.done(apply_and_norm(rows, sources, shares, gates, states, norms))
