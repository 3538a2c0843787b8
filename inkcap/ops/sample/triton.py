"""Drawing on a GPU without sorting the vocabulary, exact as the reference. A program works on `SPAN` words of one row.

    tops      largest scaled logit of each span; only with limits
    sieve     eight times for top-k, eight times for top-p; see below
    score     noise, before the logits are known, scores, and the best of each span
    choose    the best of the best; or append, which also adds it to its row and tells the host

The smallest logit a row may draw is sought in the bits of the number, as the order-preserving integer of a float: every
sieve settles four bits. Its programs count (top-k) or weigh (top-p) the words at or above sixteen candidates; the next
launch adds these sums up, the same way in every program, and goes on from the largest candidate that has enough. Rows
without that limit are passed over. Sums and scores are float64; 1 - u is exact there, so log(1 - u) is as good as
log1p(-u). The floor without limits is one read of the logits and two launches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.sample.ref import Limits, allow, draw_next, penalize, sample

SPAN = 2048  # words of a program
SEEN = 1024  # words at a time in a sieve: 16 candidates each must stay in registers
SIEVES = 8


@triton.jit
def scaled_tile(row, at, V, heat):
    """Logits divided by the temperature, rounded as by IEEE division; -inf behind the vocabulary."""
    x = tl.load(row + at, mask=at < V, other=float("-inf"))
    return tl.div_rn(x, tl.full(x.shape, 1.0, tl.float32) * heat)


@triton.jit
def ordered(x):
    """Unsigned integers in the order of floats."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def unordered(key):
    """The float whose integer `key` is."""
    return tl.where((key >> 31) != 0, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["stride"])
def tops_kernel(logits, temperature, tops, V, stride, spans, SPAN: tl.constexpr):
    at_row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + at_row)
    x = scaled_tile(
        logits + at_row * stride, tl.program_id(1) * SPAN + tl.arange(0, SPAN), V, tl.where(heat == 0, 1.0, heat)
    )
    tl.store(tops + at_row * spans + tl.program_id(1), tl.max(x, 0))


@triton.jit
def settled(sums, base, needed, at_row, spans, unit, WIDE: tl.constexpr):
    """The base with four more bits, [1] uint32, from the sums of the sieve with that unit."""
    at = tl.arange(0, WIDE)[:, None]
    lane = tl.arange(0, 16)[None, :]
    parts = tl.load(sums + (at_row * spans + at) * 16 + lane, mask=at < spans, other=0.0)
    enough = tl.sum((tl.sum(parts, 0) >= needed).to(tl.int32), 0)
    # candidate 0 is the base; by a rounding error not even all words may hold enough
    return base + tl.maximum(enough - 1, 0).to(tl.uint32) * unit


@triton.jit
def total_of(sums, at_row, spans, WIDE: tl.constexpr):
    """The sum over all words, which the first sieve has for candidate 0."""
    at = tl.arange(0, WIDE)
    return tl.sum(tl.load(sums + (at_row * spans + at) * 16, mask=at < spans, other=0.0), 0)


