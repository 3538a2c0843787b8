"""Conditioning of heads in one launch: convolutions with state insert, norms or clips, log scaling, cache write.

One program has a few tokens of one head of q, k, v or r. It moves 2 bytes in and out a channel, k and v also W - 1 old
inputs and two stores: latency is all there is at decode. Old inputs and taps load before the dependency wait.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.attn_prep.device import convolved, growth, put, settle
from inkcap.ops.attn_prep.ref import attn_prep, attn_prep_clip
from inkcap.ops.values import ClipWeights, GroupView, HeadWeights, LogScaling, Packing


@triton.jit(do_not_specialize=["tokens"])
def rms_heads_kernel(
    q, k, v, q_out, k_out, v_out,
    k_taps, v_taps, q_norm, k_norm,
    k_past, v_past, conv_table, conv_slots,
    k_cache, v_cache, kv_slots, k_codes, v_codes,
    row_of, positions, tokens, eps, floor, alpha,
    s_q, s_k, s_v, s_conv_block, s_conv_token, s_conv_table, s_kv_block, s_kv_token, s_kv_head,
    s_tap, s_back,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, W: tl.constexpr,
    CONV_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, SCALED: tl.constexpr, CODED: tl.constexpr,
    BT: tl.constexpr, PDL: tl.constexpr,
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
        scale = tl.load(k_codes + head // (HEADS // KV)) if CODED else 1.0
        pdl.wait(PDL)
        address = token.to(tl.int64)[:, None] * s_q + (head * D + dim)[None, :]
        x = tl.load(q + address, mask=live[:, None] & held[None, :], other=0.0).to(tl.float32)
        y = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None] * weight[None, :]
        if SCALED:
            y = y.to(kind).to(tl.float32) * growth(position, floor, alpha)[:, None]
        if CODED:
            y = y.to(kind).to(tl.float32) * scale
        put(q_out, y, token, live, head, dim, held, HEADS, D)
    else:
        slot = tl.load(kv_slots + token, mask=live, other=-1)
        if head < HEADS + KV:
            mine = head - HEADS
            scale = tl.load(k_codes + mine) if CODED else 1.0
            channel = mine * D + dim
            weight = tl.load(k_norm + dim, mask=held, other=0.0).to(tl.float32)
            y = convolved(
                k, k_past, conv_table, conv_slots, k_taps, k_taps, row_of, positions, token, live, position,
                channel, held, s_k, s_conv_block, s_conv_token, s_conv_table, s_tap, s_back, 0, 1.0,
                W, CONV_BLOCK, False, PDL,
            )  # fmt: skip
            y = y * tl.rsqrt(tl.sum(y * y, 1) / D + eps)[:, None] * weight[None, :]
            settle(
                k_out, k_cache + mine * s_kv_head, slot, y, scale, token, live, mine, dim, held,
                s_kv_block, s_kv_token, KV, D, KV_BLOCK, kind, CODED,
            )  # fmt: skip
        else:
            mine = head - HEADS - KV
            scale = tl.load(v_codes + mine) if CODED else 1.0
            channel = mine * D + dim
            y = convolved(
                v, v_past, conv_table, conv_slots, v_taps, v_taps, row_of, positions, token, live, position,
                channel, held, s_v, s_conv_block, s_conv_token, s_conv_table, s_tap, s_back, 0, 1.0,
                W, CONV_BLOCK, False, PDL,
            )  # fmt: skip
            settle(
                v_out, v_cache + mine * s_kv_head, slot, y, scale, token, live, mine, dim, held,
                s_kv_block, s_kv_token, KV, D, KV_BLOCK, kind, CODED,
            )  # fmt: skip


@triton.jit
def clip_factor(x, limit):
    """[BT, 1] factors that bring the rows of x to at most `limit` in length."""
    return tl.minimum(limit / (tl.sqrt(tl.sum(x * x, 1)) + 1e-6), 1.0)[:, None]


@triton.jit(do_not_specialize=["tokens"])
def clip_heads_kernel(
    q, k, v, r, q_out, k_out, v_out, r_out,
    k_taps, v_taps, k_added, v_added, q_scale, r_scale,
    k_past, v_past, conv_table, conv_slots,
    k_cache, v_cache, kv_slots, k_codes, v_codes,
    row_of, positions, tokens, eps, conv_scale, qk_limit, r_limit, floor, alpha,
    s_q, s_k, s_v, s_r, s_conv_block, s_conv_token, s_conv_table, s_kv_block, s_kv_token, s_kv_head,
    s_tap, s_back, s_k_added, s_v_added,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, STATES: tl.constexpr, SP: tl.constexpr,
    W: tl.constexpr, CONV_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, SCALED: tl.constexpr, ADDED: tl.constexpr,
    CODED: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr,
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
        scale = tl.load(k_codes + head // (HEADS // KV)) if CODED else 1.0
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
        if CODED:
            y = y.to(kind).to(tl.float32) * scale
        put(q_out, y, token, live, head, dim, held, HEADS, D)
        put(r_out, z, token, live, head, state, stated, HEADS, STATES)
    else:
        slot = tl.load(kv_slots + token, mask=live, other=-1)
        if head < HEADS + KV:
            mine = head - HEADS
            scale = tl.load(k_codes + mine) if CODED else 1.0
            channel = mine * D + dim
            y = convolved(
                k, k_past, conv_table, conv_slots, k_taps, k_added + mine * W, row_of, positions, token, live, position,
                channel, held, s_k, s_conv_block, s_conv_token, s_conv_table, s_tap, s_back, s_k_added, conv_scale,
                W, CONV_BLOCK, ADDED, PDL,
            )  # fmt: skip
            y = y * clip_factor(y, qk_limit)
            settle(
                k_out, k_cache + mine * s_kv_head, slot, y, scale, token, live, mine, dim, held,
                s_kv_block, s_kv_token, KV, D, KV_BLOCK, kind, CODED,
            )  # fmt: skip
        else:
            mine = head - HEADS - KV
            scale = tl.load(v_codes + mine) if CODED else 1.0
            channel = mine * D + dim
            y = convolved(
                v, v_past, conv_table, conv_slots, v_taps, v_added + mine * W, row_of, positions, token, live, position,
                channel, held, s_v, s_conv_block, s_conv_token, s_conv_table, s_tap, s_back, s_v_added, conv_scale,
                W, CONV_BLOCK, ADDED, PDL,
            )  # fmt: skip
            y = y * tl.rsqrt(tl.sum(y * y, 1) / D + eps)[:, None]
            settle(
                v_out, v_cache + mine * s_kv_head, slot, y, scale, token, live, mine, dim, held,
                s_kv_block, s_kv_token, KV, D, KV_BLOCK, kind, CODED,
            )  # fmt: skip


ALONE = (1, 1)  # tokens and warps of a program: as many programs as there are tokens


def tile(tokens: int) -> tuple[int, int]:
    """Tokens and warps of a program: at decode as many programs as there are, else 8 elements a thread."""
    return ALONE if tokens <= 64 else (16, 4)


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


def rms_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: HeadWeights,
    conv: GroupView,
    kv: GroupView,
    packing: Packing,
    scaling: LogScaling | None,
    cut: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch `rms_heads_kernel` with tokens and warps of a program as in `cut`."""
    size, tokens = len(weights.q_norm), len(q)
    heads, kv_heads = q.shape[1] // size, k.shape[1] // size
    check(weights, conv, kv, q, k, v)
    codes, planes, kind = coded(weights, kv, q.dtype)
    q_out = q.new_empty(tokens, heads, size, dtype=kind)
    k_out, v_out = (x.new_empty(tokens, kv_heads, size, dtype=kind) for x in (k, v))
    (bt, warps), on = cut, pdl.supported(q.device)
    rms_heads_kernel[(triton.cdiv(tokens, bt), heads + 2 * kv_heads)](
        q, k, v, q_out, k_out, v_out,
        weights.k_taps, weights.v_taps, weights.q_norm, weights.k_norm,
        *conv.planes[:2], conv.table, conv.slots, *planes, kv.slots, *codes,
        packing.row_of, packing.positions, tokens, weights.eps, *growth_of(scaling),
        q.stride(0), k.stride(0), v.stride(0), *conv.planes[0].stride()[:2], conv.table.stride(0),
        *planes[0].stride()[:3], *weights.k_taps.stride(),
        heads, kv_heads, size, triton.next_power_of_2(size), weights.k_taps.shape[1], conv.block, kv.block,
        scaling is not None, weights.codes is not None, bt, on,
        num_warps=warps, **pdl.launch(on),
    )  # fmt: skip
    return q_out, k_out, v_out


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
    return rms_heads(q, k, v, weights, conv, kv, packing, scaling, tile(len(q)))


