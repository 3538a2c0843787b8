"""Deterministic mode on a CPU: references that see one token at a time, so that no library call knows of another.

Slow, and meant to be: it makes on any machine what a GPU's tokenwise kernels promise. Products of one row have one
shape, and so have the vectorised functions behind them, whose last elements may be computed another way than the rest.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from inkcap.ops import paged
from inkcap.ops.act.ref import swiglu, swiglu_capped
from inkcap.ops.attention.ref import attention
from inkcap.ops.attn_prep.ref import attn_prep, attn_prep_clip
from inkcap.ops.blocks.ref import copy_blocks
from inkcap.ops.experts.ref import experts_down, experts_settle, experts_up, routed_down, routed_settle, routed_up
from inkcap.ops.linear.ref import logits, product, project, project_each, settle
from inkcap.ops.mix.ref import message_gate, mix, mix_norm, mix_shares
from inkcap.ops.norm.ref import embed_norm, rms_norm
from inkcap.ops.quantize.coded import Weights
from inkcap.ops.quantize.ref import (
    mxfp8_decode,
    mxfp8_encode,
    nvfp4_decode,
    nvfp4_encode,
    nvfp4_encode_four_over_six,
    round_rows,
)
from inkcap.ops.router.ref import route_sigmoid, route_sigmoid_rounded, route_sink
from inkcap.ops.rows.ref import enter_blocks, newest, spread
from inkcap.ops.sample.ref import allow, draw_next, penalize, sample
from inkcap.ops.sconv.ref import sconv
from inkcap.ops.values import Activated, Caps, Gates, GroupView, Normed, Norms, Packing, Routed, Scores

for each in (
    allow, attn_prep, attn_prep_clip, copy_blocks, draw_next, embed_norm, enter_blocks, mix_norm, mxfp8_decode,
    mxfp8_encode, newest, nvfp4_decode, nvfp4_encode, nvfp4_encode_four_over_six, penalize, rms_norm, round_rows,
    route_sigmoid_rounded, sample, sconv, spread,
):  # fmt: skip
    each.tokenwise.add("ref")


def cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def one_by_one(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """`function` of one token's rows [1, ...] at a time, joined: [T, ...]. Rows are copied: alike in memory too."""
    return torch.cat([function(*(x[t : t + 1].clone() for x in rows)) for t in range(len(rows[0]))])


@project.implement("alone", when=cpu, spare=True)
def project_alone(rows: Normed, weight: Tensor) -> Tensor:
    """`project` of the reference."""
    return one_by_one(lambda x: F.linear(x, weight), rows.tensor())


@product.implement("alone", when=cpu, spare=True)
def product_alone(rows: Tensor, weight: Tensor) -> Tensor:
    """`product` of the reference."""
    return one_by_one(lambda x: F.linear(x, weight), rows)


