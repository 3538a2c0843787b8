"""One query a sequence with clipped heads: the conditioning of attn_prep and the splits over keys in one launch.

Every program clips the queries of its kv head for itself; the first of a head convolves and keeps the new key and
value, and counts them. Only where a program has at most one tile of pages, which it loads before the dependency wait.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.attention import splits
from inkcap.ops.attention.decode import combine_kernel
from inkcap.ops.attention.ref import attend_clipped
from inkcap.ops.attention.tile import HIDDEN, LOG2E, bank, fold, paged
from inkcap.ops.attention.triton import padded
from inkcap.ops.attn_prep.device import growth, keep, new_taps, old_taps
from inkcap.ops.attn_prep.triton import check, clip_factor, growth_of
from inkcap.ops.values import ClipWeights, GroupView, LogScaling, Packing, Scores


@triton.jit
def clipped(x, scale, limit, factor, SCALED: tl.constexpr):
    """Rows [BM, N] after their scale, at most `limit` long, then grown; rounded after each as in the reference."""
    kind = x.dtype
    y = x.to(tl.float32) * scale.to(tl.float32)
    y = (y * clip_factor(y, limit)).to(kind)
    if SCALED:
        y = (y.to(tl.float32) * factor).to(kind)
    return y


@triton.jit(do_not_specialize=["nears"])
def clipped_kernel(
    q, k, v, r, bias, q_scale, r_scale, k_taps, v_taps, k_added, v_added,
    k_past, v_past, conv_table, conv_slots, k_plane, v_plane, table, kv_slots, rows, row_of, positions, sums, tops,
    nears, scale, conv_scale, qk_limit, r_limit, eps, floor, alpha,
    s_q, s_k, s_v, s_r, s_conv_block, s_conv_token, s_conv_table, s_tap, s_back, s_k_added, s_v_added,
    s_block, s_token, s_head, s_table,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, STATES: tl.constexpr, SP: tl.constexpr,
    EXTENT: tl.constexpr, WINDOW: tl.constexpr, W: tl.constexpr, CONV_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr, ADDED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One split of one kv head of one sequence: sums [sequence, KV, split, row, D] and tops, as `split_kernel`."""
    pdl.trigger(PDL)
    G: tl.constexpr = HEADS // KV
    split = tl.program_id(0)
    head = tl.program_id(1) % KV
    i = tl.program_id(1) // KV
    rm, rn, rd, state = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, DP), tl.arange(0, SP)
    live, held = rm < G, rd < D
    of_head = head * G + rm % G
    inside, stated = live[:, None] & held[None, :], live[:, None] & (state < STATES)[None, :]
    token = i + tl.arange(0, 1)
    position = tl.load(positions + token).to(tl.int32)
    first = tl.sum(position, 0)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0)
    tile = tl.minimum(low, first) // BN + split
    end = tl.cdiv(first, BN)
    t = tl.minimum(tile, tl.maximum(end - 1, 0))
    high = tl.where(tile < end, first, 0)  # a program without a tile reads nothing
    k_plane += head * s_head
    v_plane += head * s_head
    pages = table + tl.load(rows + i).to(tl.int64) * s_table
    old_k, old_v = paged(k_plane, v_plane, pages, t, low, high, rn, rd, s_block, s_token, D, DP, BLOCK, BN, True)
    at = t * BN + rn
    columns = bank(bias, first - at, state, STATES, EXTENT)
    own_q_scale = tl.load(q_scale + (of_head * D)[:, None] + rd[None, :], mask=inside, other=0.0)
    own_r_scale = tl.load(r_scale + (of_head * STATES)[:, None] + state[None, :], mask=stated, other=0.0)
    channel, all_live, row = head * D + rd, token >= 0, tl.load(row_of + token)
    k_total = tl.zeros([1, DP], tl.float32)
    v_total = tl.zeros([1, DP], tl.float32)
    if split == 0:
        k_total = old_taps(
            k_past, conv_table, k_taps, row_of, positions, token, all_live, row, position, channel, held,
            s_conv_block, s_conv_token, s_conv_table, s_tap, s_back, W, CONV_BLOCK,
        )  # fmt: skip
        v_total = old_taps(
            v_past, conv_table, v_taps, row_of, positions, token, all_live, row, position, channel, held,
            s_conv_block, s_conv_token, s_conv_table, s_tap, s_back, W, CONV_BLOCK,
        )  # fmt: skip
    pdl.wait(PDL)
    factor = growth(first, floor, alpha)
    x = tl.load(q + i.to(tl.int64) * s_q + (of_head * D)[:, None] + rd[None, :], mask=inside, other=0.0)
    rows_q = clipped(x, own_q_scale, qk_limit, factor, SCALED)
    x = tl.load(r + i.to(tl.int64) * s_r + (of_head * STATES)[:, None] + state[None, :], mask=stated, other=0.0)
    rows_r = clipped(x, own_r_scale, r_limit, factor, SCALED)
    acc = tl.zeros([BM, DP], tl.float32)
    top = tl.full([BM], HIDDEN, tl.float32)
    total = tl.zeros([BM], tl.float32)
    kind = q.dtype.element_ty
    z = tl.dot(rows_q, tl.trans(old_k), input_precision="ieee") * (scale * LOG2E)
    z += tl.dot(rows_r, columns, input_precision="ieee").to(kind).to(tl.float32) * LOG2E
    seen = (at >= low) & (at < high)
    acc, top, total = fold(tl.where(seen[None, :], z, HIDDEN), old_v, acc, top, total)
    if tile >= end:
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, DP], tl.float32)
    if split == 0:
        y, here = new_taps(
            k, k_total, k_past, conv_table, k_taps, k_added + head * W, row_of, positions, token, all_live, row,
            position, channel, held, s_k, s_conv_block, s_conv_token, s_conv_table, s_tap, s_back, s_k_added,
            conv_scale, W, CONV_BLOCK, ADDED,
        )  # fmt: skip
        keep(k_past, conv_slots, here, token, all_live, channel, held, s_conv_block, s_conv_token, CONV_BLOCK)
        own_k = (y * clip_factor(y, qk_limit)).to(kind)
        keep(k_plane, kv_slots, own_k, token, all_live, rd, held, s_block, s_token, BLOCK)
        y, here = new_taps(
            v, v_total, v_past, conv_table, v_taps, v_added + head * W, row_of, positions, token, all_live, row,
            position, channel, held, s_v, s_conv_block, s_conv_token, s_conv_table, s_tap, s_back, s_v_added,
            conv_scale, W, CONV_BLOCK, ADDED,
        )  # fmt: skip
        keep(v_past, conv_slots, here, token, all_live, channel, held, s_conv_block, s_conv_token, CONV_BLOCK)
        own_v = (y * tl.rsqrt(tl.sum(y * y, 1) / D + eps)[:, None]).to(kind)
        keep(v_plane, kv_slots, own_v, token, all_live, rd, held, s_block, s_token, BLOCK)
        nearest = tl.load(bias + state * EXTENT, mask=state < STATES, other=0.0).to(tl.float32)
        b = tl.sum(rows_r.to(tl.float32) * nearest[None, :], 1).to(kind).to(tl.float32)
        logit = tl.sum(rows_q.to(tl.float32) * own_k.to(tl.float32), 1) * (scale * LOG2E) + b * LOG2E
        higher = tl.maximum(top, logit)
        p = tl.exp2(logit - higher)
        shrink = tl.exp2(top - higher)
        total = total * shrink + p
        acc = acc * shrink[:, None] + p[:, None] * own_v.to(tl.float32)
        top = higher
    part = (tl.program_id(1) * nears + split).to(tl.int64) * G + rm
    tl.store(sums + part[:, None] * D + rd[None, :], acc, mask=inside)
    tl.store(tops + part * 2, top, mask=live)
    tl.store(tops + part * 2 + 1, total, mask=live)


