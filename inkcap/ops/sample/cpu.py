"""Drawing on a CPU without noise for every token: NumPy, row by row, exact.

The winner's score is logsumexp(scaled) plus a Gumbel number (that is what makes Gumbel-max a draw), so it is below
`logsumexp - SLACK` once in exp(exp(SLACK)) draws. Tokens that could reach that line are found with integer noise, one
exponential and no logarithm; only these few are scored, as the reference does it. If the best of them is below the
line after all, every token is scored.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inkcap.ops.sample.ref import STRIDE, noise_keys, sample

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]

SLACK = 3.0  # exp(SLACK) = 20 tokens are scored on average; the line is missed once in 5e8 draws
# Of the comparison with float32 numbers: relative errors of an exponential and of a large sum, and 32 bits of noise in
# 24 bits of precision.
MARGIN = 1.001
FEW = 1024  # likeliest tokens among which the edge of top-p is sought first
COUNTERS: dict[int, Words] = {}  # vocabulary -> id * STRIDE of each token


@sample.implement("cpu", when=lambda device: device.type == "cpu")
def sample_cpu(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """`sample` of the reference."""
    rows = logits.numpy()
    keys = noise_keys(seeds, positions).numpy().astype(np.uint32)
    limits = zip(temperature.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
    tokens = np.empty(len(rows), dtype=np.int64)
    for place, (row, key, (heat, k, p, ratio)) in enumerate(zip(rows, keys, limits, strict=True)):
        if heat == 0:
            tokens[place] = row.argmax()
            continue
        scaled = row if heat == 1 else row / np.float32(heat)
        if 0 < k < len(row) or p < 1 or ratio > 0:
            ids = np.flatnonzero(scaled >= threshold(scaled, k, p, ratio))
            tokens[place] = ids[_draw(scaled[ids], counters(len(row))[ids], key)]
        else:
            tokens[place] = _draw(scaled, counters(len(row)), key)
    return torch.from_numpy(tokens)


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


def _bits(counter: Words, key: Words) -> Words:
    """`noise_bits` of the reference; 32-bit words wrap by themselves."""
    x = counter + key[0]
    shifted = x >> np.uint32(16)
    x ^= shifted
    x *= np.uint32(0x21F0AAAD)
    x ^= np.right_shift(x, np.uint32(15), out=shifted)
    x += key[1]
    x *= np.uint32(0x735A2D97)
    x ^= np.right_shift(x, np.uint32(15), out=shifted)
    return x


def _draw(scaled: Floats, counter: Words, key: Words) -> int:
    """Index of the highest score among scaled [n]; their counters [n]."""
    bits = _bits(counter, key)
    highest = scaled.max()
    weights = scaled - highest
    np.exp(weights, out=weights)
    total = weights.sum()
    line = float(highest) + float(np.log(total)) - SLACK
    # score >= line  <=>  -log1p(-u) <= exp(scaled - line), and u <= -log1p(-u)
    weights *= np.float32(MARGIN * 2.0**32 * np.exp(float(highest) - line))
    chosen = np.flatnonzero(bits.astype(np.float32) <= weights)  # as they are, both would become float64
    if len(chosen):
        scores = _scores(scaled[chosen], bits[chosen])
        best = int(scores.argmax())
        if scores[best] >= line:
            return int(chosen[best])
    return int(_scores(scaled, bits).argmax())


def _scores(scaled: Floats, bits: Words) -> NDArray[np.float64]:
    return scaled.astype(np.float64) - np.log(-np.log1p(-(bits + 0.5) * 2.0**-32))