@triton.jit(do_not_specialize=["stride", "step", "unit", "rows"])
def sieve_kernel(
    logits, temperature, limit, tops, edges, sums, bases, needs, V, stride, spans, step, unit, rows,
    WEIGH: tl.constexpr, SPAN: tl.constexpr, SEEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`sums` [2, rows, spans, 16], `bases` and `needs` [2, rows]: sieve `step` reads one half and writes the other.

    `limit` is top_k, or top_p with WEIGH; `edges`, read with WEIGH, is what top-k left.
    """
    at_row = tl.program_id(0).to(tl.int64)
    heat, own = tl.load(temperature + at_row), tl.load(limit + at_row)
    if WEIGH:
        limited = (heat > 0) & (own < 1)
    else:
        limited = (heat > 0) & (own > 0) & (own < V)
    if limited:
        old, new = ((step + 1) % 2).to(tl.int64) * rows, (step % 2).to(tl.int64) * rows
        base = tl.full([1], 0, tl.uint32)
        needed = own.to(tl.float64)
        if step > 0:
            if WEIGH:
                if step == 1:
                    needed = needed * total_of(sums + old * spans * 16, at_row, spans, WIDE)
                else:
                    needed = tl.load(needs + old + at_row)
            before = tl.load(bases + old + at_row + tl.arange(0, 1)).to(tl.uint32, bitcast=True)
            base = settled(sums + old * spans * 16, before, needed, at_row, spans, unit.to(tl.uint32) << 4, WIDE)
        pivots = base[None, :] + (tl.arange(0, 16).to(tl.uint32) * unit.to(tl.uint32))[None, :]
        highest, least = 0.0, float("-inf")
        if WEIGH:
            at = tl.arange(0, WIDE)
            highest = tl.max(tl.load(tops + at_row * spans + at, mask=at < spans, other=float("-inf")), 0)
            least = tl.load(edges + at_row)
        found = tl.zeros([SEEN, 16], tl.float64)
        for start in range(0, SPAN, SEEN):
            word = tl.program_id(1) * SPAN + start + tl.arange(0, SEEN)
            x = scaled_tile(logits + at_row * stride, word, V, heat)
            if WEIGH:
                weight = tl.where(x >= least, tl.exp(x.to(tl.float64) - highest.to(tl.float64)), 0.0)
            else:
                weight = tl.where(word < V, 1.0, 0.0).to(tl.float64)
            found += tl.where(ordered(x)[:, None] >= pivots, weight[:, None], 0.0)
        out = ((new + at_row) * spans + tl.program_id(1)) * 16
        tl.store(sums + out + tl.arange(0, 16), tl.sum(found, 0))
        if tl.program_id(1) == 0:
            tl.store(bases + new + at_row + tl.arange(0, 1), base.to(tl.int32, bitcast=True))
            tl.store(needs + new + at_row, needed)


@triton.jit(do_not_specialize=["rows"])
def edge_kernel(
    temperature, limit, tops, edges, sums, bases, needs, min_p, V, spans, rows,
    WEIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """What the last sieve of a kind found; behind top-p also min-p."""
    at_row = tl.program_id(0).to(tl.int64)
    heat, own = tl.load(temperature + at_row), tl.load(limit + at_row)
    last = ((8 - 1) % 2) * rows.to(tl.int64)
    if WEIGH:
        least = tl.load(edges + at_row)
        limited = (heat > 0) & (own < 1)
    else:
        least = float("-inf")
        limited = (heat > 0) & (own > 0) & (own < V)
    if limited:
        before = tl.load(bases + last + at_row + tl.arange(0, 1)).to(tl.uint32, bitcast=True)
        needed = tl.load(needs + last + at_row)
        key = settled(sums + last * spans * 16, before, needed, at_row, spans, tl.full([1], 1, tl.uint32), WIDE)
        edge = tl.max(tl.where(key == 0, float("-inf"), unordered(key)), 0)
        least = tl.maximum(least, edge)
    if WEIGH:
        ratio = tl.load(min_p + at_row)
        if (heat > 0) & (ratio > 0):
            at = tl.arange(0, WIDE)
            highest = tl.max(tl.load(tops + at_row * spans + at, mask=at < spans, other=float("-inf")), 0)
            least = tl.maximum(least, highest + tl.log(ratio.to(tl.float64)).to(tl.float32))
    tl.store(edges + at_row, least)


@triton.jit
def mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=["stride"])
def score_kernel(
    logits, banned, temperature, edges, seeds, positions, rows, turn, best, places, V, stride, spans,
    LIMITED: tl.constexpr, NEXT: tl.constexpr, BANNED: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best word of a span, but for the first BANNED ids of `banned`. NEXT: `positions` are those of all table rows,
    of which these are `rows`; counts the draw."""
    pdl.trigger(PDL)
    at_row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    heat = tl.load(temperature + at_row)
    noise = tl.zeros([SPAN], tl.float64)
    if heat != 0:
        where = at_row
        if NEXT:
            where = tl.load(rows + at_row).to(tl.int64)
        # one-element tensors, since what must wrap around is not folded or checked as a number
        key = mix64(tl.load(seeds + at_row + tl.arange(0, 1)).to(tl.uint64) + 0x9E3779B97F4A7C15)
        key = mix64(key + tl.load(positions + where + tl.arange(0, 1)).to(tl.uint64))
        h = at.to(tl.uint32) * 0x9E3779B1 + key.to(tl.uint32)
        h = (h ^ (h >> 16)) * 0x21F0AAAD
        h = ((h ^ (h >> 15)) + (key >> 32).to(tl.uint32)) * 0x735A2D97
        h = h ^ (h >> 15)
        u = (h.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
        noise = -tl.log(-tl.log(1.0 - u))
    barred = at >= V
    for i in range(BANNED):
        barred |= at == tl.load(banned + i)
    pdl.wait(PDL)
    x = scaled_tile(logits + at_row * stride, at, V, tl.where(heat == 0, 1.0, heat))
    x = tl.where(barred, float("-inf"), x)
    scores = x.to(tl.float64) + noise
    if LIMITED:  # of greedy rows the edge is -inf
        scores = tl.where(x >= tl.load(edges + at_row), scores, float("-inf"))
    bad = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0)
    most = tl.max(scores, 0)
    place = tl.min(tl.where((scores == most) & (at < V), at, V), 0)
    out = at_row * spans + tl.program_id(1)
    tl.store(best + out, tl.where(bad > 0, float("inf"), most))
    tl.store(places + out, tl.where(bad > 0, -1, place))
    if NEXT:
        first = tl.program_id(0) + tl.program_id(1) == 0
        tl.store(turn, (tl.load(turn, mask=first) + 1) & 0x7FFFFFFF, mask=first)


@triton.jit
def chosen(best, places, at_row, spans, WIDE: tl.constexpr):
    """The best of a row's spans, -1 where it has no number."""
    at = tl.arange(0, WIDE)
    scores = tl.load(best + at_row * spans + at, mask=at < spans, other=float("-inf"))
    place = tl.load(places + at_row * spans + at, mask=at < spans, other=0)
    most = tl.max(scores, 0)
    first = tl.min(tl.where((scores == most) & (at < spans), place, 0x7FFFFFFF), 0)
    return tl.where(most == float("-inf"), -1, first).to(tl.int64)


@triton.jit
def choose_kernel(best, places, drawn, spans, WIDE: tl.constexpr):
    at_row = tl.program_id(0).to(tl.int64)
    tl.store(drawn + at_row, chosen(best, places, at_row, spans, WIDE))


@triton.jit
def append_kernel(
    best, places, drawn, rows, tokens, lengths, board, turn, spare, spans, capacity, pitch,
    LINES: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Chooses, adds the token to its row, and tells the host. Each row is one program's."""
    at_row = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at_row).to(tl.int64)
    length = tl.load(lengths + row)
    pdl.wait(PDL)
    now = tl.load(turn)
    token = chosen(best, places, at_row, spans, WIDE)
    tl.store(drawn + at_row, token)
    tl.store(board + now % LINES * pitch + at_row, (now << 32) | (token & 0xFFFFFFFF))
    if row != spare:
        tl.store(tokens + row * capacity + length, token.to(tl.int32))
        tl.store(lengths + row, length + 1)


@sample.implement("triton", when=lambda device: device.type == "cuda", tokenwise=True)
def sample_triton(
    logits: Tensor,
    temperature: Tensor,
    limits: Limits | None,
    seeds: Tensor,
    positions: Tensor,
    masks: Tensor | None = None,
) -> Tensor:
    """`sample` of the reference. Rows of logits may stand apart."""
    if masks is not None:
        allow(logits, masks)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(tokens):
        best, places, spans = scores_of(logits, temperature, limits, seeds, positions, None)
        choose_kernel[(len(tokens),)](best, places, tokens, spans, WIDE=triton.next_power_of_2(spans), num_warps=1)
    return tokens


@draw_next.implement("triton", when=lambda device: device.type == "cuda", tokenwise=True)
def draw_next_triton(
    logits: Tensor,
    banned: Tensor,
    temperature: Tensor,
    limits: Limits | None,
    seeds: Tensor,
    rows: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    spare: int,
    board: Tensor,
    turn: Tensor,
) -> Tensor:
    """`draw_next` of the reference; the host's memory is written by the kernel that chooses."""
    drawn, on = torch.empty(len(rows), dtype=torch.int64, device=logits.device), pdl.supported(logits.device)
    if limits is not None and len(banned):  # the sieves must not see them either
        logits.index_fill_(1, banned, -torch.inf)
        banned = banned[:0]
    best, places, spans = scores_of(logits, temperature, limits, seeds, lengths, (banned, rows, turn))
    append_kernel[(len(rows),)](
        best, places, drawn, rows, tokens, lengths, board, turn, spare, spans, tokens.stride(0), board.stride(0),
        LINES=len(board), WIDE=triton.next_power_of_2(spans), PDL=on, num_warps=1, **pdl.launch(on),
    )  # fmt: skip
    return drawn


def scores_of(
    logits: Tensor,
    temperature: Tensor,
    limits: Limits | None,
    seeds: Tensor,
    positions: Tensor,
    listed: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, int]:
    """The best score of each span of each row [S, spans], the words that have them, and the number of spans.

    `listed`: banned, rows and turn of `draw_next`, whose `positions` are lengths. Only then may the launch overlap the
    one before, since what is read early is known to be old.
    """
    rows, words = logits.shape
    assert logits.stride(1) == 1, "the words of a row must be neighbours"
    spans, on = triton.cdiv(words, SPAN), listed is not None and pdl.supported(logits.device)
    best = torch.empty(rows, spans, dtype=torch.float64, device=logits.device)
    places = torch.empty(rows, spans, dtype=torch.int32, device=logits.device)
    edges = best if limits is None else edges_of(logits, temperature, limits)
    banned, own, turn = listed or (places[:0], places, places)
    score_kernel[(rows, spans)](
        logits, banned, temperature, edges, seeds, positions, own, turn, best, places, words, logits.stride(0), spans,
        LIMITED=limits is not None, NEXT=listed is not None, BANNED=len(banned), SPAN=SPAN, PDL=on,
        num_warps=8, **pdl.launch(on),
    )  # fmt: skip
    return best, places, spans


def edges_of(logits: Tensor, temperature: Tensor, limits: Limits) -> Tensor:
    """The smallest scaled logit [S] that each row may draw."""
    (rows, words), device = logits.shape, logits.device
    spans = triton.cdiv(words, SPAN)
    wide = triton.next_power_of_2(spans)
    tops = torch.empty(rows, spans, dtype=torch.float32, device=device)
    edges = torch.empty(rows, dtype=torch.float32, device=device)
    sums = torch.empty(2, rows, spans, 16, dtype=torch.float64, device=device)
    bases = torch.empty(2, rows, dtype=torch.int32, device=device)
    needs = torch.empty(2, rows, dtype=torch.float64, device=device)
    tops_kernel[(rows, spans)](logits, temperature, tops, words, logits.stride(0), spans, SPAN=SPAN, num_warps=8)
    for weigh, limit in ((False, limits.top_k), (True, limits.top_p)):
        for step in range(SIEVES):
            sieve_kernel[(rows, spans)](
                logits, temperature, limit, tops, edges, sums, bases, needs, words, logits.stride(0), spans,
                step, 1 << (28 - 4 * step), rows, WEIGH=weigh, SPAN=SPAN, SEEN=SEEN, WIDE=wide, num_warps=8,
            )  # fmt: skip
        edge_kernel[(rows,)](
            temperature, limit, tops, edges, sums, bases, needs, limits.min_p, words, spans, rows,
            WEIGH=weigh, WIDE=wide, num_warps=1,
        )  # fmt: skip
    return edges


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


@penalize.implement("triton", when=lambda device: device.type == "cuda", tokenwise=True)
def penalize_triton(
    logits: Tensor, counts: Tensor, seen: Tensor, repetition: float, presence: float, frequency: float
) -> None:
    """`penalize` of the reference, in one launch: 13 bytes a word."""
    words = len(logits)
    penalize_kernel[(triton.cdiv(words, SPAN),)](
        logits, counts, seen, float(repetition), float(presence), float(frequency), words, SPAN=SPAN, num_warps=8
    )
