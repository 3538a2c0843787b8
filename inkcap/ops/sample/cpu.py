"""Drawing on a CPU with hardly a logarithm: NumPy, exact.

The winner's score is logsumexp(scaled) plus a Gumbel number (that is what makes Gumbel-max a draw), so it is below
`logsumexp - SLACK` once in exp(exp(SLACK)) draws. Tokens that could reach that line are found with integer noise, one
exponential and no logarithm; only these few are scored, as the reference does it. If the best of them is below the
line after all, every token is scored.
"""

from itertools import repeat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inkcap.ops.sample.ref import LOW, STRIDE, Limits, allow, penalize, sample

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]

SLACK = 3.0  # exp(SLACK) = 20 tokens are scored on average; the line is missed once in 5e8 draws
# Of the comparison with float32 numbers: relative errors of an exponential and of a large sum, and 32 bits of noise in
# 24 bits of precision.
MARGIN = 1.001
SLAB = 1 << 16  # logits at a time, so that a slab's arrays stay in the second-level cache
BITS = np.arange(32)  # of a word of masks
FEW = 1024  # likeliest tokens among which the edge of top-p is sought first
NO_LIMITS = (repeat(0), repeat(1.0), repeat(0.0))  # top-k, top-p, min-p of any number of rows
COUNTERS: dict[int, Words] = {}  # vocabulary -> id * STRIDE of each token


@allow.implement("cpu", when=lambda device: device.type == "cpu")
def allow_cpu(logits: Tensor, masks: Tensor) -> None:
    """`allow` of the reference."""
    for row, mask in zip(logits.numpy(), masks.numpy().view(np.uint32), strict=True):
        _forbid(row, mask)


