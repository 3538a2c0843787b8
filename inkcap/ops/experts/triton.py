"""Experts on a GPU. One token: kernels that stream the weight rows of its experts. More tokens: products grouped by
expert, whatever their number.

The gated products are not rounded before the activation, and one token's products with w2 not before their sum; one
token is normed without rounding the normed row. Else everything rounds where the references do.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.act.ref import swiglu
from inkcap.ops.experts import fragments, lanes
from inkcap.ops.experts.coded_many import coded_width_of, grouped_coded, stored
from inkcap.ops.experts.coded_row import coded_chunks, down_row_coded, down_row_joined, up_row_coded
from inkcap.ops.experts.few import FEW, NARROW, cut_of, grouped_few, suits
from inkcap.ops.experts.group import Tiles, tiles, width_of
from inkcap.ops.experts.many import Also, combine_kernel, grouped
from inkcap.ops.experts.ref import experts_down, experts_settle, experts_up, routed_down, routed_settle, routed_up
from inkcap.ops.experts.row import down_row, up_row
from inkcap.ops.experts.strips import in_strips, short
from inkcap.ops.experts.wide import MANY, fits, wide
from inkcap.ops.linear.device import chunks
from inkcap.ops.quantize.coded import Coded, Weights
from inkcap.ops.sconv.triton import convolve
from inkcap.ops.sconv.walk import WALKED, Parts, walk
from inkcap.ops.values import Activated, Caps, GroupView, Normed, Packing, Routed

TOGETHER = 64  # tokens up to which shared experts share the launches of dense routed ones
COMBINED = 1024  # channels of a program that sums over experts
UP, DOWN = (2, 8), (4, 4)  # one token: rows of a program, warps; measured on an H200, see docs/kernels.md
# for codes: rows of a program, rows of a program of shared experts, warps; rows, warps. First and third never swept;
# the others measured on an H200 for rows of 2,304 columns and 8 experts of 1,152
UP_CODED, UP_SHORT, DOWN_CODED, DOWN_JOINED = (4, 2, 2), (4, 2, 1), (8, 8), (8, 4)


def up(
    rows: Normed, route: Routed, w13: Weights, shared_w13: Tensor | None, caps: Caps | None, *, fixed: bool = False
) -> tuple[Tensor, Tensor]:
    """Activations of the routed and of the shared experts. `fixed`: as `fixed_products` makes them."""
    (tokens, top_k), (_, columns, length) = route.choice.shape, w13.shape
    shared = 0 if shared_w13 is None else len(shared_w13)
    device = rows.rows.device
    out = torch.empty(tokens, top_k, columns // 2, dtype=rows.dtype, device=device)
    bk, number = chunks(length)
    if tokens == 1 and fixed and not shared and as_alone(rows.tensor(), w13, top_k, paired=True):
        return fragments.up(rows.tensor(), w13, route, caps, out, fixed=True), out[:, :0]
    if tokens == 1 and number and not fixed:
        on, normed = pdl.supported(device), rows.normed is None
        x = rows.rows if rows.normed is None else rows.normed
        shared_out = torch.empty(1, shared, columns // 2, dtype=rows.dtype, device=device)
        if isinstance(w13, Coded) and not shared and not normed and fragments.suits(x, w13, top_k):
            return fragments.up(x, w13, route, caps, out), shared_out
        if isinstance(w13, Coded):
            (bn, dense_bn, warps), coded = UP_CODED if length > 4096 else UP_SHORT, coded_chunks(length)
            programs = shared * triton.cdiv(columns, dense_bn) + top_k * triton.cdiv(columns, bn)
            up_row_coded[(programs,)](
                x, rows.weight, *stored(w13), x if shared_w13 is None else shared_w13, route.choice, route.gammas,
                out, shared_out, rows.eps, 1.0 if caps is None else caps.gate, 1.0 if caps is None else caps.up,
                normed, caps is not None, shared, columns // 2, w13.bits, length, *coded, bn, bk, number, dense_bn, on,
                num_warps=warps, **pdl.launch(on),
            )  # fmt: skip
            return out, shared_out
        bn, warps = UP
        up_row[(triton.cdiv(columns, bn), shared + top_k)](
            x, rows.weight, w13, w13 if shared_w13 is None else shared_w13, route.choice, route.gammas,
            out, shared_out, rows.eps, 1.0 if caps is None else caps.gate, 1.0 if caps is None else caps.up,
            normed, caps is not None, shared, columns // 2, length, bk, number, bn, on,
            num_warps=warps, **pdl.launch(on),
        )  # fmt: skip
        return out, shared_out
    x = rows.tensor()
    shared_out = torch.empty(tokens, shared, columns // 2, dtype=rows.dtype, device=device)
    also = None
    if shared_w13 is not None and (fixed or together(w13, tokens)):
        also = Also(x, shared, shared_w13, route.gammas, shared_out, tokens)
    elif shared_w13 is not None:
        shared_out = swiglu(F.linear(x, shared_w13.flatten(0, 1)).unflatten(1, (shared, -1)), route.gammas)
    if tokens:
        products = fixed_products if fixed else products_of
        products(x, w13, route, top_k, out, paired=True, caps=caps, also=also)
    return out, shared_out


def together(w: Weights, tokens: int) -> bool:
    """Whether the shared experts are in the launches of routed ones with weights w."""
    return tokens <= (FEW if isinstance(w, Coded) else TOGETHER)


def products_of(
    x: Tensor,
    w: Weights,
    route: Routed,
    share: int,
    out: Tensor,
    *,
    paired: bool,
    caps: Caps | None = None,
    also: Also | None = None,
) -> Tensor:
    """`grouped` for all uses of a routing, with weights of either kind."""
    tokens, number = len(route.choice), route.choice.numel()
    if tokens <= FEW and not paired and short(w):
        return in_strips(x, w, route, out, also)
    if also is None and lanes.suits(x, w, tokens, number, paired=paired):
        return in_lanes(x, w, route, share, out, paired=paired, caps=caps)
    if suits(w, tokens):
        return grouped_few(x, w, route, share, out, paired=paired, caps=caps, also=also)
    if also is None and number > MANY * len(w) and fits(x, w):
        return wide(x, w, route, share, out, paired=paired, caps=caps)
    width = coded_width_of(number, len(w)) if isinstance(w, Coded) else width_of(number, len(w))
    uses = tiles(route, len(w), width)
    if isinstance(w, Coded):
        return grouped_coded(x, w, uses, share, out, paired=paired, caps=caps, also=also)
    return grouped(x, w, uses, share, out, paired=paired, caps=caps, also=also)


def in_lanes(
    x: Tensor,
    w: Weights,
    route: Routed,
    share: int,
    out: Tensor,
    *,
    paired: bool,
    caps: Caps | None,
    fixed: bool = False,
) -> Tensor:
    """Launch `grouped_lanes`, and the lists of its tiles where there are too many tokens to do without."""
    tokens, number = len(route.choice), route.choice.numel()
    width = lanes.width_of(tokens, number, len(w))
    cut = lanes.fixed_cut(w, tokens, width, paired=paired) if fixed and isinstance(w, Coded) else None
    early = not paired and (tokens <= FEW or (Tiles, width) in route.memo)
    uses = route if tokens <= FEW else tiles(route, len(w), width)
    return lanes.grouped_lanes(x, w, uses, share, out, paired=paired, caps=caps, early=early, cut=cut)


def fixed_products(
    x: Tensor,
    w: Weights,
    route: Routed,
    share: int,
    out: Tensor,
    *,
    paired: bool,
    caps: Caps | None = None,
    also: Also | None = None,
) -> Tensor:
    """`products_of` by one kernel for any number of tokens, in which a use's sums depend on nothing but itself."""
    tokens, number = len(route.choice), route.choice.numel()
    if also is None and isinstance(w, Coded) and lanes.fits(x, w, lanes.fixed_cut(w, FEW, FEW, paired=paired)):
        return in_lanes(x, w, route, share, out, paired=paired, caps=caps, fixed=True)
    uses = route if tokens <= FEW else tiles(route, len(w), NARROW if number <= NARROW * len(w) else FEW)
    cut = cut_of(w)
    if tokens == 1 and cut.slices > 2:
        cut = replace(cut, rows=16, stages=4)  # 13.9 us, 32 rows 16.5 (NVFP4, 6,144 columns)
    return grouped_few(x, w, uses, share, out, paired=paired, caps=caps, also=also, cut=cut)


