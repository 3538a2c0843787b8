"""The short convolution of many tokens: a program walks over some of them and keeps the inputs of the last ones.

An input may be a sum of rows that is made on the way, such as that over a token's experts: then it never is in memory.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.values import GroupView, Packing

# tokens and channels of a program, tokens read at once, warps; measured on an H200, see docs/kernels.md
WALK, NARROW = (32, 512, 2, 2), (32, 512, 4, 2)
WIDE = 4096  # channels from which on the first is taken, and a convolution that sums nothing walks at all
WALKED = 2048  # tokens from which on that pays


@dataclass(frozen=True, slots=True)
class Parts:
    """What a token's input is the sum of: `plain` rows as they are, and products times weights."""

    plain: Tensor  # [T * number, C], any distance between rows
    number: int  # of a token, 0 or more
    products: Tensor | None = None  # [T * K, C]
    weights: Tensor | None = None  # [T, K] fp32


@triton.jit
def older(plane, table, row, position, at, mask, block_stride, token_stride, table_stride, BLOCK: tl.constexpr):
    """State at a position of a table row, zero before position 0. Row and position broadcast to the shape of `mask`."""
    held = tl.maximum(position, 0)
    block = tl.load(table + row.to(tl.int64) * table_stride + held // BLOCK).to(tl.int64)
    return tl.load(
        plane + block * block_stride + held % BLOCK * token_stride + at, mask=mask & (position >= 0), other=0.0
    )


@triton.jit
def summed(
    plain, products, weights, before, t, c, mask, plain_stride, SCALED: tl.constexpr, PLAIN: tl.constexpr,
    TOP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One token's input at channels c, rounded; SCALED: times before[0], rounded once more."""
    t = t.to(tl.int64)
    total = tl.zeros(c.shape, tl.float32)
    for i in tl.static_range(PLAIN):
        total += tl.load(plain + (t * PLAIN + i) * plain_stride + c, mask=mask, other=0.0).to(tl.float32)
    for k in tl.static_range(TOP):
        product = tl.load(products + (t * TOP + k) * C + c, mask=mask, other=0.0).to(tl.float32)
        total += product * tl.load(weights + t * TOP + k)
    out = total.to(plain.dtype.element_ty)
    if SCALED:
        out = (out.to(tl.float32) * tl.load(before)).to(out.dtype)
    return out


@triton.jit
def convolved(own, past1, past2, past3, tap0, tap1, tap2, tap3, scale):
    """One token's output, rounded; terms from the oldest to the token itself, as `finish` adds them."""
    x = own.to(tl.float32)
    total = past3.to(tl.float32) * tap3 + past2.to(tl.float32) * tap2 + past1.to(tl.float32) * tap1
    return ((x + total + x * tap0) * scale).to(own.dtype)


@triton.jit(do_not_specialize=["tokens"])
def walk_kernel(
    plain, products, weights, residual, y, taps, plane, table, slots, row_of, positions, scale, before, tokens,
    plain_stride, residual_stride, block_stride, token_stride, table_stride, tap_channel, tap_distance,
    PLAIN: tl.constexpr, TOP: tl.constexpr, RESIDUAL: tl.constexpr, SCALED: tl.constexpr, W: tl.constexpr,
    BLOCK: tl.constexpr, C: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BT tokens one after the other; the inputs of those before them are made anew."""
    tl.static_assert(W <= 4)
    pdl.trigger(PDL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = c < C
    tap = taps + c * tap_channel
    tap0 = tl.load(tap + (W - 1) * tap_distance, mask=mask, other=0.0).to(tl.float32)
    tap1 = tl.load(tap + (W - 2) * tap_distance, mask=mask & (W > 1), other=0.0).to(tl.float32)
    tap2 = tl.load(tap + (W - 3) * tap_distance, mask=mask & (W > 2), other=0.0).to(tl.float32)
    tap3 = tl.load(tap + (W - 4) * tap_distance, mask=mask & (W > 3), other=0.0).to(tl.float32)
    begin, one = tl.program_id(0) * BT, tl.arange(0, 1)
    # most programs have tokens of one sequence, whose inputs nobody keeps
    near = tl.maximum(begin - W + 1, 0) + tl.arange(0, 2 * BT)
    own_slots = tl.load(slots + near, mask=(near >= begin) & (near < tl.minimum(begin + BT, tokens)), other=-1)
    there = near < tl.minimum(begin + BT, tokens)
    row, place = tl.load(row_of + begin), tl.load(positions + begin) - begin
    alike = tl.load(row_of + near, mask=there, other=0) == row
    alike = (alike & (tl.load(positions + near, mask=there, other=0) - near == place) & (own_slots < 0)) | ~there
    simple = (tl.min(alike.to(tl.int32), 0) > 0) & (begin + BT <= tokens) & (begin >= W - 1) & (BT >= W - 1)
    pdl.wait(PDL)
    past1 = summed(
        plain, products, weights, before, tl.maximum(begin - 1, 0), c, mask, plain_stride, SCALED, PLAIN, TOP, C
    )
    past2 = summed(
        plain, products, weights, before, tl.maximum(begin - 2, 0), c, mask, plain_stride, SCALED, PLAIN, TOP, C
    )
    past3 = summed(
        plain, products, weights, before, tl.maximum(begin - 3, 0), c, mask, plain_stride, SCALED, PLAIN, TOP, C
    )
    if simple:
        for done in range(0, BT, AHEAD):
            first, owns, bases = begin + done, (), ()
            for i in tl.static_range(AHEAD):  # all loads before the first store
                owns += (
                    summed(plain, products, weights, before, first + i, c, mask, plain_stride, SCALED, PLAIN, TOP, C),
                )
                if RESIDUAL:
                    base = residual + (first + i).to(tl.int64) * residual_stride + c
                    bases += (tl.load(base, mask=mask, other=0.0).to(tl.float32),)
            for i in tl.static_range(AHEAD):
                out = convolved(owns[i], past1, past2, past3, tap0, tap1, tap2, tap3, scale).to(tl.float32)
                if RESIDUAL:
                    out += bases[i]
                tl.store(y + (first + i).to(tl.int64) * C + c, out.to(y.dtype.element_ty), mask=mask)
                past3, past2, past1 = past2, past1, owns[i]
    else:
        for ahead in range(tl.minimum(BT, tokens - begin)):
            t = begin + ahead
            row, position, slot = tl.load(row_of + t), tl.load(positions + t), tl.load(slots + t)
            own = summed(plain, products, weights, before, t, c, mask, plain_stride, SCALED, PLAIN, TOP, C)
            for back in tl.static_range(1, W):
                other = tl.maximum(t - back, 0)
                if (t < back) | (tl.load(row_of + other) != row) | (tl.load(positions + other) != position - back):
                    past = older(
                        plane, table, row, position - back + one, c, mask, block_stride, token_stride, table_stride,
                        BLOCK,
                    ).to(own.dtype)  # fmt: skip
                    if back == 1:
                        past1 = past
                    elif back == 2:
                        past2 = past
                    else:
                        past3 = past
            out = convolved(own, past1, past2, past3, tap0, tap1, tap2, tap3, scale).to(tl.float32)
            if slot >= 0:
                kept = plane + slot // BLOCK * block_stride + slot % BLOCK * token_stride + c
                tl.store(kept, own.to(plane.dtype.element_ty), mask=mask)
            if RESIDUAL:
                out += tl.load(residual + t.to(tl.int64) * residual_stride + c, mask=mask, other=0.0).to(tl.float32)
            tl.store(y + t.to(tl.int64) * C + c, out.to(y.dtype.element_ty), mask=mask)
            past3, past2, past1 = past2, past1, own


def walk(
    parts: Parts,
    taps: Tensor,
    view: GroupView,
    packing: Packing,
    plane: int,
    scale: float,
    residual: Tensor | None,
    before: Tensor | None,
    dtype: torch.dtype | None,
) -> Tensor:
    """`sconv` of the reference with taps [C, W <= 4]; with `before` [1] fp32 it is that of x * before, rounded."""
    plain, state, tokens = parts.plain, view.planes[plane], len(view.slots)
    channels = plain.shape[1]
    summed = plain.dtype if residual is None else torch.promote_types(residual.dtype, plain.dtype)
    out = torch.empty(tokens, channels, dtype=dtype or summed, device=plain.device)
    on, (bt, bc, ahead, warps) = pdl.supported(plain.device), WALK if channels >= WIDE else NARROW
    bc = min(bc, triton.next_power_of_2(channels))
    walk_kernel[(triton.cdiv(tokens, bt), triton.cdiv(channels, bc))](
        plain, plain if parts.products is None else parts.products, plain if parts.weights is None else parts.weights,
        plain if residual is None else residual, out, taps, state, view.table, view.slots, packing.row_of,
        packing.positions, scale, taps if before is None else before, tokens,
        plain.stride(0), 0 if residual is None else residual.stride(0),
        state.stride(0), state.stride(1), view.table.stride(0), taps.stride(0), taps.stride(1),
        parts.number, 0 if parts.weights is None else parts.weights.shape[1], residual is not None,
        before is not None, taps.shape[1], view.block, channels, bt, bc, ahead, on,
        num_warps=warps, **pdl.launch(on),
    )  # fmt: skip
    return out
