"""Gates of messages on a GPU. A message is made where it is needed: a sum over few sources, of shares that are known.

Few tokens: mixture and product down to a gate's states in one launch, that back up to channels in another, and the norm
is left to whoever multiplies. Many: the library multiplies down, and a tile of tokens goes over the channels twice, the
first time for the norm, so that no gated row is ever kept in fp32.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.mix.device import (
    REGISTERS,
    begun,
    compared,
    ended,
    fetched,
    loaded,
    mixed,
    product,
    shape,
    stored,
    sums,
)
from inkcap.ops.values import Gates, Norms

FEW = 16  # tokens whose states are multiplied one by one
MANY = 64  # tokens from which on a program has all channels of its tokens
STATES = 2  # of a program
CHANNELS, TOKENS = 64, 16  # of a program
TOKENS_OF_MANY = 32  # of a program that has all channels


@triton.jit
def share_of(shares, gate):
    """Where the shares of a program's gate stand."""
    own = shares[0]
    for i in tl.static_range(1, len(shares)):
        if gate == i:
            own = shares[i]
    return own


@triton.jit
def message(sources, share, token, at, inside, C: tl.constexpr):
    """Messages at channels `at` of tokens, fp32; token and at broadcast to the shape of `inside`."""
    total = tl.zeros(inside.shape, tl.float32)
    for i in tl.static_range(len(sources)):
        part = tl.load(share + token * len(sources) + i, mask=token >= 0, other=0.0)
        total += part * tl.load(sources[i] + token * C + at, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def unit(x, eps, C: tl.constexpr, dtype: tl.constexpr):
    """A row [BLOCK] over its rms, rounded."""
    return (x * tl.rsqrt(tl.sum(x * x, 0) / C + eps)).to(dtype)


@triton.jit
def times(row, factor, dtype: tl.constexpr):
    """A row in chunks times a number, rounded."""
    out = ()
    for j in tl.static_range(len(row)):
        out += ((row[j] * factor).to(dtype),)
    return out


@triton.jit
def made(
    sources, queries, senders, shares, gate, token, at, mix_eps, eps, next_query,
    EARLY: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, dtype: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The mixture that a gate lets its message into, fp32, and what `down` multiplies: it and the message over their
    rms, rounded; in chunks. The dependency wait is in here."""
    query = loaded(queries + gate * next_query, at, C, BK)
    state = begun(sources, query, token, at, mix_eps, C, BK, EARLY, PDL)
    sent = fetched(senders, token, at, C, BK, 0)
    pdl.wait(PDL)
    late = fetched(sources, token, at, C, BK, EARLY)
    share = share_of(shares, gate) + token * len(senders)
    own_shares = ()
    for i in tl.static_range(len(senders)):
        own_shares += (tl.load(share + i),)
    m = mixed(sent[0], own_shares[0], sent[1:], own_shares[1:])
    values = compared(late, state, query, EARLY)
    n: tl.constexpr = len(values)
    values += (product(m, m),)
    inner = sums(values)
    of_acc, of_late, squares, _, _, _ = ended(inner, late, state, mix_eps, C, EARLY)
    z = mixed(state[0], of_acc, late, of_late)
    zn = times(z, tl.rsqrt(squares / C + eps), dtype)
    return z, zn, times(m, tl.rsqrt(inner[n] / C + eps), dtype)


@triton.jit
def rows_of_down(down, first, at, C: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, BR: tl.constexpr):
    """BR rows of a gate's `down` [R, 2 C] from `first` on, each as two rows in chunks; what does not exist repeated."""
    out = ()
    for i in tl.static_range(BR):
        row = down + tl.minimum(first + i, R - 1) * (2 * C)
        out += ((loaded(row, at, C, BK), loaded(row + C, at, C, BK)),)
    return out


@triton.jit
def store_states(to, first, w, zn, mn, R: tl.constexpr, BR: tl.constexpr):
    """BR states of one gate and token, of which `to` [R] are all."""
    values = ()
    for i in tl.static_range(BR):
        values += (product(w[i][0], zn) + product(w[i][1], mn),)
    out = sums(values)
    for i in tl.static_range(BR):
        tl.store(to + first + i, out[i].to(to.dtype.element_ty), mask=first + i < R)


@triton.jit
def states_kernel(
    sources, queries, rows, senders, shares, down, states, mix_eps, eps, next_query, next_rows,
    EARLY: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The mixture that a gate lets its message into, rows [1 or G, T, C], and BR states of one gate and token:
    states [G, T, R]. Every program makes the mixture for itself; the first of a gate leaves it."""
    pdl.trigger(PDL)
    token = tl.program_id(1).to(tl.int64)
    gate = tl.program_id(2)
    first = tl.program_id(0) * BR
    at = tl.arange(0, BK)
    w = rows_of_down(down + gate * (R * 2 * C), first, at, C, BK, R, BR)
    z, zn, mn = made(
        sources, queries, senders, shares, gate, token, at, mix_eps, eps, next_query,
        EARLY, C, BK, down.dtype.element_ty, PDL,
    )  # fmt: skip
    if (first == 0) & ((gate == 0) | (next_rows > 0)):
        stored(rows + gate * next_rows + token * C, z, at, C, BK)
    store_states(states + (gate * tl.num_programs(1) + token) * R, first, w, zn, mn, R, BR)


@triton.jit
def pair_kernel(rows, sources, shares, out, eps, next_rows, C: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out [G, T, 2 C]: what `down` multiplies."""
    pdl.trigger(PDL)
    token = tl.program_id(0).to(tl.int64)
    gate = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    held = at < C
    pdl.wait(PDL)
    z = tl.load(rows + gate * next_rows + token * C + at, mask=held, other=0.0)
    m = message(sources, share_of(shares, gate), token + at * 0, at, held, C)
    to = out + (gate * tl.num_programs(0) + token) * (2 * C) + at
    tl.store(to, unit(z, eps, C, out.dtype.element_ty), mask=held)
    tl.store(to + C, unit(m, eps, C, out.dtype.element_ty), mask=held)


@triton.jit
def tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def raised(states, w, BT: tl.constexpr):
    """States [BT, R] times w [BC, R], fp32."""
    if BT == 1:
        out = tl.sum(states.to(tl.float32) * w.to(tl.float32), 1)[None, :]
    else:
        out = tl.dot(states, tl.trans(w), input_precision="ieee")
    return out


@triton.jit
def gated(rows, m, states, forget, gain, token, at, inside, C: tl.constexpr, BT: tl.constexpr):
    """The gated tile [BT, BC]; m is its message, forget and gain [BC, R] those of its channels."""
    own = tl.load(rows + token * C + at, mask=inside, other=0.0)
    kept = 1.0 - tanh(raised(states, forget, BT))
    gained = tanh(raised(states, gain, BT))
    return kept * own + gained * m


@triton.jit(do_not_specialize=["tokens"])
def apply_kernel(
    rows, sources, shares, states, forget, gain, out, tokens, next_rows,
    C: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [G, T, C], fp32."""
    pdl.trigger(PDL)
    gate = tl.program_id(2)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    t = (tl.program_id(1) * BT + tl.arange(0, BT)).to(tl.int64)
    r = tl.arange(0, RP)
    w = (gate * C + c)[:, None] * R + r[None, :]
    known = (c < C)[:, None] & (r < R)[None, :]
    own_forget = tl.load(forget + w, mask=known, other=0.0)
    own_gain = tl.load(gain + w, mask=known, other=0.0)
    inside = (t < tokens)[:, None] & (c < C)[None, :]
    held = tl.minimum(t, tokens - 1)[:, None]
    pdl.wait(PDL)
    m = message(sources, share_of(shares, gate), held, c[None, :], inside, C)
    mask = (t < tokens)[:, None] & (r < R)[None, :]
    own_states = tl.load(states + (gate * tokens + t)[:, None] * R + r[None, :], mask=mask, other=0.0)
    y = gated(rows + gate * next_rows, m, own_states, own_forget, own_gain, held, c[None, :], inside, C, BT)
    tl.store(out + (gate * tokens + t)[:, None] * C + c[None, :], y, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def norm_kernel(
    rows, sources, shares, states, forget, gain, weights, out, tokens, next_rows, next_weight, eps,
    C: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [G, T, C], normed and rounded: one sweep over the channels for the norm, another that stores."""
    pdl.trigger(PDL)
    gate = tl.program_id(1)
    t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    r = tl.arange(0, RP)
    here = tl.arange(0, BC)
    held = tl.minimum(t, tokens - 1)[:, None]
    pdl.wait(PDL)
    mask = (t < tokens)[:, None] & (r < R)[None, :]
    own_states = tl.load(states + (gate * tokens + t)[:, None] * R + r[None, :], mask=mask, other=0.0)
    share = share_of(shares, gate)
    factor = tl.zeros([BT], tl.float32)
    for sweep in tl.static_range(2):
        squares = tl.zeros([BT], tl.float32)
        for first in range(0, C, BC):
            c = first + here
            w = (gate * C + c)[:, None] * R + r[None, :]
            known = (c < C)[:, None] & (r < R)[None, :]
            inside = (t < tokens)[:, None] & (c < C)[None, :]
            m = message(sources, share, held, c[None, :], inside, C)
            y = gated(
                rows + gate * next_rows, m, own_states, tl.load(forget + w, mask=known, other=0.0),
                tl.load(gain + w, mask=known, other=0.0), held, c[None, :], inside, C, BT,
            )  # fmt: skip
            if sweep == 0:
                squares += tl.sum(tl.where(inside, y * y, 0.0), 1)
            else:
                y *= factor[:, None] * tl.load(weights + gate * next_weight + c, mask=c < C, other=0.0)[None, :]
                to = out + (gate * tokens + t)[:, None] * C + c[None, :]
                tl.store(to, y.to(out.dtype.element_ty), mask=inside)
        if sweep == 0:
            factor = tl.rsqrt(squares / C + eps)


def between(rows: Tensor) -> int:
    """Elements from one gate's rows to the next one's; 0 where they share them. rows: [1 or G, T, C]."""
    assert rows.is_contiguous(), f"rows of gates have strides {rows.stride()}; the kernels need whole ones"
    return rows.stride(0) if len(rows) > 1 else 0


def states_of_few(
    sources: Sequence[Tensor],
    queries: Tensor,
    mix_eps: float,
    senders: Sequence[Tensor],
    shares: Sequence[Tensor],
    gates: Gates,
    eps: float,
    late: int,
) -> tuple[Tensor, Tensor]:
    """Mixtures [Q, T, C] fp32, and states [G, T, R], token by token."""
    (number, rank, _), (tokens, channels), on = gates.down.shape, sources[0].shape, pdl.supported(queries.device)
    rows = torch.empty(len(queries), tokens, channels, dtype=torch.float32, device=queries.device)
    states = torch.empty(number, tokens, rank, dtype=gates.down.dtype, device=rows.device)
    warps, chunk = shape(channels)
    states_kernel[(triton.cdiv(rank, STATES), tokens, number)](
        tuple(sources), queries, rows, tuple(senders), tuple(shares), gates.down, states, mix_eps, eps,
        channels if len(queries) > 1 else 0, between(rows), max(0, len(sources) - late),
        channels, chunk, rank, STATES, on,
        num_warps=warps, maxnreg=REGISTERS, **pdl.launch(on),
    )  # fmt: skip
    return rows, states


def states_of_many(
    rows: Tensor, sources: Sequence[Tensor], shares: Sequence[Tensor], gates: Gates, eps: float
) -> Tensor:
    """States [G, T, R] of known mixtures, by one product a gate."""
    number, (_, tokens, channels), on = len(gates.down), rows.shape, pdl.supported(rows.device)
    pairs = torch.empty(number, tokens, 2 * channels, dtype=gates.down.dtype, device=rows.device)
    pair_kernel[(tokens, number)](
        rows, tuple(sources), tuple(shares), pairs, eps, between(rows), channels, triton.next_power_of_2(channels), on,
        num_warps=8, **pdl.launch(on),
    )  # fmt: skip
    return torch.bmm(pairs, gates.down.transpose(1, 2))


def apply(
    rows: Tensor,
    sources: Sequence[Tensor],
    shares: Sequence[Tensor],
    gates: Gates,
    states: Tensor,
    *,
    fixed: bool = False,
) -> Tensor:
    """Gated rows [G, T, C] fp32. `fixed`: one token's product is that of many, in which it may stand."""
    (number, channels, rank), tokens, on = gates.forget.shape, rows.shape[1], pdl.supported(rows.device)
    out = torch.empty(number, tokens, channels, dtype=torch.float32, device=rows.device)
    bt = 1 if tokens == 1 and not fixed else TOKENS
    apply_kernel[(triton.cdiv(channels, CHANNELS), triton.cdiv(tokens, bt), number)](
        rows, tuple(sources), tuple(shares), states, gates.forget, gates.gain, out, tokens, between(rows),
        channels, rank, max(16, triton.next_power_of_2(rank)), CHANNELS, bt, on,
        num_warps=4, **pdl.launch(on),
    )  # fmt: skip
    return out


def apply_and_norm(
    rows: Tensor, sources: Sequence[Tensor], shares: Sequence[Tensor], gates: Gates, states: Tensor, norms: Norms
) -> Tensor:
    """Gated and normed rows [G, T, C]."""
    (number, channels, rank), tokens, on = gates.forget.shape, rows.shape[1], pdl.supported(rows.device)
    out = torch.empty(number, tokens, channels, dtype=norms.dtype, device=rows.device)
    norm_kernel[(triton.cdiv(tokens, TOKENS_OF_MANY), number)](
        rows, tuple(sources), tuple(shares), states, gates.forget, gates.gain, norms.weight, out, tokens,
        between(rows), channels if len(norms.weight) > 1 else 0, norms.eps,
        channels, rank, max(16, triton.next_power_of_2(rank)), CHANNELS, TOKENS_OF_MANY, on,
        num_warps=4, **pdl.launch(on),
    )  # fmt: skip
    return out
