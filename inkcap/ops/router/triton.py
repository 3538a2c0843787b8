"""Routing on a GPU. One token: product and choice in one launch, the program that ends last chooses. A few: products of
parts of the rows, which one program a token sums before it chooses. Many: the library's product with fp32 results.

Products of bf16 are exact in fp32, so both equal the reference's fp32 product up to the order of its sum; one token is
normed without rounding the normed row in between.
"""

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.linear.device import chunks, fetch_all, multiply_and_norm
from inkcap.ops.linear.few import normed_in_parts
from inkcap.ops.linear.fixed import parts_of
from inkcap.ops.router.ref import route_sigmoid, route_sink
from inkcap.ops.values import Normed, Routed

LONG, SHORT = (2, 4), (1, 1)  # one token: rows of a program and its warps, by the rows' length; measured on an H200
FEW = 64  # tokens that are multiplied in parts


@triton.jit
def choose(
    logits, next_part, next_expert, bias, global_scale, choice, weights, gammas, route_scale,
    PARTS: tl.constexpr, E: tl.constexpr, S: tl.constexpr, TOP: tl.constexpr, SINK: tl.constexpr,
    BE: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One token's choice among fp32 logits [E + S], `next_expert` apart, a sum of PARTS that are `next_part` apart.

    A token of NaN, as padding may be, chooses experts that exist.
    """
    e = tl.arange(0, BE)
    place = tl.arange(0, BP)
    logit = tl.load(logits + e * next_expert, mask=e < E, other=0.0, cache_modifier=".cg")
    # places 0 .. TOP are the chosen experts, the S behind them the shared ones
    behind = (place >= TOP) & (place < TOP + S)
    last = (E - TOP + place) * next_expert
    picked = tl.load(logits + last, mask=behind, other=0.0, cache_modifier=".cg")
    for part in tl.static_range(1, PARTS):
        at = logits + part * next_part
        logit += tl.load(at + e * next_expert, mask=e < E, other=0.0, cache_modifier=".cg")
        picked += tl.load(at + last, mask=behind, other=0.0, cache_modifier=".cg")
    score = tl.sigmoid(logit) + tl.load(bias + e, mask=e < E, other=0.0)
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
        log = tl.minimum(picked, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(picked)))  # of the sigmoid, which may underflow
        log = tl.where(place < TOP + S, log, float("-inf"))
        share = tl.exp(log - tl.max(log, 0))
        weight = share / tl.sum(share, 0) * (route_scale * tl.load(global_scale))
    else:
        share = tl.where(place < TOP, tl.sigmoid(picked), 0.0)
        weight = share / (tl.sum(share, 0) + 1e-20) * route_scale
    tl.store(choice + place, expert.to(tl.int64), mask=place < TOP)
    tl.store(weights + place, weight, mask=place < TOP)
    if S > 0:
        tl.store(gammas - TOP + place, weight, mask=behind)


@triton.jit
def route_row(
    x, norm, w, normed, logits, arrived, bias, global_scale, choice, weights, gammas, eps, route_scale, w_stride,
    NORMED: tl.constexpr, E: tl.constexpr, S: tl.constexpr, TOP: tl.constexpr, SINK: tl.constexpr,
    BE: tl.constexpr, BP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr, BN: tl.constexpr,
    PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every program also leaves PIECE elements of the normed row, rounded, so that experts need not norm it again."""
    pdl.trigger(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    held = tl.minimum(n, E + S - 1)
    w0, w1, w2, w3 = fetch_all(w + held[:, None].to(tl.int64) * w_stride, K, BK, CHUNKS)
    pdl.wait(PDL)
    out, scale = multiply_and_norm(w0, w1, w2, w3, x, norm, eps, NORMED, K, BK, CHUNKS)
    tl.store(logits + n, out, mask=n < E + S)
    if NORMED:
        k = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
        own = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32) * scale
        own *= tl.load(norm + k, mask=k < K, other=0.0)
        tl.store(normed + k, own.to(normed.dtype.element_ty), mask=k < K)
    tl.debug_barrier()  # all of the program's stores before its arrival
    if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(arrived, 0)
        choose(logits, 0, 1, bias, global_scale, choice, weights, gammas, route_scale, 1, E, S, TOP, SINK, BE, BP)


@triton.jit(do_not_specialize=["next_part"])
def choose_rows(
    logits, bias, global_scale, choice, weights, gammas, route_scale, next_part, next_token, next_expert,
    PARTS: tl.constexpr, E: tl.constexpr, S: tl.constexpr, TOP: tl.constexpr, SINK: tl.constexpr,
    BE: tl.constexpr, BP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.wait(PDL)
    pdl.trigger(PDL)
    t = tl.program_id(0).to(tl.int64)
    choose(
        logits + t * next_token, next_part, next_expert, bias, global_scale,
        choice + t * TOP, weights + t * TOP, gammas + t * S, route_scale, PARTS, E, S, TOP, SINK, BE, BP,
    )  # fmt: skip


@functools.cache
def arrivals(device: torch.device) -> Tensor:
    """The count of programs that have ended, zero between launches."""
    return torch.zeros(1, dtype=torch.int32, device=device)


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
    bk, number = chunks(length)
    if tokens == 1 and number and weight.stride(1) == x.stride(1) == 1 and not fixed:
        unnormed = rows.normed is None
        own = x if rows.normed is None else rows.normed
        normed = torch.empty(1, length, dtype=rows.dtype, device=x.device) if unnormed else own
        logits = torch.empty(every, dtype=torch.float32, device=x.device)
        bn, warps = LONG if length > 4096 else SHORT
        programs = triton.cdiv(every, bn)
        route_row[(programs,)](
            own, rows.weight, weight, normed, logits, arrivals(x.device), bias, scale, choice, weights, gammas,
            rows.eps, route_scale, weight.stride(0),
            unnormed, experts, shared, top_k, sink, *blocks, length, bk, number, bn,
            triton.next_power_of_2(triton.cdiv(length, programs)), on,
            num_warps=warps, **pdl.launch(on),
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
            logits, bias, scale, choice, weights, gammas, route_scale, tokens * every, *logits.stride()[-2:],
            parts, experts, shared, top_k, sink, *blocks, on,
            num_warps=2 if tokens <= FEW else 1, **pdl.launch(on),  # one: 17.6 us for 8,192 tokens, two 27.2
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
