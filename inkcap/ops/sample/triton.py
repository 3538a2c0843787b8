"""Drawing on a GPU without sorting the vocabulary: three launches, each row by itself, exact as the reference.

    edge      one program a row: the smallest logit the row may draw; only rows with top-k, top-p or min-p work
    score     one program a row and `SPAN` words: noise, scores, the best of them
    choose    one program a row: the best of the best

The edge is sought in the bits of the number: with the order-preserving integer of a float, four bits a pass, each pass
counts (top-k) or weighs (top-p, float64) the words at or above fifteen candidates. The row is read 1 + 8 times for each
of the two, from the first or second level cache. Scores are float64; 1 - u is exact there, so log(1 - u) is as good as
log1p(-u). The floor of a row that draws from all words is one read of its logits and three launches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops.sample.ref import penalize, sample

SPAN = 2048  # words of a program that scores
SEEN = 1024  # words at a time of a program that seeks the edge: 16 candidates each must stay in registers


@triton.jit
def scaled_tile(row, at, V, heat):
    """Logits divided by the temperature, rounded as by IEEE division; -inf behind the vocabulary."""
    x = tl.load(row + at, mask=at < V, other=float("-inf"))
    return tl.div_rn(x, tl.full(x.shape, 1.0, tl.float32) * heat)


@triton.jit
def ordered(x):
    """Unsigned integers in the order of floats."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)


@triton.jit
def unordered(key):
    """The float whose integer `key` is."""
    return tl.where((key >> 31) != 0, key & 0x7FFFFFFF, ~key).to(tl.float32, bitcast=True)


@triton.jit
def edge_kernel(logits, temperature, top_k, top_p, min_p, edges, V, stride, SEEN: tl.constexpr):
    at_row = tl.program_id(0).to(tl.int64)
    row = logits + at_row * stride
    heat, k = tl.load(temperature + at_row), tl.load(top_k + at_row)
    p, ratio = tl.load(top_p + at_row), tl.load(min_p + at_row)
    count_k, weigh_p = (k > 0) & (k < V), p < 1
    least = float("-inf")
    if (heat > 0) & (count_k | weigh_p | (ratio > 0)):
        lane = tl.arange(0, SEEN)
        candidate = tl.arange(0, 16).to(tl.uint32)[None, :]
        tops = tl.full([SEEN], float("-inf"), tl.float32)
        for start in range(0, V, SEEN):
            tops = tl.maximum(tops, scaled_tile(row, start + lane, V, heat))
        highest = tl.max(tops, 0)
        if count_k:
            base, unit = tl.full([1, 1], 0, tl.uint32), tl.full([1, 1], 1 << 28, tl.uint32)
            for _ in range(8):
                pivots = base + candidate * unit
                counts = tl.zeros([SEEN, 16], tl.int32)
                for start in range(0, V, SEEN):
                    key = ordered(scaled_tile(row, start + lane, V, heat))
                    inside = (start + lane < V)[:, None]
                    counts += ((key[:, None] >= pivots) & inside).to(tl.int32)
                enough = tl.sum((tl.sum(counts, 0) >= k).to(tl.int32), 0) - 1
                base += enough.to(tl.uint32) * unit
                unit = unit >> 4
            least = tl.max(tl.max(unordered(base), 1), 0)
        if weigh_p:
            weights = tl.zeros([SEEN], tl.float64)
            for start in range(0, V, SEEN):
                x = scaled_tile(row, start + lane, V, heat)
                weights += tl.where(x >= least, tl.exp(x.to(tl.float64) - highest.to(tl.float64)), 0.0)
            needed = p.to(tl.float64) * tl.sum(weights, 0)
            base, unit = tl.full([1, 1], 0, tl.uint32), tl.full([1, 1], 1 << 28, tl.uint32)
            for _ in range(8):
                pivots = base + candidate * unit
                masses = tl.zeros([SEEN, 16], tl.float64)
                for start in range(0, V, SEEN):
                    x = scaled_tile(row, start + lane, V, heat)
                    weight = tl.where(x >= least, tl.exp(x.to(tl.float64) - highest.to(tl.float64)), 0.0)
                    masses += tl.where(ordered(x)[:, None] >= pivots, weight[:, None], 0.0)
                enough = tl.sum((tl.sum(masses, 0) >= needed).to(tl.int32), 0) - 1
                base += tl.maximum(enough, 0).to(tl.uint32) * unit
                unit = unit >> 4
            # nothing holds so much by a rounding error: all is kept
            edge = tl.max(tl.max(tl.where(base == 0, float("-inf"), unordered(base)), 1), 0)
            least = tl.maximum(least, edge)
        if ratio > 0:
            least = tl.maximum(least, highest + tl.log(ratio.to(tl.float64)).to(tl.float32))
    tl.store(edges + at_row, least)


