"""Clipped heads in fewer calls."""

import torch
import torch.nn.functional as F
from torch import Tensor

from inkcap.ops.attn_prep.ref import attn_prep_clip, keep
from inkcap.ops.sconv.ref import sconv
from inkcap.ops.values import ClipWeights, GroupView, LogScaling, Packing


def clip_(x: Tensor, limit: float) -> Tensor:
    """The reference's `clip` of fp32 vectors, in place."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x.mul_(length.add_(1e-6).reciprocal_().mul_(limit).clamp_(max=1.0))


@attn_prep_clip.implement("cpu", when=lambda device: device.type == "cpu")
def attn_prep_clip_cpu(
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
    """`attn_prep_clip` of the reference in fp32; other dtypes, which round between the steps, are left to it."""
    if q.dtype is not torch.float32:
        return attn_prep_clip.reference(q, k, v, r, weights, conv, kv, packing, scaling, k_added, v_added)
    size, states = weights.q_scale.shape[1], weights.r_scale.shape[1]
    scale = weights.conv_scale
    k = sconv(k, weights.k_taps, conv, packing, plane=0, scale=scale, added=k_added).unflatten(1, (-1, size))
    v = sconv(v, weights.v_taps, conv, packing, plane=1, scale=scale, added=v_added).unflatten(1, (-1, size))
    k = clip_(k, weights.qk_limit)
    v = F.rms_norm(v, (size,), None, weights.eps)
    q = clip_(q.unflatten(1, (-1, size)) * weights.q_scale, weights.qk_limit)
    r = clip_(r.unflatten(1, (-1, states)) * weights.r_scale, weights.r_limit)
    if scaling is not None and scaling.active(packing):
        factor = scaling.factor(packing.positions)[:, None, None]
        q, r = q.mul_(factor), r.mul_(factor)
    return *keep(q, k, v, weights.codes, kv), r