def as_alone(x: Tensor, w: Weights, top_k: int, *, paired: bool) -> bool:
    """Whether one token's kernels give x the bits that it has in `fixed_products`."""
    if not isinstance(w, Coded) or not fragments.suits(x, w, top_k):
        return False
    cut = lanes.fixed_cut(w, FEW, FEW, paired=paired)
    return lanes.fits(x, w, cut) and cut.sums == (2 if paired else 1)


def down(
    act: Tensor,
    shared_act: Tensor | None,
    route: Routed,
    w2: Weights,
    shared_w2: Tensor | None,
    residual: Tensor | None,
    taps: Tensor | None,
    view: GroupView | None,
    packing: Packing | None,
    plane: int,
    conv_scale: float,
    dtype: torch.dtype | None = None,
    *,
    fixed: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Sum over experts [T, C], then convolution and addition where there are taps; squares as `settle` returns them.

    `fixed`: as `fixed_products` makes them, and no squares.
    """
    (tokens, top_k, length), channels = act.shape, w2.shape[1]
    bk, number = chunks(length)
    convolved = taps is not None and view is not None and packing is not None
    inside = convolved and packing.widest == 1  # every token's other inputs are in the state
    summed = act.dtype if residual is None else residual.dtype
    out = torch.empty(tokens, channels, dtype=(dtype or summed) if inside else act.dtype, device=act.device)
    if not tokens:
        return out, None
    on = pdl.supported(act.device)
    act, base = act.contiguous(), residual.contiguous() if inside and residual is not None else None
    if inside:
        state = view.planes[plane]
        where = (taps, state, view.table, view.slots, packing.row_of, packing.positions)
        strides = (state.stride(0), state.stride(1), view.table.stride(0), taps.stride(0), taps.stride(1))
        window = (taps.shape[1], view.block)
    else:
        where, strides, window = (act,) * 6, (0,) * 5, (1, 1)
    parts = (where, strides, window, conv_scale)
    alone = tokens == 1 and (inside or not convolved)  # for one launch of everything
    if alone and fixed and shared_act is None and as_alone(act, w2, top_k, paired=False):
        return fragments.down(act, w2, route, base, *parts, out, convolved=inside, fixed=True), None
    joined = coded_chunks(top_k * length) if isinstance(w2, Coded) else (bk, number)  # of all experts' rows
    if alone and number and joined[1] and not fixed:
        shared = 0 if shared_w2 is None else shared_w2.shape[1]
        if isinstance(w2, Coded) and shared:
            bn, warps = DOWN_CODED
            down_row_coded[(triton.cdiv(channels, bn),)](
                act, act if shared_act is None else shared_act, *stored(w2), act if shared_w2 is None else shared_w2,
                route.choice, route.weights, act if base is None else base, out, *where, conv_scale, channels,
                *strides, inside, base is not None, *window, top_k, shared, triton.next_power_of_2(top_k),
                triton.next_power_of_2(max(1, shared)), w2.bits, length, bk, number, bn, on,
                num_warps=warps, **pdl.launch(on),
            )  # fmt: skip
            return out, None
        if isinstance(w2, Coded) and fragments.suits(act, w2, top_k):
            return fragments.down(act, w2, route, base, *parts, out, convolved=inside), None
        if isinstance(w2, Coded):
            bn, warps = DOWN_JOINED
            down_row_joined[(triton.cdiv(channels, bn),)](
                act, *stored(w2), route.choice, route.weights, act if base is None else base, out, *where, conv_scale,
                channels, *strides, inside, base is not None, *window, top_k, w2.bits, length, *joined, bn, on,
                num_warps=warps, **pdl.launch(on),
            )  # fmt: skip
            return out, None
        bn, warps = DOWN
        down_row[(triton.cdiv(channels, bn),)](
            act, act if shared_act is None else shared_act, w2, w2 if shared_w2 is None else shared_w2,
            route.choice, route.weights, act if base is None else base, out, *where, conv_scale, channels, *strides,
            inside, base is not None, *window, top_k, shared, triton.next_power_of_2(top_k + shared),
            length, bk, number, bn, on, num_warps=warps, **pdl.launch(on),
        )  # fmt: skip
        return out, None
    products = torch.empty(tokens * top_k, channels, dtype=act.dtype, device=act.device)
    shared, also = products, None
    many = 0  # shared products of a token
    if shared_act is not None and shared_w2 is not None and (fixed or together(w2, tokens)):
        many = shared_w2.shape[1]
        shared = torch.empty(tokens * many, channels, dtype=act.dtype, device=act.device)
        also = Also(shared_act, 1, shared_w2.transpose(0, 1), route.gammas, shared, tokens)
    elif shared_act is not None and shared_w2 is not None:
        many = 1
        shared = F.linear(shared_act.flatten(1), shared_w2.flatten(1))
    (fixed_products if fixed else products_of)(act, w2, route, 1, products, paired=False, also=also)
    if convolved and not inside and tokens >= WALKED and not fixed:
        summed = Parts(shared, many, products, route.weights)
        return walk(summed, taps, view, packing, plane, conv_scale, residual, None, dtype), None
    bc = min(COMBINED, triton.next_power_of_2(channels))
    blocks = triton.cdiv(channels, bc)
    squares = torch.empty(tokens, blocks, dtype=torch.float32, device=act.device) if inside else None
    combine_kernel[(tokens, blocks)](
        products, route.weights, shared, products if base is None else base, out,
        products if squares is None else squares, *where, conv_scale, *strides,
        inside, many, base is not None, *window, inside, top_k, channels, bc, on,
        num_warps=4, **pdl.launch(on),
    )  # fmt: skip
    if convolved and not inside:
        return convolve(out, taps, view, packing, plane, conv_scale, residual, dtype=dtype), None
    return out, None if fixed else squares


@experts_up.implement("triton", when=lambda device: device.type == "cuda")
def experts_up_triton(rows: Normed, route: Routed, w13: Weights, shared_w13: Tensor) -> Activated:
    """`experts_up` of the reference."""
    return Activated(*up(rows, route, w13, shared_w13, None), route)


@experts_down.implement("triton", when=lambda device: device.type == "cuda")
def experts_down_triton(act: Activated, w2: Weights, shared_w2: Tensor) -> Tensor:
    """`experts_down` of the reference."""
    return down(act.routed, act.shared, act.route, w2, shared_w2, None, None, None, None, 0, 1.0)[0]


@experts_settle.implement("triton", when=lambda device: device.type == "cuda")
def experts_settle_triton(
    act: Activated,
    w2: Weights,
    shared_w2: Tensor,
    residual: Tensor | None,
    taps: Tensor,
    view: GroupView,
    packing: Packing,
    *,
    plane: int,
) -> tuple[Tensor, Tensor | None]:
    """`experts_settle` of the reference."""
    return down(act.routed, act.shared, act.route, w2, shared_w2, residual, taps, view, packing, plane, 1.0)


@routed_up.implement("triton", when=lambda device: device.type == "cuda")
def routed_up_triton(rows: Normed, route: Routed, w13: Weights, caps: Caps | None) -> Tensor:
    """`routed_up` of the reference."""
    return up(rows, route, w13, None, caps)[0]


@routed_down.implement("triton", when=lambda device: device.type == "cuda")
def routed_down_triton(act: Tensor, route: Routed, w2: Weights) -> Tensor:
    """`routed_down` of the reference."""
    return down(act, None, route, w2, None, None, None, None, None, 0, 1.0)[0]


@routed_settle.implement("triton", when=lambda device: device.type == "cuda")
def routed_settle_triton(
    act: Tensor,
    route: Routed,
    w2: Weights,
    residual: Tensor | None,
    taps: Tensor,
    view: GroupView,
    packing: Packing,
    *,
    plane: int,
    conv_scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`routed_settle` of the reference."""
    return down(act, None, route, w2, None, residual, taps, view, packing, plane, conv_scale, dtype)
