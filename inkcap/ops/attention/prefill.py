"""Attention of many queries: a program has a tile of queries and walks all keys they see.

4 * D operations for each visible pair of query head and key is the floor. Tiles without bias and edges take the short
path. In the others the bias is made by two small products with a bank that was shifted beforehand, see `tile.octets`.
Rows of a tile are groups of eight queries of one head, octet by octet of a sequence's queries, in each head by head.
"""

import triton
import triton.language as tl

from inkcap.ops import pdl
from inkcap.ops.attention.tile import (
    HIDDEN,
    LOG2E,
    bank,
    decoded,
    far_own,
    far_pages,
    finish,
    fold,
    growth,
    near_own,
    near_pages,
)


@triton.jit
def shift_kernel(
    bias, table,
    STATES: tl.constexpr, SP: tl.constexpr, EXTENT: tl.constexpr, ZERO: tl.constexpr, PITCH: tl.constexpr,
    N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The bank shifted, as `tile.octets` wants it: [octets * 8, SP, PITCH]."""
    state = tl.arange(0, SP)
    x = tl.program_id(1) * N + tl.arange(0, N)
    columns = bank(bias, tl.program_id(0) + ZERO + 8 - x, state, STATES, EXTENT)
    pdl.trigger(PDL)
    pdl.wait(PDL)
    tl.store(table + (tl.program_id(0) * SP + state)[:, None] * PITCH + x[None, :], columns, mask=(x < PITCH)[None, :])


@triton.jit
def far_pages_tiled(
    q, acc, top, total, k_pages, v_pages, table, head, begin, end, scale,
    DP: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr, NATIVE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`far_pages` through descriptors [pages, kv heads, BLOCK, D]; 8K queries at 24K on an H200: 1876 us, not 2125."""
    for t in tl.range(begin, end, num_stages=STAGES):
        page, first = tl.load(table + t * BN // BLOCK), t * BN % BLOCK
        k = tl.reshape(k_pages.load([page, head, first, 0]), [BN, DP])
        v = tl.reshape(v_pages.load([page, head, first, 0]), [BN, DP])
        k, v = decoded(k, q.dtype, NATIVE), decoded(v, q.dtype, NATIVE)
        z = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        acc, top, total = fold(z, v, acc, top, total)
    return acc, top, total


@triton.jit
def far_own_tiled(q, acc, top, total, k_own, v_own, start, channel, end, scale, BN: tl.constexpr, STAGES: tl.constexpr):
    """`far_own` through descriptors of [tokens, kv heads * D]."""
    for u in tl.range(0, end, num_stages=STAGES):
        k = k_own.load([start + u * BN, channel])
        v = v_own.load([start + u * BN, channel])
        z = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        acc, top, total = fold(z, v, acc, top, total)
    return acc, top, total


@triton.jit(do_not_specialize=["sequences", "least"])
def tile_kernel(
    q, k, v, r, out, bias, sinks, gate, v_scale, k_plane, v_plane, k_pages, v_pages, k_own, v_own, table, starts, rows,
    first_of,
    sequences, least, scale, floor, alpha, s_k, s_r, s_sinks, s_gate, s_block, s_token, s_head, s_table,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, STATES: tl.constexpr, SP: tl.constexpr,
    EXTENT: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
    RP: tl.constexpr, BM: tl.constexpr, OCTETS: tl.constexpr, BN: tl.constexpr, NN: tl.constexpr,
    SPARE: tl.constexpr, ZERO: tl.constexpr, PITCH: tl.constexpr, SHUFFLED: tl.constexpr,
    SINKS: tl.constexpr, GATE: tl.constexpr, TILED: tl.constexpr, CODED: tl.constexpr, NATIVE: tl.constexpr,
    FAR_STAGES: tl.constexpr, STAGES: tl.constexpr, PAGE_STAGES: tl.constexpr, OWN_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One kv head of one tile of queries, of sequences with at least `least` tokens; writes their rows of out.

    Late tiles, which see the most keys, come first.
    """
    G: tl.constexpr = HEADS // KV
    pdl.wait(PDL)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    ri = tl.arange(0, RP)
    base = tl.load(starts + ri, mask=ri < sequences, other=0) * G // BM + SPARE * ri
    i = tl.sum(((base <= tile) & (ri < sequences)).to(tl.int32), 0) - 1
    start = tl.load(starts + i)
    group = (tile - start * G // BM - SPARE * i) * (BM // 8)
    offset = group // G * 8
    count = tl.load(starts + i + 1) - start
    if (offset >= count) | (count < least):
        return
    first = tl.load(first_of + i)
    position = first + offset
    pages = table + tl.load(rows + i).to(tl.int64) * s_table
    k_plane += head * s_head
    v_plane += head * s_head
    k += start.to(tl.int64) * s_k + head * D
    v += start.to(tl.int64) * s_k + head * D

    rm = tl.arange(0, BM)
    rn = tl.arange(0, BN)
    rj = tl.arange(0, NN)
    rd = tl.arange(0, DP)
    state = tl.arange(0, SP)
    group += rm // 8
    query = group // G * 8 - offset + rm % 8
    live = offset + query < count
    token = (start + offset + query).to(tl.int64)
    of_head = head * G + group % G
    inside = live[:, None] & (rd < D)[None, :]
    at = (token * HEADS + of_head)[:, None] * D + rd[None, :]
    rows_q = tl.load(q + at, mask=inside, other=0.0)
    grown = tl.full([BM], LOG2E, tl.float32)
    if SCALED:
        grown = grown * growth(position + query, floor, alpha)
    acc = tl.zeros([BM, DP], tl.float32)
    top = tl.full([BM], HIDDEN, tl.float32)
    total = tl.zeros([BM], tl.float32)

    low = 0
    bend = tl.minimum(tl.maximum(position - EXTENT + 1, 0), first) // BN  # tiles before it are whole and have no bias
    own_bend = tl.maximum(offset - EXTENT + 1, 0) // BN
    if WINDOW > 0:  # every tile may have an edge
        low = tl.maximum(position - WINDOW + 1, 0)
        bend = tl.minimum(low, first) // BN
        own_bend = tl.maximum(offset - WINDOW + 1, 0) // BN
    elif TILED:
        acc, top, total = far_pages_tiled(
            rows_q, acc, top, total, k_pages, v_pages, pages, head, 0, bend, scale * LOG2E, DP, BLOCK, BN, NATIVE,
            FAR_STAGES,
        )  # fmt: skip
        acc, top, total = far_own_tiled(
            rows_q, acc, top, total, k_own, v_own, start, head * D, own_bend, scale * LOG2E, BN, STAGES
        )
    else:
        acc, top, total = far_pages(
            rows_q, acc, top, total, k_plane, v_plane, pages, 0, bend, rn, rd, s_block, s_token, scale * LOG2E,
            D, DP, BLOCK, BN, NATIVE, FAR_STAGES,
        )  # fmt: skip
        acc, top, total = far_own(
            rows_q, acc, top, total, k, v, 0, own_bend, count, rn, rd, s_k, scale * LOG2E, D, DP, BN, STAGES
        )  # fmt: skip
    # loaded here so that they take no shared memory from the loops above
    place = tl.arange(0, OCTETS * SP)
    stated = live[:, None] & (place % SP < STATES)[None, :] & (query[:, None] // 8 == (place // SP)[None, :])
    rows_r = tl.load(
        r + token[:, None] * s_r + (of_head * STATES)[:, None] + (place % SP)[None, :], mask=stated, other=0.0
    )  # fmt: skip
    acc, top, total = near_pages(
        rows_q, rows_r, grown, acc, top, total, k_plane, v_plane, pages, bias, bend * (BN // NN), tl.cdiv(first, NN),
        low, first, position, query, rj, rd, state, s_block, s_token, scale * LOG2E,
        D, DP, BLOCK, NN, STATES, EXTENT, WINDOW, False, NN, SP, ZERO, PITCH, NATIVE, PAGE_STAGES, SHUFFLED,
    )  # fmt: skip
    acc, top, total = near_own(
        rows_q, rows_r, grown, acc, top, total, k, v, bias, own_bend * (BN // NN),
        tl.cdiv(tl.minimum(offset + OCTETS * 8, count), NN), count, offset, query, rj, rd, state, s_k, scale * LOG2E,
        D, DP, NN, STATES, EXTENT, WINDOW, NN, SP, ZERO, PITCH, OWN_STAGES, SHUFFLED,
    )  # fmt: skip
    pdl.trigger(PDL)
    y = finish(
        acc, top, total, tl.load(v_scale + head) if CODED else 1.0, sinks, gate, token * s_sinks + of_head,
        token[:, None] * s_gate + (of_head * D)[:, None] + rd[None, :], inside, SINKS, GATE,
    )  # fmt: skip
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)
