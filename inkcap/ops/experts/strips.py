"""Products of experts for a few tokens with short rows of dense weights, such as those of second halves.

A program has one expert and works through a strip of its rows, tile by tile, each over all columns, so that one tile's
weights are on the way while another is multiplied.
"""

import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.experts.few import FEW, NARROW
from inkcap.ops.experts.many import Also
from inkcap.ops.quantize.coded import Coded, Weights
from inkcap.ops.values import Routed

MOST = 512  # columns of a row


@triton.jit
def kept(y, out, use, live, n, rows):
    """Store a tile [rows n, uses] of products as rows of y [.., rows]."""
    to = y + use.to(tl.int64)[None, :] * rows + n[:, None]
    tl.store(to, out.to(y.dtype.element_ty), mask=live[None, :] & (n < rows)[:, None])


@triton.jit
def strip(
    x, w, y, use, live, start, rows, stride, K: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """TILES tiles of rows of w, `stride` apart, from `start` on, times the rows `use` of x."""
    k = tl.arange(0, BK)[None, :]
    xp = (x + use.to(tl.int64) * K)[:, None]
    for t in tl.range(0, TILES, num_stages=STAGES):
        n = start + t * BN + tl.arange(0, BN)
        wp = (w + tl.minimum(n, rows - 1).to(tl.int64) * stride)[:, None]
        acc = tl.zeros([BN, WIDTH], tl.float32)
        for done in tl.static_range(0, K, BK):
            b = tl.load(wp + done + k, mask=done + k < K, other=0.0)
            a = tl.load(xp + done + k, mask=live[:, None] & (done + k < K), other=0.0)
            acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee")
        kept(y, acc, use, live, n, rows)


@triton.jit(do_not_specialize=["tokens"])
def strip_kernel(
    x, w, choice, y, shared_x, shared_w, shared_y, rows, tokens,
    TOP: tl.constexpr, BT: tl.constexpr, SHARED: tl.constexpr, SHARED_STRIDE: tl.constexpr, SHARED_NEXT: tl.constexpr,
    K: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Shared experts come first; the first use of a routed one works for all of them. The choice is read early: what
    stands between router and here triggers after its wait."""
    program, start = tl.program_id(1), tl.program_id(0) * (TILES * BN)
    own = tl.maximum(program - SHARED, 0)
    e = tl.load(choice + own).to(tl.int64)
    token, place = tl.arange(0, WIDTH)[:, None], tl.arange(0, BT)[None, :]
    number = token * TOP + place
    chosen = tl.load(choice + number, mask=(token < tokens) & (place < TOP), other=-1)
    use = tl.max(tl.where(chosen == e, number, -1), 1)  # a token uses an expert once
    live = use >= 0
    pdl.wait(PDL)
    pdl.trigger(PDL)
    if program < SHARED:
        at = tl.arange(0, WIDTH)
        mine = tl.where(at < tokens, at, 0) * SHARED + program
        strip(
            shared_x, shared_w + program * (SHARED_NEXT * K), shared_y, mine, at < tokens, start, rows, SHARED_STRIDE,
            K, WIDTH, BN, BK, TILES, STAGES,
        )  # fmt: skip
    elif tl.min(tl.where(live, use, WIDTH * TOP), 0) == own:
        strip(x, w + e * rows * K, y, tl.maximum(use, 0), live, start, rows, K, K, WIDTH, BN, BK, TILES, STAGES)


# of a program, measured on an H200, see docs/kernels.md; each warp has 16 rows of a tile
ROWS, COLUMNS, TILES, STAGES, WARPS = 32, 128, 4, 3, 2  # of a tile, at once, in a strip, loads in flight


def short(w: Weights) -> bool:
    """Whether rows of w are short and dense."""
    return not isinstance(w, Coded) and w.shape[2] <= MOST


def in_strips(x: Tensor, w: Tensor, route: Routed, out: Tensor, also: Also | None = None) -> Tensor:
    """Use `number` of x [uses, K] times w [E, rows, K] of its expert, into out [uses, rows], which it returns.

    Uses are those of up to 16 tokens; w is `short`.
    """
    (_, rows, length), (tokens, top), on = w.shape, route.choice.shape, pdl.supported(x.device)
    shared, beside, strides = 0, (x, x, out), (length, 1)
    if also is not None:
        shared = len(also.w)
        beside, strides = (also.x, also.w, also.out), (also.w.stride(1), also.w.stride(0) // length)
    strip_kernel[(triton.cdiv(rows, ROWS * TILES), shared + tokens * top)](
        x, w, route.choice, out, *beside, rows, tokens, top, triton.next_power_of_2(top), shared, *strides,
        length, NARROW if tokens <= NARROW else FEW, ROWS, COLUMNS, TILES, STAGES, on,
        num_warps=WARPS, **pdl.launch(on),
    )  # fmt: skip
    return out