@project_each.implement("alone", when=cpu, spare=True)
def project_each_alone(inputs: Sequence[Normed], weight: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """`project_each` of the reference."""
    parts = weight.split_with_sizes(list(widths))
    return tuple(project_alone(rows, part) for rows, part in zip(inputs, parts, strict=True))


@settle.implement("alone", when=cpu, spare=True)
def settle_alone(
    rows: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    taps: Tensor,
    view: GroupView,
    packing: Packing,
    *,
    plane: int,
    scale: Tensor | None = None,
    conv_scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`settle` of the reference."""
    made = product_alone(rows, weight)
    if scale is not None:
        made = (made.float() * scale).to(made.dtype)
    return sconv(made, taps, view, packing, plane=plane, scale=conv_scale, residual=residual, dtype=dtype), None


@logits.implement("alone", when=cpu, spare=True)
def logits_alone(hidden: Tensor, weight: Tensor, scale: float, soft_cap: float | None = None) -> Tensor:
    """`logits` of the reference."""
    return one_by_one(lambda x: logits.reference(x, weight, scale, soft_cap), hidden)


@swiglu.implement("alone", when=cpu, spare=True)
def swiglu_alone(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """`swiglu` of the reference."""
    return one_by_one(swiglu.reference, x) if scale is None else one_by_one(swiglu.reference, x, scale)


@swiglu_capped.implement("alone", when=cpu, spare=True)
def swiglu_capped_alone(x: Tensor, caps: Caps) -> Tensor:
    """`swiglu_capped` of the reference."""
    return one_by_one(lambda row: swiglu_capped.reference(row, caps), x)


@route_sink.implement("alone", when=cpu, spare=True)
def route_sink_alone(
    rows: Normed, weight: Tensor, bias: Tensor, global_scale: Tensor, *, top_k: int, route_scale: float
) -> Routed:
    """`route_sink` of the reference."""
    made = [
        route_sink.reference(one, weight, bias, global_scale, top_k=top_k, route_scale=route_scale)
        for one in each_normed(rows)
    ]
    return together(made)


@route_sigmoid.implement("alone", when=cpu, spare=True)
def route_sigmoid_alone(rows: Normed, weight: Tensor, bias: Tensor, *, top_k: int, route_scale: float) -> Routed:
    """`route_sigmoid` of the reference."""
    made = [
        route_sigmoid.reference(one, weight, bias, top_k=top_k, route_scale=route_scale) for one in each_normed(rows)
    ]
    return together(made)


def together(made: list[Routed]) -> Routed:
    """Decisions for one token each as those for all of them."""
    choice, weights, gammas = zip(*((route.choice, route.weights, route.gammas) for route in made), strict=True)
    return Routed(torch.cat(choice), torch.cat(weights), torch.cat(gammas))


def each_normed(rows: Normed) -> list[Normed]:
    """One token's rows each, normed."""
    made = [Normed(x.clone(), rows.weight, rows.eps, None, rows.dtype) for x in rows.rows.split(1)]
    for one, normed in zip(made, rows.tensor().split(1), strict=True):
        one.normed = normed.clone()
    return made


def chosen(x: Tensor, w: Weights, choice: Tensor) -> Tensor:
    """Rows [K, C], or one for all of them, of one token times w [E, N, C] of its experts [1, K]: [K, N]."""
    places = choice[0].tolist()
    rows = x.expand(len(places), -1).split(1)
    return torch.cat([F.linear(row.clone(), w[expert]) for row, expert in zip(rows, places, strict=True)])


@routed_up.implement("alone", when=cpu, spare=True)
def routed_up_alone(rows: Normed, route: Routed, w13: Weights, caps: Caps | None) -> Tensor:
    """`routed_up` of the reference."""

    def up(x: Tensor, choice: Tensor) -> Tensor:
        made = chosen(x, w13, choice).unsqueeze(0)
        return swiglu.reference(made) if caps is None else swiglu_capped.reference(made, caps)

    return one_by_one(up, rows.tensor(), route.choice)


@routed_down.implement("alone", when=cpu, spare=True)
def routed_down_alone(act: Tensor, route: Routed, w2: Weights) -> Tensor:
    """`routed_down` of the reference."""

    def down(x: Tensor, choice: Tensor, weights: Tensor) -> Tensor:
        return summed(chosen(x[0], w2, choice), weights).to(x.dtype)

    return one_by_one(down, act, route.choice, route.weights)


def summed(products: Tensor, weights: Tensor) -> Tensor:
    """Rows [K, N] times weights [1, K], added up in order: [1, N] fp32."""
    total = torch.zeros_like(products[:1], dtype=torch.float32)
    for row, weight in zip(products.float().split(1), weights[0], strict=True):
        total += row * weight
    return total


@routed_settle.implement("alone", when=cpu, spare=True)
def routed_settle_alone(
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
    made = routed_down_alone(act, route, w2)
    return sconv(made, taps, view, packing, plane=plane, scale=conv_scale, residual=residual, dtype=dtype), None


@experts_up.implement("alone", when=cpu, spare=True)
def experts_up_alone(rows: Normed, route: Routed, w13: Weights, shared_w13: Tensor) -> Activated:
    """`experts_up` of the reference."""
    shared = product_alone(rows.tensor(), shared_w13.flatten(0, 1)).unflatten(1, (len(shared_w13), -1))
    return Activated(routed_up_alone(rows, route, w13, None), swiglu_alone(shared, route.gammas), route)


@experts_down.implement("alone", when=cpu, spare=True)
def experts_down_alone(act: Activated, w2: Weights, shared_w2: Tensor) -> Tensor:
    """`experts_down` of the reference."""

    def down(routed: Tensor, shared: Tensor, choice: Tensor, weights: Tensor) -> Tensor:
        own = F.linear(shared.flatten(1), shared_w2.flatten(1)).float()
        return (own + summed(chosen(routed[0], w2, choice), weights)).to(shared.dtype)

    return one_by_one(down, act.routed, act.shared, act.route.choice, act.route.weights)


@experts_settle.implement("alone", when=cpu, spare=True)
def experts_settle_alone(
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
    made = experts_down_alone(act, w2, shared_w2)
    return sconv(made, taps, view, packing, plane=plane, residual=residual), None


@mix.implement("alone", when=cpu, spare=True)
def mix_alone(sources: Sequence[Tensor], queries: Tensor, eps: float) -> Tensor:
    """`mix` of the reference."""
    return one_by_one(lambda *one: mix.reference(one, queries, eps).transpose(0, 1), *sources).transpose(0, 1)


@mix_shares.implement("alone", when=cpu, spare=True)
def mix_shares_alone(sources: Sequence[Tensor], queries: Tensor, eps: float) -> Tensor:
    """`mix_shares` of the reference."""
    return one_by_one(lambda *one: mix_shares.reference(one, queries, eps).transpose(0, 1), *sources).transpose(0, 1)


@message_gate.implement("alone", when=cpu, spare=True)
def message_gate_alone(
    sources: Sequence[Tensor],
    queries: Tensor,
    eps: float,
    senders: Sequence[Tensor],
    shares: Sequence[Tensor],
    gates: Gates,
    norms: Norms,
    late: int = 2,
) -> tuple[Normed, ...]:
    """`message_gate` of the reference."""
    first, second = len(sources), len(sources) + len(senders)

    def gated(*one: Tensor) -> Tensor:
        made = message_gate.reference(one[:first], queries, eps, one[first:second], one[second:], gates, norms)
        return torch.stack([rows.rows for rows in made], 1)

    return norms.later(one_by_one(gated, *sources, *senders, *shares).unbind(1))


@attention.implement("alone", when=cpu, spare=True)
def attention_alone(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    scores: Scores,
    view: GroupView,
    packing: Packing,
    sinks: Tensor | None = None,
    gate: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """`attention` of the reference: each token as a sequence that continues what is before it."""
    out: list[Tensor] = []
    for start, stop, row, first in packing.spans:
        low = 0 if scores.window is None else max(0, first - scores.window + 1)
        held = tuple(
            torch.cat([own.new_zeros(low, *own.shape[1:]), paged.read(view, n, row, low, first).to(own.dtype),
                       own[start:stop]])[None]
            for n, own in enumerate((k, v))
        )  # fmt: skip
        whole = replace(view, block=held[0].shape[1], table=view.table.new_zeros(1, 1), planes=held, memo={})
        for token in range(start, stop):
            here, at = slice(token, token + 1), first + token - start
            one = replace(packing, positions=packing.positions[here], spans=((0, 1, 0, at),))
            sink, gated = (None if x is None else x[here].clone() for x in (sinks, gate))
            own_q, own_k, own_v, own_r = (x[here].clone() for x in (q, k, v, r))
            out.append(attention.reference(own_q, own_k, own_v, own_r, scores, whole, one, sink, gated, v_scale))
    return torch.cat(out)
