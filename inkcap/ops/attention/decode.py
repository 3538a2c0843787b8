"""Attention of few queries over many keys: the keys of a tile of rows are split over programs, whose sums are combined.

Reads each key and value once for up to 64 rows: the floor is 2 * 2 * D bytes a key and kv head over the memory's rate.
Splits are of two kinds, since tiles with bias take longer: `fars` programs share the tiles beyond the bias, `nears` the
others and this step's keys. What a program does follows from its sequence's own length: where that is far below what
the launch was planned for, the last ones of each kind have nothing to do.
"""

import triton
import triton.language as tl

from inkcap.ops import pdl
from inkcap.ops.attention.tile import (
    HIDDEN,
    LOG2E,
    bank,
    decoded,
    far_pages,
    far_words,
    finish,
    fold,
    growth,
    near_own,
    near_pages,
    paged,
    sequence_of,
)


@triton.jit
def shares(
    first, offset, count, fars, nears,
    ONE: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, NN: tl.constexpr, EXTENT: tl.constexpr,
    WINDOW: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """How the tiles of the queries from `offset` on are split, from numbers both kernels have.

    Returns low (oldest position the first query sees), tiles of BN keys 0 .. far_end of pages without bias, tiles of NN
    keys begin .. end with it, own tiles of NN keys own_begin .. own_end, and tiles a program: far, near.
    """
    position = first + offset
    low = 0
    own_begin = 0
    if WINDOW > 0:
        low = tl.maximum(position - WINDOW + 1, 0)
        own_begin = tl.maximum(offset - WINDOW + 1, 0) // NN
    begin = tl.minimum(low, first) // NN
    end = tl.cdiv(first, NN)
    far_end = 0
    far = 1
    if FAR:
        far_end = tl.minimum(tl.maximum(position - EXTENT + 1, 0), first) // BN  # whole pages
        far = tl.maximum(tl.cdiv(far_end, fars), 1)
        begin = far_end * (BN // NN)
    own_end = own_begin
    if not ONE:
        own_end = tl.cdiv(tl.minimum(offset + BQ, count), NN)
    near = tl.maximum(tl.cdiv(end - begin + own_end - own_begin, nears), 1)
    return low, far_end, begin, end, own_begin, own_end, far, near


@triton.jit(do_not_specialize=["sequences", "most", "fars", "nears"])
def split_kernel(
    q, k, v, r, bias, k_plane, v_plane, table, starts, rows, first_of, sums, tops,
    sequences, most, fars, nears, scale, floor, alpha, s_k, s_r, s_block, s_token, s_head, s_table,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, STATES: tl.constexpr, SP: tl.constexpr,
    EXTENT: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
    ONE: tl.constexpr, RP: tl.constexpr, BM: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, NN: tl.constexpr,
    WIDTH: tl.constexpr,
    FAR: tl.constexpr, EARLY: tl.constexpr, WORDS: tl.constexpr, NATIVE: tl.constexpr,
    STAGES: tl.constexpr, NEAR_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One split of one kv head of one tile: sums [tile, KV, split, row, D] and tops (maximum, total) of its keys.

    Sequences with more than `most` tokens are left to another kernel. With EARLY no program has more than one tile of
    pages, which it loads before the dependency wait: positions older than this step, complete before this forward.
    """
    G: tl.constexpr = HEADS // KV
    if EARLY:
        pdl.trigger(PDL)
    split = tl.program_id(0)
    head = tl.program_id(1) % KV
    tile = tl.program_id(1) // KV
    rm = tl.arange(0, BM)
    rn = tl.arange(0, BN)
    rj = tl.arange(0, NN)
    rd = tl.arange(0, DP)
    state = tl.arange(0, SP)
    query = rm // G
    if ONE:
        i = tile
        offset = 0
        query = rm * 0
        count = 1
        start = tile
        live = rm < G
    else:
        i = sequence_of(starts, tile, sequences, BQ, RP)
        start = tl.load(starts + i)
        offset = (tile - start // BQ - i) * BQ
        count = tl.load(starts + i + 1) - start
        if (offset >= count) | (count > most):
            pdl.wait(PDL)  # a grid without a wait could be complete before the ones before it
            return
        live = (query < BQ) & (offset + query < count)
    first = tl.load(first_of + i)
    low, far_end, begin, end, own_begin, own_end, far, near = shares(
        first, offset, count, fars, nears, ONE, BQ, BN, NN, EXTENT, WINDOW, FAR
    )  # fmt: skip
    position = first + offset
    pages = table + tl.load(rows + i).to(tl.int64) * s_table
    k_plane += head * s_head
    v_plane += head * s_head
    acc = tl.zeros([BM, DP], tl.float32)
    top = tl.full([BM], HIDDEN, tl.float32)
    total = tl.zeros([BM], tl.float32)

    token = (start + offset + query).to(tl.int64)
    of_head = head * G + rm % G
    q_at = (token * HEADS + of_head)[:, None] * D + rd[None, :]
    r_at = token[:, None] * s_r + (of_head * STATES)[:, None] + state[None, :]
    inside = live[:, None] & (rd < D)[None, :]
    stated = live[:, None] & (state < STATES)[None, :]
    grown = tl.full([BM], LOG2E, tl.float32)
    if SCALED:
        grown = grown * growth(position + query, floor, alpha)
    if EARLY:
        t = tl.minimum(begin + split, tl.maximum(end - 1, 0))
        high = tl.where(begin + split < end, first, 0)  # a program without a tile reads nothing
        old_k, old_v = paged(
            k_plane, v_plane, pages, t, low, high, rn, rd, s_block, s_token, D, DP, BLOCK, BN, True
        )  # fmt: skip
        at = t * BN + rn
        columns = bank(bias, position - at, state, STATES, EXTENT)
        pdl.wait(PDL)
        rows_q = tl.load(q + q_at, mask=inside, other=0.0)
        rows_r = tl.load(r + r_at, mask=stated, other=0.0)
        old_k, old_v = decoded(old_k, rows_q.dtype, NATIVE), decoded(old_v, rows_q.dtype, NATIVE)
        z = tl.dot(rows_q, tl.trans(old_k), input_precision="ieee") * (scale * LOG2E)
        z += tl.dot(rows_r, columns, input_precision="ieee").to(r.dtype.element_ty).to(tl.float32) * grown[:, None]
        seen = (at >= low) & (at < high)
        acc, top, total = fold(tl.where(seen[None, :], z, HIDDEN), old_v, acc, top, total)
        if begin + split >= end:
            total = tl.zeros([BM], tl.float32)
            acc = tl.zeros([BM, DP], tl.float32)
    else:
        pdl.wait(PDL)
        rows_q = tl.load(q + q_at, mask=inside, other=0.0)
        if FAR and WORDS:
            if split < fars:  # has sums of its own, by even and odd channels, and nothing else to do
                word = tl.arange(0, DP // 2)
                half = (token * HEADS + of_head)[:, None] * D + 2 * word[None, :]
                there = live[:, None] & (word >= 0)[None, :]
                q_first = tl.load(q + half, mask=there, other=0.0)
                q_second = tl.load(q + half + 1, mask=there, other=0.0)
                even = tl.zeros([BM, DP // 2], tl.float32)
                odd = tl.zeros([BM, DP // 2], tl.float32)
                even, odd, top, total = far_words(
                    even, odd, q_first, q_second, top, total,
                    k_plane.to(tl.pointer_type(tl.int16)), v_plane.to(tl.pointer_type(tl.int16)), pages,
                    split * far, tl.minimum(split * far + far, far_end),
                    rn, word, s_block // 2, s_token // 2, scale * LOG2E, BLOCK, BN, NATIVE, STAGES,
                )  # fmt: skip
                pdl.trigger(PDL)
                part = (tl.program_id(1) * (fars + nears) + split).to(tl.int64) * (BQ * G) + rm
                tl.store(sums + part[:, None] * D + 2 * word[None, :], even, mask=there)
                tl.store(sums + part[:, None] * D + 2 * word[None, :] + 1, odd, mask=there)
                tl.store(tops + part * 2, top, mask=live)
                tl.store(tops + part * 2 + 1, total, mask=live)
                return
        elif FAR:  # noqa: SIM102  a constant
            if split < fars:
                acc, top, total = far_pages(
                    rows_q, acc, top, total, k_plane, v_plane, pages,
                    split * far, tl.minimum(split * far + far, far_end),
                    rn, rd, s_block, s_token, scale * LOG2E, D, DP, BLOCK, BN, NATIVE,
                    STAGES,
                )  # fmt: skip
        if split >= fars:
            rows_r = tl.load(r + r_at, mask=stated, other=0.0)  # here, so as to take no shared memory above
            here = begin + (split - fars) * near  # counted on through the tiles of this step
            acc, top, total = near_pages(
                rows_q, rows_r, grown, acc, top, total, k_plane, v_plane, pages, bias,
                here, tl.minimum(here + near, end), low, first, position, query, rj, rd, state,
                s_block, s_token, scale * LOG2E,
                D, DP, BLOCK, NN, STATES, EXTENT, WINDOW, ONE, WIDTH, SP, 0, 0, NATIVE, NEAR_STAGES,
            )  # fmt: skip
            if not ONE:
                mine = tl.maximum(here - end, 0) + own_begin
                acc, top, total = near_own(
                    rows_q, rows_r, grown, acc, top, total,
                    k + start.to(tl.int64) * s_k + head * D, v + start.to(tl.int64) * s_k + head * D, bias,
                    mine, tl.minimum(here + near - end + own_begin, own_end), count, offset, query,
                    rj, rd, state, s_k, scale * LOG2E, D, DP, NN, STATES, EXTENT, WINDOW, WIDTH, SP, 0, 0, NEAR_STAGES,
                )  # fmt: skip
        pdl.trigger(PDL)
    if ONE:  # noqa: SIM102  a constant
        if split == fars:  # the query's own key
            own_at = start.to(tl.int64) * s_k + head * D + rd
            own_k = tl.load(k + own_at, mask=rd < D, other=0.0).to(tl.float32)
            own_v = tl.load(v + own_at, mask=rd < D, other=0.0).to(tl.float32)
            own_r = tl.load(r + r_at, mask=stated, other=0.0).to(tl.float32)
            nearest = tl.load(bias + state * EXTENT, mask=state < STATES, other=0.0).to(tl.float32)
            b = tl.sum(own_r * nearest[None, :], 1).to(r.dtype.element_ty).to(tl.float32)
            logit = tl.sum(rows_q.to(tl.float32) * own_k[None, :], 1) * (scale * LOG2E) + b * grown
            higher = tl.maximum(top, logit)
            p = tl.exp2(logit - higher)
            shrink = tl.exp2(top - higher)
            total = total * shrink + p
            acc = acc * shrink[:, None] + p[:, None] * own_v[None, :]
            top = higher
    part = (tl.program_id(1) * (fars + nears) + split).to(tl.int64) * (BQ * G) + rm
    tl.store(sums + part[:, None] * D + rd[None, :], acc, mask=inside)
    tl.store(tops + part * 2, top, mask=live)
    tl.store(tops + part * 2 + 1, total, mask=live)


@triton.jit(do_not_specialize=["sequences", "most", "fars", "nears"])
def combine_kernel(
    sums, tops, out, sinks, gate, v_scale, starts, first_of, sequences, most, fars, nears, s_sinks, s_gate,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, EXTENT: tl.constexpr, WINDOW: tl.constexpr,
    ONE: tl.constexpr, RP: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, NN: tl.constexpr,
    FAR: tl.constexpr, SPLITS: tl.constexpr, CHANNELS: tl.constexpr,
    SINKS: tl.constexpr, GATE: tl.constexpr, CODED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The splits of one query's head, CHANNELS of its D channels."""
    G: tl.constexpr = HEADS // KV
    pdl.trigger(PDL)
    tile = tl.program_id(0) // BQ
    query = tl.program_id(0) % BQ
    head = tl.program_id(1)
    if ONE:
        i = tile
        start = tile
        offset = 0
        count = 1
    else:
        i = sequence_of(starts, tile, sequences, BQ, RP)
        start = tl.load(starts + i)
        offset = (tile - start // BQ - i) * BQ
        count = tl.load(starts + i + 1) - start
        if (offset + query >= count) | (count > most):
            pdl.wait(PDL)
            return
    _, far_end, begin, end, own_begin, own_end, far, near = shares(
        tl.load(first_of + i), offset, count, fars, nears, ONE, BQ, BN, NN, EXTENT, WINDOW, FAR
    )  # fmt: skip
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    split = tl.arange(0, SPLITS)
    near_splits = tl.maximum(tl.cdiv(end - begin + own_end - own_begin, near), 1)
    used = (split >= fars) & (split < fars + near_splits)
    if FAR:
        used = used | (split < tl.cdiv(far_end, far))
    scale = tl.load(v_scale + head // G) if CODED else 1.0
    part = ((tile * KV + head // G) * (fars + nears) + split).to(tl.int64) * (BQ * G) + query * G + head % G
    pdl.wait(PDL)
    top = tl.load(tops + part * 2, mask=used, other=HIDDEN)
    total = tl.load(tops + part * 2 + 1, mask=used, other=0.0)
    acc = tl.load(
        sums + part[:, None] * D + channel[None, :], mask=used[:, None] & (channel < D)[None, :], other=0.0
    )  # fmt: skip
    highest = tl.max(top, 0)
    weight = tl.exp2(top - highest)
    token = (start + offset + query).to(tl.int64)
    one = tl.arange(0, 1)
    inside = (one == 0)[:, None] & (channel < D)[None, :]
    y = finish(
        tl.sum(acc * weight[:, None], 0)[None, :], highest + tl.zeros([1], tl.float32),
        tl.sum(total * weight, 0) + tl.zeros([1], tl.float32), scale,
        sinks, gate, token * s_sinks + head + one, token * s_gate + head * D + channel[None, :], inside, SINKS, GATE,
    )  # fmt: skip
    tl.store(out + (token * HEADS + head) * D + channel[None, :], y.to(out.dtype.element_ty), mask=inside)
