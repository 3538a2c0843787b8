"""Experts of one token whose weights are codes: as in row.py, decoded in registers and multiplied in fp32.

Shared experts are dense and have their own, shorter tiles. Weights are never rounded: code times scale is exact in
fp32, and an expert's factor multiplies the sum.
"""

import triton
import triton.language as tl

from inkcap.ops import pdl
from inkcap.ops.act.triton import gated
from inkcap.ops.experts.codes import times_blocks
from inkcap.ops.linear.device import chunks, fetch_all, multiply, operand
from inkcap.ops.sconv.triton import finish, history

MOST = 16  # chunks


def coded_chunks(size: int) -> tuple[int, int]:
    """(columns of a chunk, number of chunks) of a row of `size` codes; as `chunks`, but more of them where they fit."""
    length = min(size & -size, 2048)
    return (length, size // length) if size <= MOST * length else chunks(size)


LIFT = tl.constexpr(2.0**100)  # of x, so that products with codes that are not made whole stay normal numbers
REST_E2M1, REST_E4M3 = tl.constexpr(2.0**26), tl.constexpr(2.0**20)  # what is missing then


@triton.jit
def fetch_coded(w, words, s, blocks, part: tl.constexpr, BITS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """One chunk of words and scales. w: [rows, words of BK] pointers; s: [rows, blocks of BK]."""
    BLOCK: tl.constexpr = 16 if BITS == 4 else 32
    BW: tl.constexpr = BK * BITS // 32
    if K % BK == 0:
        code = tl.load(w + part * BW, eviction_policy="evict_first")
        scale = tl.load(s + part * (BK // BLOCK), eviction_policy="evict_first")
    else:
        code = tl.load(w + part * BW, mask=(part * BW + words < K * BITS // 32)[None, :], other=0)
        scale = tl.load(s + part * (BK // BLOCK), mask=(part * (BK // BLOCK) + blocks < K // BLOCK)[None, :], other=0)
    return code, scale


@triton.jit
def multiply_coded(
    code, scale, x, norm, part: tl.constexpr, NORMED: tl.constexpr, BITS: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One chunk of rows times the row x: ([BN, blocks] sums without the last power of two, sum of squares of x)."""
    at = tl.arange(0, BK)
    own, scaled = operand(x, norm, at, part, NORMED, K, BK)
    return times_blocks(code, scale, (scaled * LIFT)[None, :], BITS, BN, BK), own * own


@triton.jit
def up_shared(
    x, norm, shared_w13, gammas, shared_act, eps, gate_cap, up_cap, slot, first,
    NORMED: tl.constexpr, CAPPED: tl.constexpr, UNITS: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tile `first` of shared expert `slot`."""
    n = tl.minimum(first * BN + tl.arange(0, BN), 2 * UNITS - 1)
    w0, w1, w2, w3 = fetch_all(shared_w13 + (slot * (2 * UNITS) + n)[:, None] * K, K, BK, CHUNKS)
    pdl.wait(PDL)
    pdl.trigger(PDL)
    product = multiply(w0, w1, w2, w3, x, norm, eps, NORMED, K, BK, CHUNKS)
    out = gated(product, gate_cap, up_cap, CAPPED, BN) * tl.load(gammas + slot)
    unit = first * (BN // 2) + tl.arange(0, BN // 2)
    tl.store(shared_act + slot * UNITS + unit, out.to(shared_act.dtype.element_ty), mask=unit < UNITS)


@triton.jit
def up_coded(
    x, norm, words, scales, factor, choice, act, eps, gate_cap, up_cap, slot, first,
    NORMED: tl.constexpr, CAPPED: tl.constexpr, UNITS: tl.constexpr, BITS: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tile `first` of the routed expert at place `slot`."""
    BLOCK: tl.constexpr = 16 if BITS == 4 else 32
    n = tl.minimum(first * BN + tl.arange(0, BN), 2 * UNITS - 1)
    word, block = tl.arange(0, BK * BITS // 32), tl.arange(0, BK // BLOCK)
    pdl.wait(PDL)
    pdl.trigger(PDL)
    expert = tl.load(choice + slot).to(tl.int64)
    row = (expert * (2 * UNITS) + n)[:, None]
    wp = words + row * (K * BITS // 32) + word[None, :]
    sp = scales + row * (K // BLOCK) + block[None, :]
    held = ()
    for i in tl.static_range(CHUNKS):
        held += (fetch_coded(wp, word, sp, block, i, BITS, K, BK),)
    total, squares = multiply_coded(held[0][0], held[0][1], x, norm, 0, NORMED, BITS, K, BK, BN)
    for i in tl.static_range(1, CHUNKS):
        more, square = multiply_coded(held[i][0], held[i][1], x, norm, i, NORMED, BITS, K, BK, BN)
        total += more
        squares += square
    product = tl.sum(total, 1) * (REST_E2M1 if BITS == 4 else REST_E4M3)
    if BITS == 4:
        product *= tl.load(factor + expert)
    if NORMED:
        product *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    out = gated(product, gate_cap, up_cap, CAPPED, BN)
    unit = first * (BN // 2) + tl.arange(0, BN // 2)
    tl.store(act + slot * UNITS + unit, out.to(act.dtype.element_ty), mask=unit < UNITS)


@triton.jit
def up_row_coded(
    x, norm, words, scales, factor, shared_w13, choice, gammas, act, shared_act, eps, gate_cap, up_cap,
    NORMED: tl.constexpr, CAPPED: tl.constexpr, S: tl.constexpr, UNITS: tl.constexpr, BITS: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr, BN: tl.constexpr,
    SHARED_BK: tl.constexpr, SHARED_CHUNKS: tl.constexpr, SHARED_BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The shared experts come first, as in `up_row`; programs of the routed ones own BN rows. Triggers after its wait,
    so that the next kernel may read the choice early."""
    SHARED_TILES: tl.constexpr = (2 * UNITS + SHARED_BN - 1) // SHARED_BN
    TILES: tl.constexpr = (2 * UNITS + BN - 1) // BN
    program = tl.program_id(0)
    if program < S * SHARED_TILES:
        up_shared(
            x, norm, shared_w13, gammas, shared_act, eps, gate_cap, up_cap,
            program // SHARED_TILES, program % SHARED_TILES, NORMED, CAPPED, UNITS, K, SHARED_BK, SHARED_CHUNKS,
            SHARED_BN, PDL,
        )  # fmt: skip
    else:
        own = program - S * SHARED_TILES
        up_coded(
            x, norm, words, scales, factor, choice, act, eps, gate_cap, up_cap,
            own // TILES, own % TILES, NORMED, CAPPED, UNITS, BITS, K, BK, CHUNKS, BN, PDL,
        )  # fmt: skip


@triton.jit
def fetch_joined(
    words, scales, choice, row, rows, part: tl.constexpr,
    BITS: tl.constexpr, TOP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One chunk of words and scales of rows [BN] of all experts of the token, one expert behind the other: TOP * K
    columns."""
    BLOCK: tl.constexpr = 16 if BITS == 4 else 32
    BW: tl.constexpr = BK * BITS // 32
    WORDS: tl.constexpr = K * BITS // 32  # of an expert's row
    BLOCKS: tl.constexpr = K // BLOCK
    j = part * BW + tl.arange(0, BW)
    expert = tl.load(choice + j // WORDS, mask=j < TOP * WORDS, other=0)
    if WORDS % 4 == 0:  # four words are of one expert: loads of 16 bytes
        at = tl.max_contiguous(tl.multiple_of(j % WORDS, 4), 4)
        expert = tl.max_constancy(expert, 4)
    else:
        at = j % WORDS
    inside = (j < TOP * WORDS)[None, :]
    code = tl.load(
        words + (expert[None, :] * rows + row[:, None]) * WORDS + at[None, :], mask=inside, other=0,
        eviction_policy="evict_first",
    )  # fmt: skip
    j = part * (BK // BLOCK) + tl.arange(0, BK // BLOCK)
    expert = tl.load(choice + j // BLOCKS, mask=j < TOP * BLOCKS, other=0)
    inside = (j < TOP * BLOCKS)[None, :]
    scale = tl.load(
        scales + (expert[None, :] * rows + row[:, None]) * BLOCKS + (j % BLOCKS)[None, :], mask=inside, other=0,
        eviction_policy="evict_first",
    )  # fmt: skip
    return code, scale


@triton.jit
def multiply_joined(
    code, scale, act, weights, factor, choice, part: tl.constexpr,
    BITS: tl.constexpr, TOP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One chunk of products, weights and factors of experts included: [BN, blocks]."""
    BLOCK: tl.constexpr = 16 if BITS == 4 else 32
    k = part * BK + tl.arange(0, BK)
    x = tl.load(act + k, mask=k < TOP * K, other=0.0).to(tl.float32) * LIFT
    place = (part * (BK // BLOCK) + tl.arange(0, BK // BLOCK)) // (K // BLOCK)
    weight = tl.load(weights + place, mask=place < TOP, other=0.0)
    if BITS == 4:
        weight *= tl.load(factor + tl.load(choice + place, mask=place < TOP, other=0), mask=place < TOP, other=0.0)
    return times_blocks(code, scale, x[None, :], BITS, BN, BK) * weight[None, :]


@triton.jit
def place_part(w, s, here, words, blocks, part: tl.constexpr, BITS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """One chunk of words and scales of the rows of all places. w: [places * rows, words]; here: [places * rows]."""
    BLOCK: tl.constexpr = 16 if BITS == 4 else 32
    BW: tl.constexpr = BK * BITS // 32
    code = tl.load(
        w + part * BW, mask=here[:, None] & (part * BW + words < K * BITS // 32)[None, :], other=0,
        eviction_policy="evict_first",
    )  # fmt: skip
    scale = tl.load(
        s + part * (BK // BLOCK), mask=here[:, None] & (part * (BK // BLOCK) + blocks < K // BLOCK)[None, :], other=0,
        eviction_policy="evict_first",
    )  # fmt: skip
    return code, scale


@triton.jit
def place_product(
    code, scale, act, weight, place, part: tl.constexpr, BITS: tl.constexpr, TOP: tl.constexpr, PLACES: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One chunk of products: [places * rows, blocks]."""
    k = part * BK + tl.arange(0, BK)
    x = tl.load(act + place[:, None] * K + k[None, :], mask=(place < TOP)[:, None] & (k < K)[None, :], other=0.0)
    x = x.to(tl.float32) * (weight * LIFT)[:, None]
    x = tl.reshape(tl.broadcast_to(x[:, None, :], [PLACES, BN, BK]), [PLACES * BN, BK])
    return times_blocks(code, scale, x, BITS, PLACES * BN, BK)


@triton.jit
def down_row_coded(
    act, shared_act, words, scales, factor, shared_w2, choice, weights, residual, y,
    taps, plane, table, slots, row_of, positions,
    conv_scale, rows, block_stride, token_stride, table_stride, tap_channel, tap_distance,
    CONVOLVED: tl.constexpr, RESIDUAL: tl.constexpr, W: tl.constexpr, HELD: tl.constexpr,
    TOP: tl.constexpr, S: tl.constexpr, PLACES: tl.constexpr, SHARED_PLACES: tl.constexpr, BITS: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program owns its output rows for all experts, as in `down_row`. The choice is read early.

    Weight and factor of an expert multiply its activations in fp32.
    """
    pdl.trigger(PDL)
    BLOCK: tl.constexpr = 16 if BITS == 4 else 32
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    mask = n < rows
    held = tl.minimum(n, rows - 1).to(tl.int64)
    place = tl.arange(0, PLACES)
    expert = tl.load(choice + place, mask=place < TOP, other=0).to(tl.int64)
    here = tl.reshape(tl.broadcast_to((place < TOP)[:, None], [PLACES, BN]), [PLACES * BN])
    row = tl.reshape((expert * rows)[:, None] + held[None, :], [PLACES * BN])[:, None]
    word, block = tl.arange(0, BK * BITS // 32), tl.arange(0, BK // BLOCK)
    wp = words + row * (K * BITS // 32) + word[None, :]
    sp = scales + row * (K // BLOCK) + block[None, :]
    c0, s0 = place_part(wp, sp, here, word, block, 0, BITS, K, BK)
    if CHUNKS > 1:
        c1, s1 = place_part(wp, sp, here, word, block, 1, BITS, K, BK)
    if CHUNKS > 2:
        c2, s2 = place_part(wp, sp, here, word, block, 2, BITS, K, BK)
    if CHUNKS > 3:
        c3, s3 = place_part(wp, sp, here, word, block, 3, BITS, K, BK)
    if BITS == 4:
        own_factor = tl.load(factor + expert, mask=place < TOP, other=0.0)
    at = tl.arange(0, BK)
    if S > 0:
        other = tl.arange(0, SHARED_PLACES)
        dense = shared_w2 + (held[None, :] * S + other[:, None])[:, :, None] * K + at[None, None, :]
        also = (other < S)[:, None, None]
        d0 = tl.load(dense, mask=also & (at < K)[None, None, :], other=0.0, eviction_policy="evict_first")
        if CHUNKS > 1:
            d1 = tl.load(dense + BK, mask=also & (BK + at < K)[None, None, :], other=0.0)
        if CHUNKS > 2:
            d2 = tl.load(dense + 2 * BK, mask=also & (2 * BK + at < K)[None, None, :], other=0.0)
        if CHUNKS > 3:
            d3 = tl.load(dense + 3 * BK, mask=also & (3 * BK + at < K)[None, None, :], other=0.0)
    if CONVOLVED:
        zero = tl.arange(0, 1)
        own_row, position, slot = tl.load(row_of + zero), tl.load(positions + zero), tl.load(slots + zero)
        past = history(
            plane, table, taps, own_row, position, n, mask, block_stride, token_stride, table_stride,
            tap_channel, tap_distance, HELD, W,
        )  # fmt: skip
        own_tap = tl.load(taps + n * tap_channel + (W - 1) * tap_distance, mask=mask, other=0.0)
    pdl.wait(PDL)
    weight = tl.load(weights + place, mask=place < TOP, other=0.0)
    if BITS == 4:
        weight *= own_factor
    total = place_product(c0, s0, act, weight, place, 0, BITS, TOP, PLACES, K, BK, BN)
    if CHUNKS > 1:
        total += place_product(c1, s1, act, weight, place, 1, BITS, TOP, PLACES, K, BK, BN)
    if CHUNKS > 2:
        total += place_product(c2, s2, act, weight, place, 2, BITS, TOP, PLACES, K, BK, BN)
    if CHUNKS > 3:
        total += place_product(c3, s3, act, weight, place, 3, BITS, TOP, PLACES, K, BK, BN)
    out = tl.sum(tl.reshape(tl.sum(total, 1), [PLACES, BN]), 0) * (REST_E2M1 if BITS == 4 else REST_E4M3)
    if S > 0:
        sums = d0.to(tl.float32) * shared_part(shared_act, other, at, 0, S, K, BK)
        if CHUNKS > 1:
            sums += d1.to(tl.float32) * shared_part(shared_act, other, at, 1, S, K, BK)
        if CHUNKS > 2:
            sums += d2.to(tl.float32) * shared_part(shared_act, other, at, 2, S, K, BK)
        if CHUNKS > 3:
            sums += d3.to(tl.float32) * shared_part(shared_act, other, at, 3, S, K, BK)
        out += tl.sum(tl.sum(sums, 2), 0)
    out = out.to(act.dtype.element_ty)
    if CONVOLVED:
        out = finish(out, past, own_tap, conv_scale, plane, slot, n, mask, block_stride, token_stride, HELD)
    out = out.to(tl.float32)
    if RESIDUAL:
        out += tl.load(residual + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + n, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def shared_part(shared_act, other, at, part: tl.constexpr, S: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """One chunk of the shared activations: [shared places, 1, BK] fp32."""
    k = part * BK + at
    x = tl.load(shared_act + other[:, None] * K + k[None, :], mask=(other < S)[:, None] & (k < K)[None, :], other=0.0)
    return x.to(tl.float32)[:, None, :]


@triton.jit
def down_row_joined(
    act, words, scales, factor, choice, weights, residual, y,
    taps, plane, table, slots, row_of, positions,
    conv_scale, rows, block_stride, token_stride, table_stride, tap_channel, tap_distance,
    CONVOLVED: tl.constexpr, RESIDUAL: tl.constexpr, W: tl.constexpr, HELD: tl.constexpr,
    TOP: tl.constexpr, BITS: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`down_row_coded` of routed experts alone: their rows, one behind the other, are one row, so that no chunk is cut.

    Weight and factor of an expert multiply the sums of its blocks in fp32.
    """
    pdl.trigger(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    mask = n < rows
    row = tl.minimum(n, rows - 1).to(tl.int64)
    held = ()
    for i in tl.static_range(CHUNKS):
        held += (fetch_joined(words, scales, choice, row, rows, i, BITS, TOP, K, BK),)
    if CONVOLVED:
        zero = tl.arange(0, 1)
        own_row, position, slot = tl.load(row_of + zero), tl.load(positions + zero), tl.load(slots + zero)
        past = history(
            plane, table, taps, own_row, position, n, mask, block_stride, token_stride, table_stride,
            tap_channel, tap_distance, HELD, W,
        )  # fmt: skip
        own_tap = tl.load(taps + n * tap_channel + (W - 1) * tap_distance, mask=mask, other=0.0)
    pdl.wait(PDL)
    total = multiply_joined(held[0][0], held[0][1], act, weights, factor, choice, 0, BITS, TOP, K, BK, BN)
    for i in tl.static_range(1, CHUNKS):
        total += multiply_joined(held[i][0], held[i][1], act, weights, factor, choice, i, BITS, TOP, K, BK, BN)
    out = tl.sum(total, 1) * (REST_E2M1 if BITS == 4 else REST_E4M3)
    out = out.to(act.dtype.element_ty)
    if CONVOLVED:
        out = finish(out, past, own_tap, conv_scale, plane, slot, n, mask, block_stride, token_stride, HELD)
    out = out.to(tl.float32)
    if RESIDUAL:
        out += tl.load(residual + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + n, out.to(y.dtype.element_ty), mask=mask)