@attn_prep.implement("fixed", when=lambda device: device.type == "cuda", spare=True)
def attn_prep_fixed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: HeadWeights,
    conv: GroupView,
    kv: GroupView,
    packing: Packing,
    scaling: LogScaling | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attn_prep_triton` with the same sums for any number of tokens."""
    return rms_heads(q, k, v, weights, conv, kv, packing, scaling, ALONE)


def clip_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    weights: ClipWeights,
    conv: GroupView,
    kv: GroupView,
    packing: Packing,
    scaling: LogScaling | None,
    k_added: Tensor | None,
    v_added: Tensor | None,
    cut: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch `clip_heads_kernel` with tokens and warps of a program as in `cut`."""
    (heads, size), states, tokens = weights.q_scale.shape, weights.r_scale.shape[1], len(q)
    kv_heads = k.shape[1] // size
    check(weights, conv, kv, q, k, v, r)
    assert (k_added is None) == (v_added is None), "taps are added to one of the two convolutions only"
    codes, planes, kind = coded(weights, kv, q.dtype)
    q_out, r_out = q.new_empty(tokens, heads, size, dtype=kind), r.new_empty(tokens, heads, states)
    k_out, v_out = (x.new_empty(tokens, kv_heads, size, dtype=kind) for x in (k, v))
    added = [weights.k_taps, weights.v_taps]
    if k_added is not None and v_added is not None:
        added = [k_added, v_added]
        for each in added:
            assert each.stride()[1:] == (each.shape[2], 1), f"added taps have strides {each.stride()}"
    (bt, warps), on = cut, pdl.supported(q.device)
    clip_heads_kernel[(triton.cdiv(tokens, bt), heads + 2 * kv_heads)](
        q, k, v, r, q_out, k_out, v_out, r_out,
        weights.k_taps, weights.v_taps, *added, weights.q_scale, weights.r_scale,
        *conv.planes[:2], conv.table, conv.slots, *planes, kv.slots, *codes,
        packing.row_of, packing.positions, tokens, weights.eps, weights.conv_scale, weights.qk_limit, weights.r_limit,
        *growth_of(scaling),
        q.stride(0), k.stride(0), v.stride(0), r.stride(0), *conv.planes[0].stride()[:2], conv.table.stride(0),
        *planes[0].stride()[:3], *weights.k_taps.stride(), added[0].stride(0), added[1].stride(0),
        heads, kv_heads, size, triton.next_power_of_2(size), states, triton.next_power_of_2(states),
        weights.k_taps.shape[1], conv.block, kv.block, scaling is not None, k_added is not None,
        weights.codes is not None, bt, on,
        num_warps=warps, **pdl.launch(on),
    )  # fmt: skip
    return q_out, k_out, v_out, r_out


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
    return clip_heads(q, k, v, r, weights, conv, kv, packing, scaling, k_added, v_added, tile(len(q)))


@attn_prep_clip.implement("fixed", when=lambda device: device.type == "cuda", spare=True)
def attn_prep_clip_fixed(
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
    """`attn_prep_clip_triton` with the same sums for any number of tokens."""
    return clip_heads(q, k, v, r, weights, conv, kv, packing, scaling, k_added, v_added, ALONE)


def coded(
    weights: HeadWeights | ClipWeights, kv: GroupView, kind: torch.dtype
) -> tuple[list[Tensor], list[Tensor], torch.dtype]:
    """Scales of codes, or something in their place, the planes of k and v, and the dtype of what is returned."""
    if weights.codes is None:
        return [weights.k_taps, weights.v_taps], list(kv.planes[:2]), kind
    planes = [plane.view(torch.uint8) for plane in kv.planes[:2]]
    return [weights.codes.k, weights.codes.v], planes, torch.float16 if kind is torch.bfloat16 else kind


def growth_of(scaling: LogScaling | None) -> tuple[float, float]:
    """Arguments of `growth`."""
    return (1.0, 0.0) if scaling is None else (float(scaling.floor), float(scaling.alpha))
