"""From projections to what attention reads: convolutions of k and v, head norms, logarithmic scaling, cache write."""

import torch
from torch import Tensor

from inkcap.ops import paged
from inkcap.ops.dispatch import op
from inkcap.ops.norm.ref import rms_norm
from inkcap.ops.sconv.ref import sconv
from inkcap.ops.values import ClipWeights, CodeScales, GroupView, HeadWeights, LogScaling, Packing

LARGEST = 448.0  # of E4M3


def encode(x: Tensor, scale: Tensor) -> Tensor:
    """Heads [T, kv heads, D] as codes, nearest, ties to even, saturating; scale: [kv heads]."""
    return (x.float() / scale[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def keep(q: Tensor, k: Tensor, v: Tensor, codes: CodeScales | None, kv: GroupView) -> tuple[Tensor, Tensor, Tensor]:
    """Store k and v [T, kv heads, D]; returns q, k and v as attention takes them.

    With codes, k and v come as whoever reads the cache sees them, divided by their scales, and q [T, heads, D]
    multiplied by that of k. All three are fp16 then where they were bf16: it holds codes exactly, and q above 2^-14.
    """
    if codes is not None:
        dtype = torch.float16 if q.dtype is torch.bfloat16 else q.dtype
        q = (q.float() * codes.k.repeat_interleave(q.shape[1] // k.shape[1])[:, None]).to(dtype)
        k, v = encode(k, codes.k), encode(v, codes.v)
        paged.store(kv, 0, k)
        paged.store(kv, 1, v)
        return q, k.to(dtype), v.to(dtype)
    paged.store(kv, 0, k)
    paged.store(kv, 1, v)
    return q, k, v


@op
def attn_prep(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: HeadWeights,
    conv: GroupView,
    kv: GroupView,
    packing: Packing,
    scaling: LogScaling | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """RMS-normed heads. Rounds after each convolution, each norm and the scaling.

    q: [T, heads * D]; k, v: [T, kv heads * D], possibly views with a row stride. `conv` has the inputs of the k and v
    convolutions in planes 0 and 1, `kv` has conditioned k and v in planes 0 and 1, [blocks, block, kv heads, D]. Writes
    all four planes at the tokens' slots. Returns q [T, heads, D], k and v [T, kv heads, D], by way of `keep`.
    """
    size = len(weights.q_norm)
    k = sconv(k, weights.k_taps, conv, packing, plane=0).unflatten(1, (-1, size))
    v = sconv(v, weights.v_taps, conv, packing, plane=1).unflatten(1, (-1, size))
    k = rms_norm(k, weights.k_norm, weights.eps)
    q = rms_norm(q.unflatten(1, (-1, size)), weights.q_norm, weights.eps)
    if scaling is not None and scaling.active(packing):
        q = (q.float() * scaling.factor(packing.positions)[:, None, None]).to(q.dtype)
    return keep(q, k, v, weights.codes, kv)


def clip(x: Tensor, limit: float) -> Tensor:
    """Each fp32 vector of the last axis scaled down to length `limit` when it is longer."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (limit / (length + 1e-6)).clamp(max=1.0)


@op
def attn_prep_clip(
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
    """Clipped heads: q and r after a learned scale, k without one; v is RMS-normed without a weight.

    q: [T, heads * D]; k, v: [T, kv heads * D]; r: [T, heads * states]; any of them a view with a row stride. k_added,
    v_added: [T, kv heads, W], added to the taps token by token as in `sconv`. `conv` and `kv` as in attn_prep; writes
    all four planes. Rounds after each convolution, each clip or norm, and the scaling of q and r. Returns q
    [T, heads, D], k and v [T, kv heads, D], by way of `keep`, r [T, heads, states].
    """
    size = weights.q_scale.shape[1]
    scale = weights.conv_scale
    k = sconv(k, weights.k_taps, conv, packing, plane=0, scale=scale, added=k_added).unflatten(1, (-1, size))
    v = sconv(v, weights.v_taps, conv, packing, plane=1, scale=scale, added=v_added).unflatten(1, (-1, size))
    k = clip(k.float(), weights.qk_limit).to(k.dtype)
    v = (v.float() * torch.rsqrt(v.float().square().mean(-1, keepdim=True) + weights.eps)).to(v.dtype)
    q = clip(q.unflatten(1, (-1, size)).float() * weights.q_scale, weights.qk_limit).to(q.dtype)
    r = clip(r.unflatten(1, (-1, weights.r_scale.shape[1])).float() * weights.r_scale, weights.r_limit).to(r.dtype)
    if scaling is not None and scaling.active(packing):
        factor = scaling.factor(packing.positions)[:, None, None]
        q, r = (q.float() * factor).to(q.dtype), (r.float() * factor).to(r.dtype)
    return *keep(q, k, v, weights.codes, kv), r
