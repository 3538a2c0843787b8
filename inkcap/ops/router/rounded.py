"""Routing of one token that comes normed, which also leaves the row rounded for the experts.

Programs of their own round a part of the row each while others multiply, and the last one chooses. Rounding has no
addition behind a multiplication that could be contracted, so its bits do not depend on how this is compiled.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.letters import box_of
from inkcap.ops.quantize.ref import E2M1_MAX, Rounding, check_columns
from inkcap.ops.quantize.triton import SHORT as PART
from inkcap.ops.quantize.triton import kind_of, round_part
from inkcap.ops.router.ref import route_sigmoid_rounded
from inkcap.ops.router.triton import EMPTY, LONG, MANY, MOST, READ, SHORT, choose_from, pieces, post, product
from inkcap.ops.values import Normed, Routed


@triton.jit
def route_row_rounded(
    x, w, outer, rounded, box, bias, choice, weights, span, route_scale, w_stride,
    KIND: tl.constexpr, GIVEN: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    E: tl.constexpr, TOP: tl.constexpr, BP: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.trigger(PDL)
    part = tl.program_id(0) - (tl.num_programs(0) - 1 - PARTS)
    if part == PARTS:
        pdl.wait(PDL)
        choose_from(box, choice, weights, weights, route_scale, E, 0, TOP, False, BP)
    elif part >= 0:
        pdl.wait(PDL)
        round_part(x, outer, rounded, part, span, KIND, GIVEN, K, COLUMNS)
    else:
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        held = tl.minimum(n, E - 1)
        k = tl.arange(0, BK)[None, :]
        rows = pieces(w + held[:, None].to(tl.int64) * w_stride + k, K, BK, "evict_first")
        own_bias = tl.load(bias + n, mask=n < E, other=0.0)
        pdl.wait(PDL)
        post(box, n, product(rows, pieces(x + k, K, BK, "")), own_bias, E, False)


@route_sigmoid_rounded.implement("triton", when=lambda device: device.type == "cuda")
def route_sigmoid_rounded_triton(
    rows: Normed, weight: Tensor, bias: Tensor, how: Rounding, *, top_k: int, route_scale: float
) -> tuple[Routed, Tensor]:
    """`route_sigmoid_rounded` of the reference: one launch for one token, else one for each of the two."""
    (experts, length), x = weight.shape, rows.normed
    bn, warps = LONG if length > 4096 else SHORT
    programs, part = triton.cdiv(experts, bn), PART * warps
    parts = triton.cdiv(length, part)
    if x is None or len(x) != 1 or length > MOST or not weight.stride(1) == x.stride(1) == 1:
        return route_sigmoid_rounded.reference(rows, weight, bias, how, top_k=top_k, route_scale=route_scale)
    check_columns(x, how.block)
    device, on = x.device, pdl.supported(x.device)
    choice = torch.empty(1, top_k, dtype=torch.int64, device=device)
    weights = torch.empty(1, top_k, dtype=torch.float32, device=device)
    rounded = torch.empty(1, length, dtype=x.dtype, device=device)
    route_row_rounded[(programs + parts + 1,)](
        x, weight, x if how.factor is None else how.factor, rounded,
        box_of(weight, experts, torch.int64, EMPTY.value), bias, choice, weights,
        E2M1_MAX * how.limit, route_scale, weight.stride(0), kind_of(how), how.factor is not None, part, parts,
        experts, top_k, triton.next_power_of_2(top_k), length, READ * warps, bn, on,
        num_warps=warps, maxnreg=MANY, **pdl.launch(on),
    )  # fmt: skip
    return Routed(choice, weights, weights.new_empty(1, 0)), rounded
