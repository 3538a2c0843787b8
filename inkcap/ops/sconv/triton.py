"""The short convolution on a GPU: insert and convolve in one launch, with state addressed by absolute position.
Tokens that are alone in their sequences need nothing of this step but their own inputs.

Also the device functions with which a product's kernel convolves its own output, when every sequence has one token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.sconv.ref import sconv
from inkcap.ops.sconv.walk import WALKED, WIDE, Parts, older, walk
from inkcap.ops.values import GroupView, Packing

FEW, MANY = (1, 512, 2), (1, 1024, 2)  # tokens and channels of a program, and its warps; up to 64 tokens and beyond


@triton.jit
def history(
    plane, table, taps, row, position, at, mask, block_stride, token_stride, table_stride, tap_channel, tap_distance,
    BLOCK: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """What one token's older inputs add at channels `at`, fp32. Reads nothing that this step writes."""
    total = tl.zeros(at.shape, tl.float32)
    for i in tl.static_range(W - 1):
        past = older(
            plane, table, row, position - (W - 1 - i), at, mask, block_stride, token_stride, table_stride, BLOCK
        )
        total += past.to(tl.float32) * tl.load(taps + at * tap_channel + i * tap_distance, mask=mask, other=0.0)
    return total


@triton.jit
def finish(product, past, tap, scale, plane, slot, at, mask, block_stride, token_stride, BLOCK: tl.constexpr):
    """Keep one token's rounded product [N] and return its convolution, rounded to the same dtype."""
    kept = plane + slot // BLOCK * block_stride + slot % BLOCK * token_stride + at
    tl.store(kept, product.to(plane.dtype.element_ty), mask=mask & (slot >= 0))
    own = product.to(tl.float32)
    return ((own + past + own * tap) * scale).to(product.dtype)


