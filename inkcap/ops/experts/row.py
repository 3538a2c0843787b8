"""Experts of one token: programs stream a few weight rows each, as in ops/linear/device.py."""

import triton
import triton.language as tl

from inkcap.ops import pdl
from inkcap.ops.act.triton import gated
from inkcap.ops.linear.device import fetch_all, multiply
from inkcap.ops.sconv.triton import finish, history


@triton.jit
def up_row(
    x, norm, w13, shared_w13, choice, gammas, act, shared_act, eps, gate_cap, up_cap,
    NORMED: tl.constexpr, CAPPED: tl.constexpr, S: tl.constexpr, UNITS: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The shared experts come first: their weights are on the way while the router still chooses.

    Triggers after its wait, so that the next kernel may read the choice early.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    held = tl.minimum(n, 2 * UNITS - 1)
    slot = tl.program_id(1)
    expert = slot.to(tl.int64)
    start = shared_w13
    if slot >= S:
        pdl.wait(PDL)
        expert = tl.load(choice + slot - S)
        start = w13
    w0, w1, w2, w3 = fetch_all(start + (expert * (2 * UNITS) + held)[:, None] * K, K, BK, CHUNKS)
    pdl.wait(PDL)
    pdl.trigger(PDL)
    out = gated(multiply(w0, w1, w2, w3, x, norm, eps, NORMED, K, BK, CHUNKS), gate_cap, up_cap, CAPPED, BN)
    unit = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
    if slot >= S:
        tl.store(act + (slot - S) * UNITS + unit, out.to(act.dtype.element_ty), mask=unit < UNITS)
    else:
        out *= tl.load(gammas + slot)
        tl.store(shared_act + slot * UNITS + unit, out.to(act.dtype.element_ty), mask=unit < UNITS)


@triton.jit
def part(w, place, at, part: tl.constexpr, FULL: tl.constexpr, LAST: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """One chunk of the weight rows [places, rows, BK] of all experts of the token; FULL: every place is one."""
    if FULL and K % BK == 0:
        out = tl.load(w + part * BK, eviction_policy="evict_first")
    else:
        mask = (place < LAST)[:, None, None] & (part * BK + at < K)[None, None, :]
        out = tl.load(w + part * BK, mask=mask, other=0.0, eviction_policy="evict_first")
    return out


@triton.jit
def scaled(
    act, shared_act, weights, place, at, part: tl.constexpr,
    TOP: tl.constexpr, S: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One chunk of the activations, times the weights of their experts: [places, 1, BK] fp32."""
    k = part * BK + at
    mask = (place < TOP)[:, None] & (k < K)[None, :]
    weight = tl.load(weights + place, mask=place < TOP, other=0.0)
    out = tl.load(act + place[:, None] * K + k[None, :], mask=mask, other=0.0).to(tl.float32) * weight[:, None]
    if S > 0:
        mask = ((place >= TOP) & (place < TOP + S))[:, None] & (k < K)[None, :]
        out += tl.load(shared_act + (place - TOP)[:, None] * K + k[None, :], mask=mask, other=0.0).to(tl.float32)
    return out[:, None, :]


@triton.jit
def down_row(
    act, shared_act, w2, shared_w2, choice, weights, residual, y, taps, plane, table, slots, row_of, positions,
    conv_scale, rows, block_stride, token_stride, table_stride, tap_channel, tap_distance,
    CONVOLVED: tl.constexpr, RESIDUAL: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
    TOP: tl.constexpr, S: tl.constexpr, PLACES: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program owns its output rows for all experts: no atomics, no second pass. The choice is read early."""
    pdl.trigger(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    mask = n < rows
    held = tl.minimum(n, rows - 1).to(tl.int64)
    place = tl.arange(0, PLACES)
    at = tl.arange(0, BK)
    expert = tl.load(choice + place, mask=place < TOP, other=0)
    wp = w2 + ((expert * rows)[:, None] + held[None, :])[:, :, None] * K
    if S > 0:
        shared = shared_w2 + (held[None, :] * S + (place - TOP)[:, None])[:, :, None] * K
        wp = tl.where((place < TOP)[:, None, None], wp, shared)
    wp += at[None, None, :]
    w0 = part(wp, place, at, 0, TOP + S == PLACES, TOP + S, K, BK)
    if CHUNKS > 1:
        w1 = part(wp, place, at, 1, TOP + S == PLACES, TOP + S, K, BK)
    if CHUNKS > 2:
        w2_ = part(wp, place, at, 2, TOP + S == PLACES, TOP + S, K, BK)
    if CHUNKS > 3:
        w3 = part(wp, place, at, 3, TOP + S == PLACES, TOP + S, K, BK)
    if CONVOLVED:
        zero = tl.arange(0, 1)
        row, position, slot = tl.load(row_of + zero), tl.load(positions + zero), tl.load(slots + zero)
        past = history(
            plane, table, taps, row, position, n, mask, block_stride, token_stride, table_stride,
            tap_channel, tap_distance, BLOCK, W,
        )  # fmt: skip
        own_tap = tl.load(taps + n * tap_channel + (W - 1) * tap_distance, mask=mask, other=0.0)
    pdl.wait(PDL)
    total = w0.to(tl.float32) * scaled(act, shared_act, weights, place, at, 0, TOP, S, K, BK)
    if CHUNKS > 1:
        total += w1.to(tl.float32) * scaled(act, shared_act, weights, place, at, 1, TOP, S, K, BK)
    if CHUNKS > 2:
        total += w2_.to(tl.float32) * scaled(act, shared_act, weights, place, at, 2, TOP, S, K, BK)
    if CHUNKS > 3:
        total += w3.to(tl.float32) * scaled(act, shared_act, weights, place, at, 3, TOP, S, K, BK)
    out = tl.sum(tl.sum(total, 2), 0).to(act.dtype.element_ty)
    if CONVOLVED:
        out = finish(out, past, own_tap, conv_scale, plane, slot, n, mask, block_stride, token_stride, BLOCK)
    out = out.to(tl.float32)
    if RESIDUAL:
        out += tl.load(residual + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + n, out.to(y.dtype.element_ty), mask=mask)
