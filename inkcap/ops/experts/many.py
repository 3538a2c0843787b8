"""Grouped products of experts for several tokens, and the sum over a token's experts behind them."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from inkcap.ops import pdl
from inkcap.ops.act.triton import gated
from inkcap.ops.experts.group import Tiles
from inkcap.ops.linear.few import keep_square
from inkcap.ops.sconv.triton import finish, history
from inkcap.ops.values import Caps

TMA = True  # where the device has it


@triton.jit(do_not_specialize=["tokens"])
def grouped_kernel(
    x, w, tiled, order, expert, start, stop, y, shared_x, shared_w, gammas, shared_y, rows, tokens, gate_cap, up_cap,
    SHARE: tl.constexpr,  # uses that read the same row of x
    SHARED: tl.constexpr,  # experts that every token uses; their tiles come first
    SHARED_SHARE: tl.constexpr,  # of them, how many read the same row of shared_x
    SHARED_STRIDE: tl.constexpr,  # between two rows of one shared expert's weights
    SHARED_NEXT: tl.constexpr,  # rows or columns between the weights of two shared experts, times K
    PAIRED: tl.constexpr,  # y has the activations of pairs of columns, times gammas where shared
    CAPPED: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,  # weights are the M operand: few tokens
    TMA: tl.constexpr,  # weights come through the descriptor `tiled`; then no expert is shared
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl.wait(PDL)
    pdl.trigger(PDL)
    blocks = tl.cdiv(tokens, WIDTH)
    tile = tl.program_id(1)
    own = tl.maximum(tile - SHARED * blocks, 0)  # among the tiles of routed experts
    e = tl.load(expert + own).to(tl.int64)
    if (tile >= SHARED * blocks) & (e < 0):
        return
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    held = tl.minimum(n, rows - 1)
    k = tl.arange(0, BK)
    if tile < SHARED * blocks:
        at = tile % blocks * WIDTH + tl.arange(0, WIDTH)
        live = at < tokens
        use = tl.where(live, at, 0) * SHARED + tile // blocks
        xp = shared_x + (use // SHARED_SHARE).to(tl.int64)[:, None] * K + k[None, :]
        wp = shared_w + tile // blocks * (SHARED_NEXT * K) + held[:, None].to(tl.int64) * SHARED_STRIDE + k[None, :]
        to = shared_y
        if PAIRED:
            factor = tl.load(gammas + use).to(tl.float32)
    else:
        at = tl.load(start + own) + tl.arange(0, WIDTH)
        live = at < tl.load(stop + own)
        use = tl.load(order + at, mask=live, other=0)
        xp = x + (use // SHARE).to(tl.int64)[:, None] * K + k[None, :]
        wp = w + (e * rows + held)[:, None] * K + k[None, :]
        to = y
        if PAIRED:
            factor = tl.full([WIDTH], 1.0, tl.float32)
    if WEIGHTS_FIRST:
        acc = tl.zeros([BN, WIDTH], tl.float32)
    else:
        acc = tl.zeros([WIDTH, BN], tl.float32)
    for done in tl.range(0, K, BK, num_stages=STAGES):
        if TMA:
            a = tl.load(xp + done)
            b = tiled.load([(e * rows).to(tl.int32) + tl.program_id(0) * BN, done])
        elif K % BK == 0:
            a = tl.load(xp + done)
            b = tl.load(wp + done)
        else:
            a = tl.load(xp + done, mask=(done + k < K)[None, :], other=0.0)
            b = tl.load(wp + done, mask=(done + k < K)[None, :], other=0.0)
        if WEIGHTS_FIRST:
            acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    if WEIGHTS_FIRST:
        acc = tl.trans(acc)
    if PAIRED:
        flat = gated(tl.reshape(acc, [WIDTH * BN]), gate_cap, up_cap, CAPPED, WIDTH * BN)
        out = tl.reshape(flat, [WIDTH, BN // 2]) * factor[:, None]
        width = rows // 2
        column = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
    else:
        out = acc
        width = rows
        column = n
    tl.store(
        to + use.to(tl.int64)[:, None] * width + column[None, :],
        out.to(y.dtype.element_ty),
        mask=live[:, None] & (column < width)[None, :],
    )


@triton.jit
def combine_kernel(
    products, weights, shared, residual, y, squares, taps, plane, table, slots, row_of, positions, conv_scale,
    block_stride, token_stride, table_stride, tap_channel, tap_distance,
    CONVOLVED: tl.constexpr, SHARED: tl.constexpr, RESIDUAL: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
    SQUARED: tl.constexpr, TOP: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token's sum over its experts; convolved when it is the only token of its sequence in this step."""
    pdl.trigger(PDL)
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = c < C
    if CONVOLVED:
        here = t + tl.arange(0, 1)
        row, position, slot = tl.load(row_of + here), tl.load(positions + here), tl.load(slots + here)
        past = history(
            plane, table, taps, row, position, c, mask, block_stride, token_stride, table_stride,
            tap_channel, tap_distance, BLOCK, W,
        )  # fmt: skip
        own_tap = tl.load(taps + c * tap_channel + (W - 1) * tap_distance, mask=mask, other=0.0)
    pdl.wait(PDL)
    total = tl.zeros([BC], tl.float32)
    for s in tl.static_range(SHARED):
        total += tl.load(shared + (t * SHARED + s) * C + c, mask=mask, other=0.0).to(tl.float32)
    for k in tl.static_range(TOP):
        product = tl.load(products + (t * TOP + k) * C + c, mask=mask, other=0.0).to(tl.float32)
        total += product * tl.load(weights + t * TOP + k)
    out = total.to(products.dtype.element_ty)
    if CONVOLVED:
        out = finish(out, past, own_tap, conv_scale, plane, slot, c, mask, block_stride, token_stride, BLOCK)
    out = out.to(tl.float32)
    if RESIDUAL:
        out += tl.load(residual + t * C + c, mask=mask, other=0.0).to(tl.float32)
    out = out.to(y.dtype.element_ty)
    tl.store(y + t * C + c, out, mask=mask)
    if SQUARED:
        keep_square(squares, out, t, mask)


