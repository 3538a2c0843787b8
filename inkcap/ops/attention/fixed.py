"""Attention in deterministic mode on a GPU: each token as the newest of its own sequence, split over its keys.

Full and windowed groups keep all of a step's tokens, and the step's keys are stored before attention runs, so all that
a token sees but itself is in the pages. How its keys are split depends on its position alone: the launch has as many
splits as the longest sequence could use. A prompt pays for it, since no two of its queries share what they read.
"""

from dataclasses import replace

import torch
from torch import Tensor

from inkcap.ops.attention import splits
from inkcap.ops.attention.ref import attention
from inkcap.ops.attention.triton import NOBODY, check, few
from inkcap.ops.values import GroupView, Packing, Scores

PARTS = 1 << 17  # of sums that are kept at a time, each of a head's size
PROGRAMS = 65535  # of a launch along its second axis


@attention.implement("fixed", when=lambda device: device.type == "cuda", spare=True)
def attention_fixed(
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
    """`attention` of the reference, rounded as `attention_triton` does."""
    check(q, k, v, r, scores, view, gate)
    (tokens, heads, _), kv = q.shape, k.shape[1]
    out = torch.empty_like(q, dtype=r.dtype)
    plan = splits.fixed(heads // kv, kv, scores.bias.shape[1], scores.window)
    early = packing.widest == 1 and scores.window is not None  # the same sums
    most = max(1, min(PARTS // (heads * plan.total), PROGRAMS // kv))
    for begin in range(0, tokens, most):
        here = slice(begin, min(begin + most, tokens))
        sink, gated = (None if x is None else x[here] for x in (sinks, gate))
        few(
            q[here], k[here], v[here], r[here], out[here], scores, view, alone(view, packing, here), sink, gated,
            v_scale, 1, NOBODY, replace(plan, tiles=here.stop - begin), early,
        )  # fmt: skip
    return out.flatten(1)


def alone(view: GroupView, packing: Packing, here: slice) -> Packing:
    """Tokens `here` as a sequence each; made once a step."""
    if packing.widest == 1 and here == slice(0, len(packing.rows)):
        return packing
    found = view.memo.get(("alone", here.start))
    if found is None:
        count = here.stop - here.start
        found = Packing(
            starts=torch.arange(count + 1, dtype=torch.int32, device=packing.positions.device),
            rows=packing.row_of[here],
            first=packing.positions[here].to(torch.int32),
            row_of=packing.row_of[here],
            positions=packing.positions[here],
            spans=tuple((n, n + 1, 0, 0) for n in range(count)),
        )
        view.memo["alone", here.start] = found
    return found  # pyright: ignore[reportReturnType]  # a memo has no types
