"""Attention of packed tokens over paged keys with a learned bias by distance."""

import torch
from torch import Tensor

from inkcap.ops import paged
from inkcap.ops.dispatch import op
from inkcap.ops.values import GroupView, Packing, Scores


@op
def attention(
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
    """softmax(q . k * scale + bias) v, fp32 inside, one rounding at the end. Head h reads kv head h div group.

    q: [T, heads, D], log scaling applied; k, v: [T, kv heads, D], this step's; r: [T, heads, states], possibly a view
    with a row stride. Older keys and values are planes 0 and 1 of `view`, [blocks, block, kv heads, D]. The bias
    r @ scores.bias is rounded to r's dtype, then again after log scaling. sinks: [T, heads], logits of a key
    without a value. gate: [T, heads * D]; the result is multiplied by its sigmoid before rounding. v_scale: [kv heads]
    fp32, what the result is multiplied by; where it is given the planes hold codes, see `attn_prep.ref.keep`. Returns
    [T, heads * D] in the dtype of r.
    """
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q, dtype=r.dtype)
    for start, stop, row, first in packing.spans:
        low = 0 if scores.window is None else max(0, first - scores.window + 1)
        keys, values = (
            torch.cat([paged.read(view, plane, row, low, first).float(), own[start:stop].float()])
            for plane, own in enumerate((k, v))
        )
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        positions = packing.positions[start:stop]
        bias = (r[start:stop].float() @ scores.bias.float()).to(r.dtype)  # [n, heads, extent]
        if scores.scaling is not None:
            bias = (bias.float() * scores.scaling.factor(positions)[:, None, None]).to(r.dtype)
        distance = positions[:, None] - torch.arange(low, low + len(keys), device=q.device)  # [n, keys]
        near = (distance >= 0) & (distance < scores.bias.shape[1])
        picked = bias.float().transpose(0, 1).gather(2, distance.where(near, 0).expand(q.shape[1], -1, -1))
        z = torch.einsum("nhd,khd->hnk", q[start:stop].float(), keys) * scores.scale + picked.where(near, 0.0)
        z = z.masked_fill(distance < 0, -torch.inf)
        if scores.window is not None:
            z = z.masked_fill(distance >= scores.window, -torch.inf)
        if sinks is not None:
            z = torch.cat([z, sinks[start:stop].float().t().unsqueeze(2)], 2)
            values = torch.cat([values, torch.zeros_like(values[:1])])
        heads = torch.einsum("hnk,khd->nhd", z.softmax(-1), values)
        if v_scale is not None:
            heads = heads * v_scale.repeat_interleave(group)[:, None]
        if gate is not None:
            heads = heads * gate[start:stop].float().sigmoid().view_as(heads)
        out[start:stop] = heads.to(out.dtype)
    return out.flatten(1)
