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

from inkcap.ops.sample.ref import LOW, STRIDE, Limits, penalize, sample

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]

SLACK = 3.0  # exp(SLACK) = 20 tokens are scored on average; the line is missed once in 5e8 draws
# Of the comparison with float32 numbers: relative errors of an exponential and of a large sum, and 32 bits of noise in
# 24 bits of precision.
MARGIN = 1.001
SLAB = 1 << 16  # logits at a time, so that a slab's arrays stay in the second-level cache
PROBED = 64  # one logit of so many shows whether a row is masked
FEW = 1024  # likeliest tokens among which the edge of top-p is sought first
NO_LIMITS = (repeat(0), repeat(1.0), repeat(0.0))  # top-k, top-p, min-p of any number of rows
COUNTERS: dict[int, Words] = {}  # vocabulary -> id * STRIDE of each token


@sample.implement("cpu", when=lambda device: device.type == "cpu")
def sample_cpu(logits: Tensor, temperature: Tensor, limits: Limits | None, seeds: Tensor, positions: Tensor) -> Tensor:
    """`sample` of the reference."""
    rows: Floats = logits.numpy()
    heats: Floats = temperature.numpy()
    width = rows.shape[1]
    keys = noise_keys(seeds.numpy(), positions.numpy()) if heats.any() else np.empty((0, 2), np.uint32)
    tokens = np.full(len(rows), -1, dtype=np.int64)
    sound = logits.amax(1).isfinite().tolist()
    whole: list[int] = []  # places of rows that draw from all tokens
    columns = NO_LIMITS if limits is None else (limits.top_k.tolist(), limits.top_p.tolist(), limits.min_p.tolist())
    for place, (heat, k, p, ratio) in enumerate(zip(heats.tolist(), *columns, strict=limits is not None)):
        if not sound[place]:
            continue
        if heat == 0:
            tokens[place] = rows[place].argmax()
        elif 0 < k < width or p < 1 or ratio > 0:
            scaled = rows[place] / np.float32(heat)
            ids = np.flatnonzero(scaled >= threshold(scaled, k, p, ratio))
            tokens[place] = ids[_draw(scaled[None, ids], counters(width)[ids], keys[place : place + 1])[0]]
        elif _sparse(rows[place]):
            ids = np.flatnonzero(rows[place] > -np.inf)
            scaled = rows[place][ids] / np.float32(heat)
            tokens[place] = ids[_draw(scaled[None], counters(width)[ids], keys[place : place + 1])[0]]
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


def _sparse(row: Floats) -> bool:
    """Whether most of a row is masked, by a look at some of it: where rules leave little choice."""
    seen = row[::PROBED]
    return bool(4 * np.count_nonzero(seen > -np.inf) < len(seen))


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
