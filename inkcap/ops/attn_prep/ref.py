"""From projections to what attention reads: convolutions of k and v, head norms, logarithmic scaling, cache write."""

from torch import Tensor

from inkcap.ops import paged
from inkcap.ops.dispatch import op
from inkcap.ops.norm.ref import rms_norm
from inkcap.ops.sconv.ref import sconv
from inkcap.ops.values import GroupView, HeadWeights, LogScaling, Packing


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
    all four planes at the tokens' slots. Returns q [T, heads, D], k and v [T, kv heads, D].
    """
    size = len(weights.q_norm)
    k = sconv(k, weights.k_taps, conv, packing, plane=0).unflatten(1, (-1, size))
    v = sconv(v, weights.v_taps, conv, packing, plane=1).unflatten(1, (-1, size))
    k = rms_norm(k, weights.k_norm, weights.eps)
    q = rms_norm(q.unflatten(1, (-1, size)), weights.q_norm, weights.eps)
    if scaling is not None and scaling.active(packing):
        q = (q.float() * scaling.factor(packing.positions)[:, None, None]).to(q.dtype)
    paged.store(kv, 0, k)
    paged.store(kv, 1, v)
    return q, k, v