@triton.jit
def mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def score_kernel(
    logits, temperature, edges, seeds, positions, best, places, V, stride, spans, SPAN: tl.constexpr
):  # fmt: skip
    at_row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    heat = tl.load(temperature + at_row)
    x = scaled_tile(logits + at_row * stride, at, V, tl.where(heat == 0, 1.0, heat))
    scores = x.to(tl.float64)
    if heat != 0:
        # one-element tensors, since what must wrap around is not folded or checked as a number
        key = mix64(tl.load(seeds + at_row + tl.arange(0, 1)).to(tl.uint64) + 0x9E3779B97F4A7C15)
        key = mix64(key + tl.load(positions + at_row + tl.arange(0, 1)).to(tl.uint64))
        h = at.to(tl.uint32) * 0x9E3779B1 + key.to(tl.uint32)
        h = (h ^ (h >> 16)) * 0x21F0AAAD
        h = ((h ^ (h >> 15)) + (key >> 32).to(tl.uint32)) * 0x735A2D97
        h = h ^ (h >> 15)
        u = (h.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
        scores = tl.where(x >= tl.load(edges + at_row), scores - tl.log(-tl.log(1.0 - u)), float("-inf"))
    bad = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0)
    most = tl.max(scores, 0)
    place = tl.min(tl.where((scores == most) & (at < V), at, V), 0)
    out = at_row * spans + tl.program_id(1)
    tl.store(best + out, tl.where(bad > 0, float("inf"), most))
    tl.store(places + out, tl.where(bad > 0, -1, place))


@triton.jit
def choose_kernel(best, places, tokens, spans, WIDE: tl.constexpr):
    at_row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDE)
    scores = tl.load(best + at_row * spans + at, mask=at < spans, other=float("-inf"))
    place = tl.load(places + at_row * spans + at, mask=at < spans, other=0)
    most = tl.max(scores, 0)
    first = tl.min(tl.where((scores == most) & (at < spans), place, 0x7FFFFFFF), 0)
    tl.store(tokens + at_row, tl.where(most == float("-inf"), -1, first).to(tl.int64))


@sample.implement("triton", when=lambda device: device.type == "cuda")
def sample_triton(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """`sample` of the reference. Rows of logits may stand apart."""
    rows, words = logits.shape
    assert logits.stride(1) == 1, "the words of a row must be neighbours"
    spans = triton.cdiv(words, SPAN)
    edges = torch.empty(rows, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, spans, dtype=torch.float64, device=logits.device)
    places = torch.empty(rows, spans, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        edge_kernel[(rows,)](
            logits, temperature, top_k, top_p, min_p, edges, words, logits.stride(0), SEEN=SEEN, num_warps=16
        )
        score_kernel[(rows, spans)](
            logits, temperature, edges, seeds, positions, best, places, words, logits.stride(0), spans,
            SPAN=SPAN, num_warps=8,
        )  # fmt: skip
        choose_kernel[(rows,)](best, places, tokens, spans, WIDE=triton.next_power_of_2(spans), num_warps=1)
    return tokens


@triton.jit
def penalize_kernel(logits, counts, seen, repetition, presence, frequency, V, SPAN: tl.constexpr):
    at = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    inside = at < V
    x = tl.load(logits + at, mask=inside)
    count = tl.load(counts + at, mask=inside, other=0)
    known = tl.load(seen + at, mask=inside, other=0) != 0
    ones = tl.full(x.shape, 1.0, tl.float32)
    x = tl.where(known, tl.where(x > 0, tl.div_rn(x, ones * repetition), x * repetition), x)
    x -= frequency * count.to(tl.float32) + presence * (count > 0).to(tl.float32)
    tl.store(logits + at, x, mask=inside)


@penalize.implement("triton", when=lambda device: device.type == "cuda")
def penalize_triton(
    logits: Tensor, counts: Tensor, seen: Tensor, repetition: float, presence: float, frequency: float
) -> None:
    """`penalize` of the reference, in one launch: 13 bytes a word."""
    words = len(logits)
    penalize_kernel[(triton.cdiv(words, SPAN),)](
        logits, counts, seen, float(repetition), float(presence), float(frequency), words, SPAN=SPAN, num_warps=8
    )
