"""Products of experts for several tokens with weights that are codes: as in many.py, decoded tile by tile."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.act.triton import gated
from inkcap.ops.experts.codes import tile, unit
from inkcap.ops.experts.group import Tiles, width_of
from inkcap.ops.experts.many import Also
from inkcap.ops.quantize.coded import Coded
from inkcap.ops.values import Caps


@triton.jit
def dense_product(xs, ws, acc, K: tl.constexpr, BK: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, STAGES: tl.constexpr):
    """Add the product of rows of x and of weights, which begin at xs and ws."""
    k = tl.arange(0, BK)[None, :]
    for done in tl.range(0, K, BK, num_stages=STAGES):
        if K % BK == 0:
            a = tl.load(xs + k + done)
            b = tl.load(ws + k + done)
        else:
            a = tl.load(xs + k + done, mask=done + k < K, other=0.0)
            b = tl.load(ws + k + done, mask=done + k < K, other=0.0)
        if WEIGHTS_FIRST:
            acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    return acc


@triton.jit
def coded_product(
    xs, words, scales, row, acc, BITS: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same with weight rows [BN, 1], counted over all experts."""
    BLOCK: tl.constexpr = 16 if BITS == 4 else 32
    PER: tl.constexpr = 32 // BITS  # codes of a word
    FOUR: tl.constexpr = scales.dtype.element_ty == tl.int32  # scales in a word: copies ahead take four bytes or more
    k = tl.arange(0, BK)[None, :]
    word, block = tl.arange(0, BK // PER)[None, :], tl.arange(0, BK // BLOCK)[None, :]
    wp = words + row * (K // PER) + word
    if FOUR:
        sp = scales + row * (K // BLOCK // 4) + tl.arange(0, BK // BLOCK // 4)[None, :]
    else:
        sp = scales + row * (K // BLOCK) + block
    for done in tl.range(0, K, BK, num_stages=STAGES):
        if K % BK == 0:
            a = tl.load(xs + k + done)
            code = tl.load(wp + done // PER)
            if FOUR:
                four = tl.load(sp + done // BLOCK // 4)[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]
                scale = tl.reshape(four & 0xFF, [BN, BK // BLOCK])
            else:
                scale = tl.load(sp + done // BLOCK)
        else:
            a = tl.load(xs + k + done, mask=done + k < K, other=0.0)
            code = tl.load(wp + done // PER, mask=done // PER + word < K // PER, other=0)
            scale = tl.load(sp + done // BLOCK, mask=done // BLOCK + block < K // BLOCK, other=0)
        b = tile(code, scale, xs.dtype.element_ty, BITS, BN, BK)
        if WEIGHTS_FIRST:
            acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["tokens"])
def grouped_coded_kernel(
    x, words, scales, factor, order, expert, start, stop, y, shared_x, shared_w, gammas, shared_y, rows, tokens,
    gate_cap, up_cap,
    SHARE: tl.constexpr,  # these and the strides as in many.py's grouped_kernel
    SHARED: tl.constexpr,
    SHARED_SHARE: tl.constexpr,
    SHARED_STRIDE: tl.constexpr,
    SHARED_NEXT: tl.constexpr,
    PAIRED: tl.constexpr,
    CAPPED: tl.constexpr,
    BITS: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SHARED_BK: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Shared experts are dense; their tiles come first. Weights are exact in bf16 but for the expert's factor, which
    multiplies the sums."""
    pdl.wait(PDL)
    pdl.trigger(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    blocks = tl.cdiv(tokens, WIDTH)
    program = tl.program_id(1)
    own = tl.maximum(program - SHARED * blocks, 0)  # among the tiles of routed experts
    e = tl.load(expert + own).to(tl.int64)
    if (program >= SHARED * blocks) & (e < 0):
        return
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    held = tl.minimum(n, rows - 1)
    if WEIGHTS_FIRST:
        acc = tl.zeros([BN, WIDTH], tl.float32)
    else:
        acc = tl.zeros([WIDTH, BN], tl.float32)
    if program < SHARED * blocks:
        at = program % blocks * WIDTH + tl.arange(0, WIDTH)
        live = at < tokens
        use = tl.where(live, at, 0) * SHARED + program // blocks
        xs = shared_x + (use // SHARED_SHARE).to(tl.int64)[:, None] * K
        ws = shared_w + program // blocks * (SHARED_NEXT * K) + held[:, None].to(tl.int64) * SHARED_STRIDE
        to = shared_y
        if PAIRED:
            times = tl.load(gammas + use).to(tl.float32)
        else:
            times = tl.full([WIDTH], 1.0, tl.float32)
        acc = dense_product(xs, ws, acc, K, SHARED_BK, WEIGHTS_FIRST, STAGES)
    else:
        at = tl.load(start + own) + tl.arange(0, WIDTH)
        live = at < tl.load(stop + own)
        use = tl.load(order + at, mask=live, other=0)
        xs = x + (use // SHARE).to(tl.int64)[:, None] * K
        row = (e * rows + held)[:, None]
        to = y
        times = tl.full([WIDTH], 1.0, tl.float32)
        acc = coded_product(xs, words, scales, row, acc, BITS, K, BN, BK, WEIGHTS_FIRST, STAGES)
        if BITS == 4:
            acc *= tl.load(factor + e) * unit(dtype, BITS)
    if WEIGHTS_FIRST:
        acc = tl.trans(acc)
    if PAIRED:
        flat = gated(tl.reshape(acc, [WIDTH * BN]), gate_cap, up_cap, CAPPED, WIDTH * BN)
        out = tl.reshape(flat, [WIDTH, BN // 2]) * times[:, None]
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


@dataclass(frozen=True, slots=True)
class Shape:
    """How the kernel cuts its work: columns, depth of a tile of codes and of dense weights, loads in flight, warps."""

    columns: int
    depth: int
    dense_depth: int
    stages: int
    warps: int


# by bits of a code, whether rows of weights are long, and width of a tile of uses; the scales of a tile are four bytes
# of a row or more, so that they are fetched ahead like the codes. Chosen for programs that fit a multiprocessor at once
# (16, 32) and for few decodings (256); timed only as whole steps, not against others
SHAPES = {
    (4, True): {
        16: Shape(64, 128, 64, 3, 4),
        32: Shape(64, 128, 64, 3, 4),
        64: Shape(128, 64, 64, 4, 4),
        128: Shape(128, 64, 64, 3, 8),
        256: Shape(128, 64, 64, 3, 8),
    },
    (4, False): {
        16: Shape(128, 128, 64, 3, 4),
        32: Shape(128, 128, 64, 3, 4),
        64: Shape(128, 64, 64, 3, 4),
        128: Shape(128, 64, 64, 3, 8),
        256: Shape(128, 64, 64, 3, 8),
    },
    (8, True): {
        16: Shape(64, 256, 64, 3, 4),
        32: Shape(64, 256, 64, 3, 4),
        64: Shape(128, 128, 64, 3, 4),
        128: Shape(128, 128, 64, 3, 8),
        256: Shape(64, 128, 64, 2, 8),
    },
    (8, False): {
        16: Shape(128, 128, 64, 3, 4),
        32: Shape(128, 128, 64, 3, 4),
        64: Shape(128, 128, 64, 3, 4),
        128: Shape(128, 128, 64, 3, 8),
        256: Shape(64, 128, 64, 2, 8),
    },
}


def coded_width_of(uses: int, experts: int) -> int:
    """`width_of` for codes: wider where experts have many uses, since each tile decodes the weights anew."""
    return 256 if uses > 96 * experts else width_of(uses, experts)


def grouped_coded(
    x: Tensor,
    w: Coded,
    uses: Tiles,
    share: int,
    out: Tensor,
    *,
    paired: bool,
    caps: Caps | None = None,
    also: Also | None = None,
) -> Tensor:
    """`grouped` of many.py with coded weights w [E, rows, K]."""
    _, rows, length = w.shape
    on = pdl.supported(x.device)
    shape = SHAPES[w.bits, length > 2048][uses.width]
    columns = max(16, min(shape.columns, triton.next_power_of_2(rows)))
    depth = max(32, min(shape.depth, triton.next_power_of_2(length)))
    words, scales, factor = stored(w)
    four = 64 if w.bits == 4 else 128  # columns under four scales
    if length % depth == 0 and depth % four == 0:
        scales = scales.view(torch.int32)
    shared, tokens, shared_tiles = 0, 0, 0
    beside, strides = (x, x, out, out), (1, length, 1)
    if also is not None:
        shared, tokens = len(also.w), also.tokens
        shared_tiles = shared * triton.cdiv(tokens, uses.width)
        beside = (also.x, also.w, also.gammas, also.out)
        strides = (also.share, also.w.stride(1), also.w.stride(0) // length)
    grouped_coded_kernel[(triton.cdiv(rows, columns), shared_tiles + len(uses.expert))](
        x, words, scales, factor, uses.order, uses.expert, uses.start, uses.stop, out, *beside, rows, tokens,
        1.0 if caps is None else caps.gate, 1.0 if caps is None else caps.up,
        share, shared, *strides, paired, caps is not None, w.bits, length, uses.width, columns, depth,
        min(shape.dense_depth, depth), uses.width <= 64, shape.stages, on, num_warps=shape.warps, **pdl.launch(on),
    )  # fmt: skip
    return out


def stored(w: Coded) -> tuple[Tensor, Tensor, Tensor]:
    """(words of codes int32 [E, rows, columns * bits / 32], scales uint8, factors) as kernels take them."""
    scales = w.scales.view(torch.uint8)
    return w.codes.view(torch.int32), scales, scales if w.factor is None else w.factor
