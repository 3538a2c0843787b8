"""Conditioning of heads in one launch: convolutions with state insert, norms or clips, log scaling, cache write.

One program has a few tokens of one head of q, k, v or r. It moves 2 bytes in and out a channel, k and v also W - 1 old
inputs and two stores: latency is all there is at decode. Old inputs and taps load before the dependency wait.
"""

import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.attn_prep.device import convolved, growth, keep, put
from inkcap.ops.attn_prep.ref import attn_prep, attn_prep_clip
from inkcap.ops.values import ClipWeights, GroupView, HeadWeights, LogScaling, Packing


@triton.jit(do_not_specialize=["tokens"])
def rms_heads_kernel(
    q, k, v, q_out, k_out, v_out,
    k_taps, v_taps, q_norm, k_norm,
    k_past, v_past, conv_table, conv_slots,
    k_cache, v_cache, kv_slots,
    row_of, positions, tokens, eps, floor, alpha,
    s_q, s_k, s_v, s_conv_block, s_conv_token, s_conv_table, s_kv_block, s_kv_token, s_kv_head,
    s_tap, s_back,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, W: tl.constexpr,
    CONV_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, SCALED: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Heads 0 .. HEADS are of q, then KV of k, then KV of v. Writes the three outputs and all four planes."""
    pdl.trigger(PDL)
    head = tl.program_id(1)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    live = token < tokens
    dim = tl.arange(0, DP)
    held = dim < D
    position = tl.load(positions + token, mask=live, other=0)
    kind = q.dtype.element_ty
    if head < HEADS:
        weight = tl.load(q_norm + dim, mask=held, other=0.0).to(tl.float32)
        pdl.wait(PDL)
        address = token.to(tl.int64)[:, None] * s_q + (head * D + dim)[None, :]
        x = tl.load(q + address, mask=live[:, None] & held[None, :], other=0.0).to(tl.float32)
        y = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None] * weight[None, :]
        if SCALED:
            y = y.to(kind).to(tl.float32) * growth(position, floor, alpha)[:, None]
        put(q_out, y, token, live, head, dim, held, HEADS, D)
    else:
        if head < HEADS + KV:
            mine = head - HEADS
            channel = mine * D + dim
            weight = tl.load(k_norm + dim, mask=held, other=0.0).to(tl.float32)
            y = convolved(
                k, k_past, conv_table, conv_slots, k_taps, k_taps, row_of, positions, token, live, position,
                channel, held, s_k, s_conv_block, s_conv_token, s_conv_table, s_tap, s_back, 0, 1.0,
                W, CONV_BLOCK, False, PDL,
            )  # fmt: skip
            y = y * tl.rsqrt(tl.sum(y * y, 1) / D + eps)[:, None] * weight[None, :]
            put(k_out, y, token, live, mine, dim, held, KV, D)
            cache = k_cache + mine * s_kv_head
            keep(cache, kv_slots, y.to(kind), token, live, dim, held, s_kv_block, s_kv_token, KV_BLOCK)
        else:
            mine = head - HEADS - KV
            channel = mine * D + dim
            y = convolved(
                v, v_past, conv_table, conv_slots, v_taps, v_taps, row_of, positions, token, live, position,
                channel, held, s_v, s_conv_block, s_conv_token, s_conv_table, s_tap, s_back, 0, 1.0,
                W, CONV_BLOCK, False, PDL,
            )  # fmt: skip
            put(v_out, y, token, live, mine, dim, held, KV, D)
            cache = v_cache + mine * s_kv_head
            keep(cache, kv_slots, y.to(kind), token, live, dim, held, s_kv_block, s_kv_token, KV_BLOCK)


@triton.jit
def clip_factor(x, limit):
    """[BT, 1] factors that bring the rows of x to at most `limit` in length."""
    return tl.minimum(limit / (tl.sqrt(tl.sum(x * x, 1)) + 1e-6), 1.0)[:, None]


@triton.jit(do_not_specialize=["tokens"])
def clip_heads_kernel(
    q, k, v, r, q_out, k_out, v_out, r_out,
    k_taps, v_taps, k_added, v_added, q_scale, r_scale,
    k_past, v_past, conv_table, conv_slots,
    k_cache, v_cache, kv_slots,
    row_of, positions, tokens, eps, conv_scale, qk_limit, r_limit, floor, alpha,
    s_q, s_k, s_v, s_r, s_conv_block, s_conv_token, s_conv_table, s_kv_block, s_kv_token, s_kv_head,
    s_tap, s_back, s_k_added, s_v_added,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, STATES: tl.constexpr, SP: tl.constexpr,
    W: tl.constexpr, CONV_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, SCALED: tl.constexpr, ADDED: tl.constexpr,
    BT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Heads 0 .. HEADS are of q with their relative states, then KV of k, then KV of v."""
    pdl.trigger(PDL)
    head = tl.program_id(1)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    live = token < tokens
    dim = tl.arange(0, DP)
    held = dim < D
    position = tl.load(positions + token, mask=live, other=0)
    kind = q.dtype.element_ty
    if head < HEADS:
        state = tl.arange(0, SP)
        stated = state < STATES
        weight = tl.load(q_scale + head * D + dim, mask=held, other=0.0).to(tl.float32)
        of_state = tl.load(r_scale + head * STATES + state, mask=stated, other=0.0).to(tl.float32)
        pdl.wait(PDL)
        wide = token.to(tl.int64)[:, None]
        x = tl.load(q + wide * s_q + (head * D + dim)[None, :], mask=live[:, None] & held[None, :], other=0.0)
        y = x.to(tl.float32) * weight[None, :]
        y = (y * clip_factor(y, qk_limit)).to(kind).to(tl.float32)
        x = tl.load(r + wide * s_r + (head * STATES + state)[None, :], mask=live[:, None] & stated[None, :], other=0.0)
        z = x.to(tl.float32) * of_state[None, :]
        z = (z * clip_factor(z, r_limit)).to(kind).to(tl.float32)
        if SCALED:
            factor = growth(position, floor, alpha)[:, None]
            y *= factor
            z *= factor
        put(q_out, y, token, live, head, dim, held, HEADS, D)
        put(r_out, z, token, live, head, state, stated, HEADS, STATES)
    else:
        if head < HEADS + KV:
            mine = head - HEADS
            channel = mine * D + dim
            y = convolved(
                k, k_past, conv_table, conv_slots, k_taps, k_added + mine * W, row_of, positions, token, live, position,
                channel, held, s_k, s_conv_block, s_conv_token, s_conv_table, s_tap, s_back, s_k_added, conv_scale,
                W, CONV_BLOCK, ADDED, PDL,
            )  # fmt: skip
            y = y * clip_factor(y, qk_limit)
            put(k_out, y, token, live, mine, dim, held, KV, D)
            cache = k_cache + mine * s_kv_head
            keep(cache, kv_slots, y.to(kind), token, live, dim, held, s_kv_block, s_kv_token, KV_BLOCK)
        else:
            mine = head - HEADS - KV
            channel = mine * D + dim
            y = convolved(
                v, v_past, conv_table, conv_slots, v_taps, v_added + mine * W, row_of, positions, token, live, position,
                channel, held, s_v, s_conv_block, s_conv_token, s_conv_table, s_tap, s_back, s_v_added, conv_scale,
                W, CONV_BLOCK, ADDED, PDL,
            )  # fmt: skip
            y = y * tl.rsqrt(tl.sum(y * y, 1) / D + eps)[:, None]
            put(v_out, y, token, live, mine, dim, held, KV, D)
            cache = v_cache + mine * s_kv_head
            keep(cache, kv_slots, y.to(kind), token, live, dim, held, s_kv_block, s_kv_token, KV_BLOCK)


def tile(tokens: int) -> tuple[int, int]:
    """Tokens and warps of a program: at decode as many programs as there are, else 8 elements a thread."""
    return (1, 1) if tokens <= 64 else (16, 4)


def check(weights: HeadWeights | ClipWeights, conv: GroupView, kv: GroupView, *tensors: Tensor) -> None:
    """What the kernels take for granted."""
    k_taps, v_taps = weights.k_taps.stride(), weights.v_taps.stride()
    assert k_taps == v_taps, f"taps of k and v have strides {k_taps} and {v_taps}; the kernel needs equal ones"
    for view, count in ((conv, 2), (kv, 2)):
        first, second = view.planes[:count]
        assert first.stride() == second.stride(), f"planes of k and v have strides {first.stride()}, {second.stride()}"
        assert first.stride(-1) == 1, f"a plane has stride {first.stride(-1)} between channels; the kernel needs 1"
        assert view.table.stride(1) == 1, f"a block table has stride {view.table.stride(1)} between blocks"
    for each in tensors:
        assert each.stride(1) == 1, f"a projection has stride {each.stride(1)} between channels; the kernel needs 1"


@attn_prep.implement("triton", when=lambda device: device.type == "cuda")
def attn_prep_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: HeadWeights,
    conv: GroupView,
    kv: GroupView,
    packing: Packing,
    scaling: LogScaling | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attn_prep` of the reference, same rounding points; scaling by 1 is applied where nothing is to be scaled."""
    size, tokens = len(weights.q_norm), len(q)
    heads, kv_heads = q.shape[1] // size, k.shape[1] // size
    check(weights, conv, kv, q, k, v)
    q_out = q.new_empty(tokens, heads, size)
    k_out, v_out = k.new_empty(tokens, kv_heads, size), v.new_empty(tokens, kv_heads, size)
    bt, warps = tile(tokens)
    on = pdl.supported(q.device)
    rms_heads_kernel[(triton.cdiv(tokens, bt), heads + 2 * kv_heads)](
        q, k, v, q_out, k_out, v_out,
        weights.k_taps, weights.v_taps, weights.q_norm, weights.k_norm,
        *conv.planes[:2], conv.table, conv.slots, *kv.planes[:2], kv.slots,
        packing.row_of, packing.positions, tokens, weights.eps, *growth_of(scaling),
        q.stride(0), k.stride(0), v.stride(0), *conv.planes[0].stride()[:2], conv.table.stride(0),
        *kv.planes[0].stride()[:3], *weights.k_taps.stride(),
        heads, kv_heads, size, triton.next_power_of_2(size), weights.k_taps.shape[1], conv.block, kv.block,
        scaling is not None, bt, on,
        num_warps=warps, **pdl.launch(on),
    )  # fmt: skip
    return q_out, k_out, v_out


@attn_prep_clip.implement("triton", when=lambda device: device.type == "cuda")
def attn_prep_clip_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    weights: ClipWeights,
    conv: GroupView,
    kv: GroupView,
    packing: Packing,
    scaling: LogScaling | None,
    k_added: Tensor | None = None,
    v_added: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`attn_prep_clip` of the reference, same rounding points; both or neither of the convolutions have added taps."""
    (heads, size), states, tokens = weights.q_scale.shape, weights.r_scale.shape[1], len(q)
    kv_heads = k.shape[1] // size
    check(weights, conv, kv, q, k, v, r)
    assert (k_added is None) == (v_added is None), "taps are added to one of the two convolutions only"
    q_out, r_out = q.new_empty(tokens, heads, size), r.new_empty(tokens, heads, states)
    k_out, v_out = k.new_empty(tokens, kv_heads, size), v.new_empty(tokens, kv_heads, size)
    added = [weights.k_taps, weights.v_taps]
    if k_added is not None and v_added is not None:
        added = [k_added, v_added]
        for each in added:
            assert each.stride()[1:] == (each.shape[2], 1), f"added taps have strides {each.stride()}"
    bt, warps = tile(tokens)
    on = pdl.supported(q.device)
    clip_heads_kernel[(triton.cdiv(tokens, bt), heads + 2 * kv_heads)](
        q, k, v, r, q_out, k_out, v_out, r_out,
        weights.k_taps, weights.v_taps, *added, weights.q_scale, weights.r_scale,
        *conv.planes[:2], conv.table, conv.slots, *kv.planes[:2], kv.slots,
        packing.row_of, packing.positions, tokens, weights.eps, weights.conv_scale, weights.qk_limit, weights.r_limit,
        *growth_of(scaling),
        q.stride(0), k.stride(0), v.stride(0), r.stride(0), *conv.planes[0].stride()[:2], conv.table.stride(0),
        *kv.planes[0].stride()[:3], *weights.k_taps.stride(), added[0].stride(0), added[1].stride(0),
        heads, kv_heads, size, triton.next_power_of_2(size), states, triton.next_power_of_2(states),
        weights.k_taps.shape[1], conv.block, kv.block, scaling is not None, k_added is not None, bt, on,
        num_warps=warps, **pdl.launch(on),
    )  # fmt: skip
    return q_out, k_out, v_out, r_out


def growth_of(scaling: LogScaling | None) -> tuple[float, float]:
    """Arguments of `growth`."""
    return (1.0, 0.0) if scaling is None else (float(scaling.floor), float(scaling.alpha))