@triton.jit
def alone_kernel(
    x, residual, y, taps, plane, table, slots, row_of, positions, scale, before, x_stride, residual_stride,
    tap_channel, tap_distance, block_stride, token_stride, table_stride,
    C: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, SCALED: tl.constexpr,
    BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """For tokens that are alone in their sequences: all but their own inputs is loaded before the dependency wait."""
    pdl.trigger(PDL)
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = c < C
    here = t + tl.arange(0, 1)
    row, position, slot = tl.load(row_of + here), tl.load(positions + here), tl.load(slots + here)
    past = history(
        plane, table, taps, row, position, c, mask, block_stride, token_stride, table_stride,
        tap_channel, tap_distance, BLOCK, W,
    )  # fmt: skip
    tap = tl.load(taps + c * tap_channel + (W - 1) * tap_distance, mask=mask, other=0.0)
    if SCALED:
        factor = tl.load(before)
    pdl.wait(PDL)
    own = tl.load(x + t * x_stride + c, mask=mask, other=0.0)
    if SCALED:
        own = (own.to(tl.float32) * factor).to(own.dtype)
    out = finish(own, past, tap, scale, plane, slot, c, mask, block_stride, token_stride, BLOCK).to(tl.float32)
    if RESIDUAL:
        out += tl.load(residual + t * residual_stride + c, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + t * C + c, out.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def sconv_kernel(
    x, taps, added, residual, y, plane, table, slots, row_of, positions, tokens, x_stride, residual_stride,
    tap_token, tap_group, tap_distance, added_token, added_group, added_distance,
    block_stride, token_stride, table_stride, scale, before,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    STATIC: tl.constexpr,  # all tokens have the same taps
    TAP_CHANNELS: tl.constexpr,  # else, channels that share a tap
    ADDED_CHANNELS: tl.constexpr,  # the same of `added`; 0: there is none
    RESIDUAL: tl.constexpr,
    SCALED: tl.constexpr,  # x is multiplied by before[0], and rounded, before all else
    BT: tl.constexpr,
    BC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl.trigger(PDL)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    here = t < tokens
    mask = here[:, None] & (c < C)
    row = tl.load(row_of + t, mask=here, other=0)
    position = tl.load(positions + t, mask=here, other=0)
    slot = tl.load(slots + t, mask=here, other=-1)[:, None]
    t64 = t.to(tl.int64)
    if SCALED:
        factor = tl.load(before)
    pdl.wait(PDL)
    own = tl.load(x + t64[:, None] * x_stride + c, mask=mask, other=0.0)
    if SCALED:
        own = (own.to(tl.float32) * factor).to(own.dtype)
    total = tl.zeros(mask.shape, tl.float32)  # of older inputs first, as in `finish`
    for i in tl.static_range(W):
        back = W - 1 - i
        if STATIC:
            tap = tl.load(taps + c * tap_group + i * tap_distance, mask=c < C, other=0.0).to(tl.float32)
        else:
            tap_at = t64[:, None] * tap_token + c // TAP_CHANNELS * tap_group + i * tap_distance
            tap = tl.load(taps + tap_at, mask=mask, other=0.0).to(tl.float32)
        if ADDED_CHANNELS > 0:
            added_at = t64[:, None] * added_token + c // ADDED_CHANNELS * added_group + back * added_distance
            tap += tl.load(added + added_at, mask=mask, other=0.0).to(tl.float32)
        if back == 0:
            total = own.to(tl.float32) + total + own.to(tl.float32) * tap
        else:
            # a token of this step that stands `back` before in the same sequence; else the state has it
            near = here & (t >= back)
            same = near & (tl.load(row_of + t - back, mask=near, other=-1) == row)
            same = (same & (tl.load(positions + t - back, mask=near, other=-1) == position - back))[:, None]
            new = tl.load(x + (t64 - back)[:, None] * x_stride + c, mask=mask & same, other=0.0)
            if SCALED:
                new = (new.to(tl.float32) * factor).to(new.dtype)
            total += new.to(tl.float32) * tap
            if tl.min((same | ~here[:, None]).to(tl.int32)) == 0:  # most tiles of a long prompt need no state
                old = older(
                    plane, table, row[:, None], position[:, None] - back, c, mask & ~same,
                    block_stride, token_stride, table_stride, BLOCK,
                )  # fmt: skip
                total += old.to(tl.float32) * tap
    out = (total * scale).to(own.dtype)
    if tl.max(slot) >= 0:
        kept = plane + slot // BLOCK * block_stride + slot % BLOCK * token_stride + c
        tl.store(kept, own.to(plane.dtype.element_ty), mask=mask & (slot >= 0))
    if RESIDUAL:
        base = tl.load(residual + t64[:, None] * residual_stride + c, mask=mask, other=0.0)
        tl.store(y + t64[:, None] * C + c, base.to(tl.float32) + out.to(tl.float32), mask=mask)
    else:
        tl.store(y + t64[:, None] * C + c, out, mask=mask)


def convolve(
    x: Tensor,
    taps: Tensor,
    view: GroupView,
    packing: Packing,
    plane: int,
    scale: float,
    residual: Tensor | None,
    added: Tensor | None = None,
    before: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`sconv` of the reference; with `before` [1] fp32 it is that of x * before, rounded."""
    tokens, channels = x.shape
    state = view.planes[plane]
    assert x.stride(1) == state.stride(2) == 1, "channels of x and of the plane must be contiguous"
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    static = taps.dim() == 2
    wide = channels >= WIDE and taps.shape[1] <= 4
    if wide and static and added is None and packing.widest > 1 and tokens >= WALKED:
        return walk(Parts(x, 1), taps, view, packing, plane, scale, residual, before, dtype)
    summed = x.dtype if residual is None else torch.promote_types(residual.dtype, x.dtype)
    out = x.new_empty(x.shape, dtype=dtype or summed)
    if not tokens:
        return out
    on = pdl.supported(x.device)
    bt, bc, warps = FEW if tokens <= 64 else MANY
    bc = min(bc, triton.next_power_of_2(channels))
    if static and added is None and packing.widest == 1:
        alone_kernel[(tokens, triton.cdiv(channels, bc))](
            x, x if residual is None else residual, out, taps, state, view.table, view.slots, packing.row_of,
            packing.positions, scale, taps if before is None else before,
            x.stride(0), 0 if residual is None else residual.stride(0), *taps.stride(),
            state.stride(0), state.stride(1), view.table.stride(0),
            channels, taps.shape[1], view.block, residual is not None, before is not None, bc, on,
            num_warps=warps, **pdl.launch(on),
        )  # fmt: skip
        return out
    sconv_kernel[(triton.cdiv(tokens, bt), triton.cdiv(channels, bc))](
        x, taps, taps if added is None else added, x if residual is None else residual, out,
        state, view.table, view.slots, packing.row_of, packing.positions, tokens,
        x.stride(0), 0 if residual is None else residual.stride(0),
        0 if static else taps.stride(0), taps.stride(-2), taps.stride(-1),
        *((0, 0, 0) if added is None else added.stride()),
        state.stride(0), state.stride(1), view.table.stride(0), scale, taps if before is None else before,
        channels, taps.shape[-1], view.block, static, 1 if static else channels // taps.shape[1],
        0 if added is None else channels // added.shape[1], residual is not None, before is not None, bt, bc, on,
        num_warps=warps, **pdl.launch(on),
    )  # fmt: skip
    return out


@sconv.implement("triton", when=lambda device: device.type == "cuda", tokenwise=True)
def sconv_triton(
    x: Tensor,
    taps: Tensor,
    view: GroupView,
    packing: Packing,
    *,
    plane: int,
    scale: float = 1.0,
    residual: Tensor | None = None,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`sconv` of the reference."""
    return convolve(x, taps, view, packing, plane, scale, residual, added, dtype=dtype)