@dataclass(frozen=True, slots=True)
class Shape:
    """How `grouped_kernel` cuts its work: columns and depth of a tile, loads in flight, warps."""

    columns: int
    depth: int
    stages: int
    warps: int


# by width of a tile of uses, for long and for short rows of weights; measured on an H200, see docs/kernels.md
LONG = {16: Shape(64, 128, 4, 4), 32: Shape(64, 128, 4, 4), 64: Shape(128, 64, 4, 4), 128: Shape(256, 64, 4, 8)}
SHORT = {16: Shape(256, 64, 3, 8), 32: Shape(256, 64, 3, 8), 64: Shape(128, 64, 4, 4), 128: Shape(256, 64, 4, 8)}


@dataclass(frozen=True, slots=True)
class Also:
    """Experts that every token uses, in the same launch: x [.., K], weights of any stride, where the results go."""

    x: Tensor
    share: int  # experts that read the same row of x
    w: Tensor  # [S, rows, K]
    gammas: Tensor  # [tokens, S] fp32, for activations
    out: Tensor  # [tokens * S, rows], or rows / 2
    tokens: int


def grouped(
    x: Tensor,
    w: Tensor,
    uses: Tiles,
    share: int,
    out: Tensor,
    *,
    paired: bool,
    caps: Caps | None = None,
    also: Also | None = None,
) -> Tensor:
    """Row use // share of x [.., K] times w [E, rows, K] of each use's expert, into out [uses, rows], which it returns.

    With `paired` rows / 2: the activations of pairs.
    """
    _, rows, length = w.shape
    on = pdl.supported(x.device)
    shape = (LONG if length > 2048 else SHORT)[uses.width]
    columns = max(16, min(shape.columns, triton.next_power_of_2(rows)))
    depth = max(16, min(shape.depth, triton.next_power_of_2(length)))
    shared, tokens, shared_tiles = 0, 0, 0
    beside, strides = (x, w, out, out), (1, length, 1)
    tma = TMA and on and also is None and uses.width > 64 and rows % columns == length % depth == 0
    tiled = TensorDescriptor.from_tensor(w.flatten(0, 1), [columns, depth]) if tma else None
    if also is not None:
        shared, tokens = len(also.w), also.tokens
        shared_tiles = shared * triton.cdiv(tokens, uses.width)
        beside = (also.x, also.w, also.gammas, also.out)
        strides = (also.share, also.w.stride(1), also.w.stride(0) // length)
    grouped_kernel[(triton.cdiv(rows, columns), shared_tiles + len(uses.expert))](
        x, w, tiled, uses.order, uses.expert, uses.start, uses.stop, out, *beside, rows, tokens,
        1.0 if caps is None else caps.gate, 1.0 if caps is None else caps.up,
        share, shared, *strides, paired, caps is not None, length, uses.width, columns, depth, uses.width <= 64,
        tma, shape.stages, on, num_warps=shape.warps, **pdl.launch(on),
    )  # fmt: skip
    return out