@attend_clipped.implement("triton", when=lambda device: device.type == "cuda")
def attend_clipped_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    weights: ClipWeights,
    scaling: LogScaling | None,
    scores: Scores,
    conv: GroupView,
    kv: GroupView,
    packing: Packing,
    sinks: Tensor,
    gate: Tensor,
    k_added: Tensor | None = None,
    v_added: Tensor | None = None,
) -> Tensor:
    """`attend_clipped` of the reference, whose two ops run one after the other where a sequence has several tokens or
    more pages than programs."""
    (heads, size), (states, extent), tokens = weights.q_scale.shape, scores.bias.shape, len(q)
    kv_heads = k.shape[1] // size
    plan = splits.plan(
        tokens, len(packing.rows), packing.widest, packing.reach, heads // kv_heads, kv_heads, extent, scores.window
    )  # fmt: skip
    one_tile = plan.far == 0 and plan.near >= splits.all_tiles(packing.reach, scores.window)
    if packing.widest > 1 or not one_tile:
        return attend_clipped.reference(
            q, k, v, r, weights, scaling, scores, conv, kv, packing, sinks, gate, k_added, v_added
        )
    check(weights, conv, kv, q, k, v, r)
    added = (weights.k_taps, weights.v_taps) if k_added is None or v_added is None else (k_added, v_added)
    on, out = pdl.supported(q.device), q.new_empty(tokens, heads * size)
    sums = torch.empty(tokens * plan.near * heads, size, dtype=torch.float32, device=q.device)
    tops = torch.empty(tokens * plan.near * heads, 2, dtype=torch.float32, device=q.device)
    window = scores.window or 0
    clipped_kernel[(plan.near, tokens * kv_heads)](
        q, k, v, r, scores.bias, weights.q_scale, weights.r_scale, weights.k_taps, weights.v_taps, *added,
        *conv.planes[:2], conv.table, conv.slots, *kv.planes[:2], kv.table, kv.slots,
        packing.rows, packing.row_of, packing.positions, sums, tops,
        plan.near, scores.scale, weights.conv_scale, weights.qk_limit, weights.r_limit, weights.eps,
        *growth_of(scaling), q.stride(0), k.stride(0), v.stride(0), r.stride(0),
        *conv.planes[0].stride()[:2], conv.table.stride(0), *weights.k_taps.stride(),
        added[0].stride(0), added[1].stride(0), *kv.planes[0].stride()[:3], kv.table.stride(0),
        heads, kv_heads, size, padded(size), states, padded(states), extent, window,
        weights.k_taps.shape[1], conv.block, kv.block, scaling is not None, k_added is not None,
        plan.rows, splits.KEYS, on,
        num_warps=4, **pdl.launch(on),
    )  # fmt: skip
    channels = splits.channels(plan.total, padded(size))
    combine_kernel[(tokens, heads, triton.cdiv(size, channels))](
        sums, tops, out, sinks, gate, packing.starts, packing.first,
        tokens, 1, 0, plan.near, sinks.stride(0), gate.stride(0),
        heads, kv_heads, size, extent, window, True, 1, 1, splits.KEYS, splits.KEYS,
        False, triton.next_power_of_2(plan.total), channels, True, True, on,
        num_warps=4, **pdl.launch(on),
    )  # fmt: skip
    return out
