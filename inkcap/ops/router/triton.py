"""Routing on a GPU. One token: product and choice in one launch; programs post what their rows of the matrix give, and
one more program waits for it and chooses. A few: products of parts of the rows, which one program a token sums before
it chooses. Many: the library's product with fp32 results.

Products of bf16 are exact in fp32, so both equal the reference's fp32 product up to the order of its sum; one token is
normed without rounding the normed row in between.

One token's choice holds 32 experts in a tensor, one a lane, and every warp holds them all, so that nothing is said
between warps while the step waits. Several tokens' logits come in many parts, which are read in wider tensors.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.letters import box_of
from inkcap.ops.linear.few import normed_in_parts
from inkcap.ops.linear.fixed import parts_of
from inkcap.ops.router.ref import route_sigmoid, route_sink
from inkcap.ops.values import Normed, Routed

# one token: rows of a program and its warps, measured on an H200; a program that norms holds the norm's weights too
NORMS, LONG, SHORT = (2, 4), (1, 2), (1, 1)
MANY = 255  # registers: with fewer the last loads of a row wait for the first products
MOST = 8192  # columns of a matrix whose rows a program holds
READ = 256  # columns that a warp reads at once: 16 bytes a lane in bf16
FEW = 64  # tokens that are multiplied in parts
# experts among which one warp chooses for one of few tokens; Mini, 2 / 8 / 64 of them, us with the product: two warps
# 5.25 / 5.27 / 6.06, one 3.01 / 3.07 / 3.85. For 8,192 tokens of 256 experts two take 27.2, one 17.6
ONE = 128
LANES = tl.constexpr(32)
LOWEST = tl.constexpr(-(2**31))  # the key of no score: an expert that is chosen, or does not exist
EMPTY = tl.constexpr(LOWEST.value * 2**32)  # a letter with this key: not posted yet


@triton.jit
def scored(logit, bias, SINK: tl.constexpr):
    """(key, value) of fp32 logits: the score in an order of integers, of which a warp finds the largest in one
    instruction; and the bits of what weights are made of, the logit or its sigmoid. NaN is the largest score."""
    share = tl.sigmoid(logit)
    score = share + bias
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(score == score, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    value = logit if SINK else share
    return key, value.to(tl.int32, bitcast=True)


@triton.jit
def best(keys, values):
    """(key, expert, value) of each lane's largest key, of equal ones the first."""
    lane = tl.arange(0, LANES)
    last: tl.constexpr = len(keys) - 1
    top = keys[0]
    for r in tl.static_range(1, last + 1):
        top = tl.maximum(top, keys[r])
    own, value = lane + last * LANES, values[last]
    for r in tl.static_range(1, last + 1):
        here = keys[last - r] == top
        own = tl.where(here, lane + (last - r) * LANES, own)
        value = tl.where(here, values[last - r], value)
    return top, own, value


@triton.jit
def without(keys, taken):
    """The keys, but no longer those of the experts `taken`, one a lane."""
    left = ()
    for r in tl.static_range(len(keys)):
        left += (tl.where(tl.arange(0, LANES) + r * LANES == taken, LOWEST, keys[r]),)
    return left


@triton.jit
def shares(logits, there):
    """Of the sigmoids of those logits that are there, in their sum."""
    log = tl.minimum(logits, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(logits)))  # of the sigmoid, which may underflow
    log = tl.where(there, log, float("-inf"))
    share = tl.exp(log - tl.max(log, 0))
    return share / tl.sum(share, 0)