@sample.implement("cpu", when=lambda device: device.type == "cpu")
def sample_cpu(
    logits: Tensor,
    temperature: Tensor,
    limits: Limits | None,
    seeds: Tensor,
    positions: Tensor,
    masks: Tensor | None = None,
) -> Tensor:
    """`sample` of the reference. Of rows that allow few tokens only these are looked at."""
    rows: Floats = logits.numpy()
    heats: Floats = temperature.numpy()
    width = rows.shape[1]
    keys = noise_keys(seeds.numpy(), positions.numpy()) if heats.any() else np.empty((0, 2), np.uint32)
    tokens = np.full(len(rows), -1, dtype=np.int64)
    whole: list[int] = []  # places of rows that draw from all tokens
    words = None if masks is None else masks.numpy().view(np.uint32)
    columns = NO_LIMITS if limits is None else (limits.top_k.tolist(), limits.top_p.tolist(), limits.min_p.tolist())
    for place, (heat, k, p, ratio) in enumerate(zip(heats.tolist(), *columns, strict=limits is not None)):
        row, few, mask = rows[place], None, None
        if words is not None:
            few = _few(words[place], width)
            if few is None:
                mask = words[place]
            else:
                row = row[few]
        if mask is not None and heat != 0:
            _forbid(row, mask)
        best = int(row.argmax()) if row.size else 0  # of the first NaN, if there is one
        # the best token of all is the best of those allowed if it is allowed: then nothing need be masked
        if mask is not None and heat == 0 and not mask[best >> 5] >> np.uint32(best & 31) & 1:
            _forbid(row, mask)
            best = int(row.argmax())
        if not (row.size and np.isfinite(row[best])):
            continue
        if heat == 0:
            tokens[place] = best if few is None else few[best]
        elif few is not None or 0 < k < width or p < 1 or ratio > 0:
            scaled = row / np.float32(heat)
            kept = np.flatnonzero(scaled >= threshold(scaled, k, p, ratio))
            ids = kept if few is None else few[kept]
            tokens[place] = ids[_draw(scaled[None, kept], counters(width)[ids], keys[place : place + 1])[0]]
        else:
            whole.append(place)
    count = max(1, SLAB // width)
    for at in range(0, len(whole), count):
        part = whole[at : at + count]
        together = part[-1] - part[0] == len(part) - 1
        slab = rows[part[0] : part[-1] + 1] if together else rows[part]
        if (heats[part] != 1).any():
            slab = slab / heats[part, None]
        tokens[part] = _draw(slab, counters(width), keys[part])
    return torch.from_numpy(tokens)


def _few(mask: Words, width: int) -> NDArray[np.int64] | None:
    """The tokens that a mask allows, of `width`; None if it allows many."""
    named = np.flatnonzero(mask)
    if len(named) * 8 >= len(mask):
        return None
    bits = np.unpackbits(mask[named].view(np.uint8), bitorder="little").view(bool)
    ids = (32 * named[:, None] + BITS).ravel()[bits]
    return ids[ids < width]


def _forbid(row: Floats, mask: Words) -> None:
    """`allow` of one row."""
    bits = np.unpackbits(mask.view(np.uint8), count=len(row), bitorder="little")
    # +inf where allowed, -inf where not: half of the time that an assignment by mask takes
    np.minimum(row, (bits - np.float32(0.5)) * np.float32(np.inf), out=row)


def threshold(scaled: Floats, top_k: int, top_p: float, min_p: float) -> np.float32:
    """`threshold` of the reference, for one row [V]."""
    highest = scaled.max()
    least = np.float32(-np.inf)
    if 0 < top_k < len(scaled):
        least = np.partition(scaled, len(scaled) - top_k)[len(scaled) - top_k]
        kept = scaled[scaled >= least]
    else:
        kept = scaled
    if top_p < 1:
        least = _nucleus(kept, highest, top_p)
    if min_p > 0:
        least = max(least, highest + np.log(np.float32(min_p)))
    return least


def _nucleus(kept: Floats, highest: np.float32, top_p: float) -> np.float32:
    """The smallest of the largest logits that hold `top_p` of the mass of `kept`."""
    needed = top_p * np.exp(kept - highest).sum(dtype=np.float64)
    few = kept
    if len(kept) > FEW:
        few = np.partition(kept, len(kept) - FEW)[len(kept) - FEW :]
    for part in (few, kept):
        falling = np.sort(part)[::-1]
        mass = np.exp(falling.astype(np.float64) - highest).cumsum()
        if mass[-1] >= needed:
            break
    return falling[min(np.searchsorted(mass, needed), len(falling) - 1)]


def counters(vocabulary: int) -> Words:
    """id * STRIDE for each id of a vocabulary."""
    if vocabulary not in COUNTERS:
        COUNTERS[vocabulary] = np.arange(vocabulary, dtype=np.uint32) * np.uint32(STRIDE)
    return COUNTERS[vocabulary]


def noise_keys(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> Words:
    """`noise_keys` of the reference; 64-bit words wrap by themselves."""
    key = _mix64(_mix64(seeds.view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)) + positions.view(np.uint64))
    return np.stack((key & np.uint64(LOW), key >> np.uint64(32)), axis=1).astype(np.uint32)


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _bits(counter: Words, keys: Words) -> Words:
    """`noise_bits` of the reference; 32-bit words wrap by themselves."""
    x = counter + keys[:, :1]
    shifted = x >> np.uint32(16)
    x ^= shifted
    x *= np.uint32(0x21F0AAAD)
    x ^= np.right_shift(x, np.uint32(15), out=shifted)
    x += keys[:, 1:]
    x *= np.uint32(0x735A2D97)
    x ^= np.right_shift(x, np.uint32(15), out=shifted)
    return x


def _draw(scaled: Floats, counter: Words, keys: Words) -> NDArray[np.int64]:
    """Index [R] of the highest score in each row of scaled [R, n]; counter: [n]; keys: [R, 2]."""
    bits = _bits(counter, keys)
    highest = scaled.max(1, keepdims=True)
    weights = scaled - highest
    np.exp(weights, out=weights)
    totals = weights.sum(1, keepdims=True)
    lines = (highest.astype(np.float64) + np.log(totals) - SLACK)[:, 0]
    # score >= line  <=>  -log1p(-u) <= exp(scaled - line), and u <= -log1p(-u)
    weights *= np.float32(MARGIN * 2.0**32 * np.exp(SLACK)) / totals
    # as words against floats, both would become float64
    row, chosen = np.divmod(np.flatnonzero(bits.astype(np.float32) <= weights), scaled.shape[1])
    scores = _scores(scaled[row, chosen], bits[row, chosen])
    best = np.full(len(scaled), -np.inf)
    np.maximum.at(best, row, scores)
    found = np.empty(len(scaled), dtype=np.int64)
    won = scores == best[row]
    found[row[won][::-1]] = chosen[won][::-1]  # the lowest of equals comes last
    for place in np.flatnonzero(best < lines):
        found[place] = _scores(scaled[place], bits[place]).argmax()
    return found


def _scores(scaled: Floats, bits: Words) -> NDArray[np.float64]:
    return scaled.astype(np.float64) - np.log(-np.log1p(-(bits + 0.5) * 2.0**-32))


@penalize.implement("cpu", when=lambda device: device.type == "cpu")
def penalize_cpu(
    logits: Tensor, counts: Tensor, seen: Tensor, repetition: float, presence: float, frequency: float
) -> None:
    """`penalize` of the reference, touching the tokens seen only. Every token of the output has been seen."""
    row: Floats = logits.numpy()
    ids = np.flatnonzero(seen.numpy())
    known = row[ids]
    often = counts.numpy()[ids].astype(np.float32)
    factor = np.float32(repetition)
    known = np.where(known > 0, known / factor, known * factor)
    row[ids] = known - (np.float32(frequency) * often + np.float32(presence) * (often > 0))
