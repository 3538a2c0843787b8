"""Routing of one token that comes normed, which also leaves the row rounded for the experts.

The programs that end first round a part of the row each while the others multiply, and the last one chooses. Rounding
has no addition behind a multiplication that could be contracted, so its bits do not depend on how this is compiled.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.linear.device import chunks, fetch_all, multiply
from inkcap.ops.quantize.ref import E2M1_MAX, Rounding, check_columns
from inkcap.ops.quantize.triton import SHORT as PART
from inkcap.ops.quantize.triton import kind_of, round_part
from inkcap.ops.router.ref import route_sigmoid_rounded
from inkcap.ops.router.triton import LONG, SHORT, arrivals, choose
from inkcap.ops.values import Normed, Routed


@triton.jit
def route_row_rounded(
    x, w, outer, rounded, logits, arrived, bias, choice, weights, span, route_scale, w_stride,
    KIND: tl.constexpr, GIVEN: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    E: tl.constexpr, TOP: tl.constexpr, BE: tl.constexpr, BP: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.trigger(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    held = tl.minimum(n, E - 1)
    w0, w1, w2, w3 = fetch_all(w + held[:, None].to(tl.int64) * w_stride, K, BK, CHUNKS)
    pdl.wait(PDL)
    tl.store(logits + n, multiply(w0, w1, w2, w3, x, x, 0.0, False, K, BK, CHUNKS), mask=n < E)
    tl.debug_barrier()  # all of the program's stores before its arrival
    turn = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
    if turn < PARTS:
        round_part(x, outer, rounded, turn, span, KIND, GIVEN, K, COLUMNS)
    if turn == tl.num_programs(0) - 1:
        tl.store(arrived, 0)
        choose(logits, 0, 1, bias, bias, choice, weights, weights, route_scale, 1, E, 0, TOP, False, BE, BP)


@route_sigmoid_rounded.implement("triton", when=lambda device: device.type == "cuda")
def route_sigmoid_rounded_triton(
    rows: Normed, weight: Tensor, bias: Tensor, how: Rounding, *, top_k: int, route_scale: float
) -> tuple[Routed, Tensor]:
    """`route_sigmoid_rounded` of the reference: one launch for one token, else one for each of the two."""
    (experts, length), x = weight.shape, rows.normed
    bk, number = chunks(length)
    bn, warps = LONG if length > 4096 else SHORT
    programs, part = triton.cdiv(experts, bn), PART * warps
    parts = triton.cdiv(length, part)
    if x is None or len(x) != 1 or not number or parts > programs or not weight.stride(1) == x.stride(1) == 1:
        return route_sigmoid_rounded.reference(rows, weight, bias, how, top_k=top_k, route_scale=route_scale)
    check_columns(x, how.block)
    device, on = x.device, pdl.supported(x.device)
    choice = torch.empty(1, top_k, dtype=torch.int64, device=device)
    weights = torch.empty(1, top_k, dtype=torch.float32, device=device)
    rounded = torch.empty(1, length, dtype=x.dtype, device=device)
    route_row_rounded[(programs,)](
        x, weight, x if how.factor is None else how.factor, rounded,
        torch.empty(experts, dtype=torch.float32, device=device), arrivals(device), bias, choice, weights,
        E2M1_MAX * how.limit, route_scale, weight.stride(0), kind_of(how), how.factor is not None, part, parts,
        experts, top_k, triton.next_power_of_2(experts), triton.next_power_of_2(top_k), length, bk, number, bn, on,
        num_warps=warps, **pdl.launch(on),
    )  # fmt: skip
    return Routed(choice, weights, weights.new_empty(1, 0)), rounded