@triton.jit
def choose(
    keys, values, picked, choice, weights, gammas, scale,
    E: tl.constexpr, S: tl.constexpr, TOP: tl.constexpr, SINK: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One token's choice. keys, values: as `scored` gives them, in tensors of 32 experts; picked: fp32 [BP], the logits
    of the S shared experts from place TOP on.

    A lane's next best is sought while the warp finds the best of all, which only one lane has.
    """
    place = tl.arange(0, BP)
    expert, total = tl.zeros([BP], tl.int32), 0.0
    top, own, value = best(keys, values)
    keys = without(keys, own)
    for k in tl.static_range(TOP):
        first = tl.min(tl.where(top == tl.max(top, 0), own, E - 1), 0)  # the lowest index wins
        chosen = own == first
        of_it = tl.max(tl.where(chosen, value, LOWEST), 0).to(tl.float32, bitcast=True)
        total += of_it
        expert = tl.where(place == k, first, expert)
        picked = tl.where(place == k, of_it, picked)
        if k < TOP - 1:
            next_top, next_own, next_value = best(keys, values)
            top = tl.where(chosen, next_top, top)
            own = tl.where(chosen, next_own, own)
            value = tl.where(chosen, next_value, value)
        if k < TOP - 2:
            keys = without(keys, tl.where(chosen, next_own, -1))
    if SINK:
        weight = shares(picked, place < TOP + S) * scale
    else:
        weight = picked / (total + 1e-20) * scale
    tl.store(choice + place, expert.to(tl.int64), mask=place < TOP)
    tl.store(weights + place, weight, mask=place < TOP)
    if S > 0:
        tl.store(gammas - TOP + place, weight, mask=(place >= TOP) & (place < TOP + S))


@triton.jit
def post(box, n, logit, bias, EVERY: tl.constexpr, SINK: tl.constexpr):
    """A letter for each row n of the matrix, its key above its value: one store of 64 bits, so it is seen whole."""
    key, value = scored(logit, bias, SINK)
    tl.store(box + n, (key.to(tl.int64) << 32) | (value.to(tl.int64) & 0xFFFFFFFF), mask=n < EVERY)


@triton.jit
def letters(box, E: tl.constexpr, S: tl.constexpr, R: tl.constexpr):
    """What is in the box now: R tensors of 32 experts, the letters of at most 32 shared ones [32], and whether all are
    there. Each is read from where all processors see it."""
    lane = tl.arange(0, LANES)
    found = ()
    earliest = tl.full([LANES], 0, tl.int32)
    for r in tl.static_range(R):
        letter = tl.load(box + lane + r * LANES, mask=lane + r * LANES < E, other=0, volatile=True)
        found += (letter,)
        earliest = tl.minimum(earliest, (letter >> 32).to(tl.int32))
    shared = tl.full([LANES], 0, tl.int64)
    if S > 0:
        shared = tl.load(box + E + lane, mask=lane < S, other=0, volatile=True)
        earliest = tl.minimum(earliest, (shared >> 32).to(tl.int32))
    return found, shared, tl.min(earliest, 0) != LOWEST


@triton.jit
def choose_from(
    box, choice, weights, gammas, scale,
    E: tl.constexpr, S: tl.constexpr, TOP: tl.constexpr, SINK: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The choice from letters, all of which are waited for; then the box is empty again."""
    R: tl.constexpr = (E + LANES - 1) // LANES
    found, shared, there = letters(box, E, S, R)
    while not there:
        found, shared, there = letters(box, E, S, R)
    lane, place = tl.arange(0, LANES), tl.arange(0, BP)
    keys, values = (), ()
    for r in tl.static_range(R):
        keys += (tl.where(lane + r * LANES < E, (found[r] >> 32).to(tl.int32), LOWEST),)
        values += (found[r].to(tl.int32),)
    picked = tl.zeros([BP], tl.float32)
    for s in tl.static_range(S):
        bits = tl.max(tl.where(lane == s, shared.to(tl.int32), LOWEST), 0)
        picked = tl.where(place == TOP + s, bits.to(tl.float32, bitcast=True), picked)
    choose(keys, values, picked, choice, weights, gammas, scale, E, S, TOP, SINK, BP)
    tl.debug_barrier()  # each warp has read all letters
    empty = tl.full([LANES], EMPTY, tl.int64)
    for r in tl.static_range(R):
        tl.store(box + lane + r * LANES, empty, mask=lane + r * LANES < E)
    if S > 0:
        tl.store(box + E + lane, empty, mask=lane < S)


@triton.jit
def pieces(row, K: tl.constexpr, BK: tl.constexpr, EVICT: tl.constexpr):
    """Rows of K columns in pieces of BK, all asked for at once. row: pointers to their columns 0 .. BK - 1."""
    out = ()
    at = tl.arange(0, BK)[None, :]
    for first in tl.static_range(0, K, BK):
        if first + BK <= K:
            out += (tl.load(row + first, eviction_policy=EVICT),)
        else:
            out += (tl.load(row + first, mask=at < K - first, other=0.0, eviction_policy=EVICT),)
    return out


@triton.jit
def product(w, x):
    """Rows in pieces, [BN, BK] each, times a row in pieces: fp32 [BN]."""
    total = w[0].to(tl.float32) * x[0].to(tl.float32)
    for i in tl.static_range(1, len(x)):
        total += w[i].to(tl.float32) * x[i].to(tl.float32)
    return tl.sum(total, 1)


@triton.jit
def route_row(
    x, norm, w, normed, box, bias, global_scale, choice, weights, gammas, eps, route_scale, w_stride,
    NORMED: tl.constexpr, E: tl.constexpr, S: tl.constexpr, TOP: tl.constexpr, SINK: tl.constexpr,
    BP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every program but the last, which chooses, also leaves PIECE elements of the normed row, rounded, so that experts
    need not norm it again."""
    pdl.trigger(PDL)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        scale = route_scale
        if SINK:
            scale *= tl.load(global_scale)
        pdl.wait(PDL)
        choose_from(box, choice, weights, gammas, scale, E, S, TOP, SINK, BP)
    else:
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        held = tl.minimum(n, E + S - 1)
        k = tl.arange(0, BK)[None, :]
        rows = pieces(w + held[:, None].to(tl.int64) * w_stride + k, K, BK, "evict_first")
        own_bias = tl.load(bias + n, mask=n < E, other=0.0)
        if NORMED:
            scales = pieces(norm + k, K, BK, "")
            at = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
            own_scale = tl.load(norm + at, mask=at < K, other=0.0)
        pdl.wait(PDL)
        row = pieces(x + k, K, BK, "")
        if NORMED:
            own = tl.load(x + at, mask=at < K, other=0.0)
            squares = row[0].to(tl.float32) * row[0].to(tl.float32)
            scaled = (row[0].to(tl.float32) * scales[0],)
            for i in tl.static_range(1, len(row)):
                wide = row[i].to(tl.float32)
                squares += wide * wide
                scaled += (wide * scales[i],)
            factor = tl.rsqrt(tl.sum(squares, 1) / K + eps)
            post(box, n, product(rows, scaled) * factor, own_bias, E + S, SINK)
            part = own.to(tl.float32) * tl.sum(factor, 0) * own_scale
            tl.store(normed + at, part.to(normed.dtype.element_ty), mask=at < K)
        else:
            post(box, n, product(rows, row), own_bias, E + S, SINK)


@triton.jit
def choose_rows(
    logits, bias, global_scale, choice, weights, gammas, route_scale, next_token, next_expert,
    PARTS: tl.constexpr, E: tl.constexpr, S: tl.constexpr, TOP: tl.constexpr, SINK: tl.constexpr,
    BE: tl.constexpr, BP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The choices of many tokens among fp32 logits [E + S], `next_expert` apart, sums of PARTS which stand behind each
    other. A token of NaN, as padding may be, chooses experts that exist.

    All experts are one tensor here: reading the parts is most of the work, and 32 experts at a time, as `choose` holds
    them, are twice as many loads, which come in more turns.
    """
    e = tl.arange(0, BE)
    place = tl.arange(0, BP)
    own_bias = tl.load(bias + e, mask=e < E, other=0.0)
    scale = route_scale
    if SINK:
        scale *= tl.load(global_scale)
    pdl.wait(PDL)
    pdl.trigger(PDL)
    t, next_part = tl.program_id(0).to(tl.int64), tl.num_programs(0) * next_token
    logits, choice, weights, gammas = logits + t * next_token, choice + t * TOP, weights + t * TOP, gammas + t * S
    logit = tl.load(logits + e * next_expert, mask=e < E, other=0.0, cache_modifier=".cg")
    # places 0 .. TOP are the chosen experts, the S behind them the shared ones
    behind = (place >= TOP) & (place < TOP + S)
    last = (E - TOP + place) * next_expert
    picked = tl.load(logits + last, mask=behind, other=0.0, cache_modifier=".cg")
    for part in tl.static_range(1, PARTS):
        at = logits + part * next_part
        logit += tl.load(at + e * next_expert, mask=e < E, other=0.0, cache_modifier=".cg")
        picked += tl.load(at + last, mask=behind, other=0.0, cache_modifier=".cg")
    score = tl.sigmoid(logit) + own_bias
    # bits of the score in an order of integers, of which a warp finds the largest in one instruction
    bits = score.to(tl.int32, bitcast=True)
    lowest = tl.full([BE], -(2**31), tl.int32)
    key = tl.where(e < E, bits ^ ((bits >> 31) & 0x7FFFFFFF), lowest)
    expert = tl.zeros([BP], tl.int32)
    for k in tl.static_range(TOP):
        best = tl.min(tl.where(key == tl.max(key, 0), e, BE - 1), 0)  # the lowest index wins
        expert = tl.where(place == k, best, expert)
        key = tl.where(e == best, lowest, key)
    chosen = tl.sum(tl.where(e[None, :] == expert[:, None], logit[None, :], 0.0), 1)
    picked = tl.where(place < TOP, chosen, picked)
    if SINK:
        weight = shares(picked, place < TOP + S) * scale
    else:
        share = tl.where(place < TOP, tl.sigmoid(picked), 0.0)
        weight = share / (tl.sum(share, 0) + 1e-20) * scale
    tl.store(choice + place, expert.to(tl.int64), mask=place < TOP)
    tl.store(weights + place, weight, mask=place < TOP)
    if S > 0:
        tl.store(gammas - TOP + place, weight, mask=behind)


def route(
    rows: Normed,
    weight: Tensor,
    bias: Tensor,
    global_scale: Tensor | None,
    top_k: int,
    route_scale: float,
    *,
    fixed: bool = False,
) -> Routed:
    """Both routers; that of the reference's `route_sink` where there is a global scale.

    `fixed`: a token's logits depend on nothing but the token.
    """
    x = rows.rows
    tokens, experts, (every, length), on = len(x), len(bias), weight.shape, pdl.supported(x.device)
    shared, sink = every - experts, global_scale is not None
    scale = bias if global_scale is None else global_scale
    choice = torch.empty(tokens, top_k, dtype=torch.int64, device=x.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=x.device)
    gammas = torch.empty(tokens, shared, dtype=torch.float32, device=x.device)
    blocks = (triton.next_power_of_2(experts), triton.next_power_of_2(top_k + shared))
    if tokens == 1 and length <= MOST and weight.stride(1) == x.stride(1) == 1 and not fixed:
        unnormed = rows.normed is None
        own = x if rows.normed is None else rows.normed
        normed = torch.empty(1, length, dtype=rows.dtype, device=x.device) if unnormed else own
        bn, warps = NORMS if unnormed and length > 2048 else LONG if length > 4096 else SHORT
        programs = triton.cdiv(every, bn)
        route_row[(programs + 1,)](
            own, rows.weight, weight, normed, box_of(weight, every, torch.int64, EMPTY.value), bias, scale,
            choice, weights, gammas, rows.eps, route_scale, weight.stride(0),
            unnormed, experts, shared, top_k, sink, blocks[1], length, READ * warps, bn,
            triton.next_power_of_2(triton.cdiv(length, programs)), on,
            num_warps=warps, maxnreg=MANY, **pdl.launch(on),
        )  # fmt: skip
        rows.normed = normed
    elif tokens:
        parts = 1
        if fixed:
            logits = parts_of(rows.tensor(), weight)
            parts = len(logits)
        elif tokens <= FEW and x.stride(1) == weight.stride(1) == 1 and rows.dtype == weight.dtype:
            logits = normed_in_parts(rows, weight)
            parts = len(logits)
        elif (normed := rows.tensor()).dtype == weight.dtype != torch.float32:
            # the other way round its rows would not be aligned, and the library twice as slow
            logits = torch.mm(weight, normed.t(), out_dtype=torch.float32).t()
        else:
            logits = F.linear(normed.float(), weight.float())
        choose_rows[(tokens,)](
            logits, bias, scale, choice, weights, gammas, route_scale, *logits.stride()[-2:],
            parts, experts, shared, top_k, sink, *blocks, on,
            num_warps=2 if tokens <= FEW and experts > ONE else 1, **pdl.launch(on),
        )  # fmt: skip
    return Routed(choice, weights, gammas)


@route_sink.implement("triton", when=lambda device: device.type == "cuda")
def route_sink_triton(
    rows: Normed, weight: Tensor, bias: Tensor, global_scale: Tensor, *, top_k: int, route_scale: float
) -> Routed:
    """`route_sink` of the reference."""
    return route(rows, weight, bias, global_scale, top_k, route_scale)


@route_sigmoid.implement("triton", when=lambda device: device.type == "cuda")
def route_sigmoid_triton(rows: Normed, weight: Tensor, bias: Tensor, *, top_k: int, route_scale: float) -> Routed:
    """`route_sigmoid` of the reference."""
    return route(rows, weight, bias, None, top_k, route_scale)


@route_sink.implement("fixed", when=lambda device: device.type == "cuda", spare=True)
def route_sink_fixed(
    rows: Normed, weight: Tensor, bias: Tensor, global_scale: Tensor, *, top_k: int, route_scale: float
) -> Routed:
    """`route_sink` of the reference."""
    return route(rows, weight, bias, global_scale, top_k, route_scale, fixed=True)


@route_sigmoid.implement("fixed", when=lambda device: device.type == "cuda", spare=True)
def route_sigmoid_fixed(rows: Normed, weight: Tensor, bias: Tensor, *, top_k: int, route_scale: float) -> Routed:
    """`route_sigmoid` of the reference."""
    return route(rows, weight, bias, None, top_k, route_scale, fixed=True)
