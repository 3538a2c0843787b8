"""Geometry of heads, the learned bias by distance, and the attention both of them end in."""

from dataclasses import dataclass

import torch
from torch import Tensor

from inkcap.layers.batch import Batch
from inkcap.ops.attention.ref import attention
from inkcap.ops.attn_prep.ref import LARGEST
from inkcap.ops.values import CodeScales, Scores
from inkcap.parallel.comm import Comm
from inkcap.parallel.share import Share, split, split_or_repeat
from inkcap.parallel.slot import Slot


@dataclass(frozen=True)
class Heads:
    """The heads one rank computes. Query heads share kv heads in equal, contiguous groups."""

    query: Share
    kv: Share
    size: int  # of one head

    @staticmethod
    def on(comm: Comm, query: int, kv: int, size: int) -> "Heads":
        """This rank's share; kv heads are repeated when there are more ranks than kv heads."""
        return Heads(split(query, comm, "number of query heads"), split_or_repeat(kv, comm, "number of kv heads"), size)


class RelBias:
    """A bank of bias-by-distance profiles, mixed by each query's relative state. Every rank holds all of it."""

    def __init__(self, states: int, extent: int, dtype: torch.dtype, device: torch.device) -> None:
        self.proj = torch.empty(states, extent, dtype=dtype, device=device)  # [states, distance]

    def slots(self) -> dict[str, Slot]:
        """`proj` [states, extent]."""
        return {"proj": Slot(self.proj, tuple(self.proj.shape))}


ROUNDED = 1.02  # what rounding to bf16, three times over, may add to a bound


def empty_codes(heads: int, device: torch.device) -> CodeScales:
    """Scales of codes of `heads` kv heads, to be filled."""
    return CodeScales(*(torch.empty(heads, dtype=torch.float32, device=device) for _ in "kv"))


def code_slots(codes: CodeScales | None, kv: Share) -> dict[str, Slot]:
    """`k_scale` and `v_scale` [kv heads], where there are codes."""
    if codes is None:
        return {}
    return {f"{name}_scale": Slot(scale, (kv.whole,), 0, kv.start) for name, scale in (("k", codes.k), ("v", codes.v))}


def power_for(bound: Tensor) -> Tensor:
    """The smallest powers of two by which numbers up to `bound`, fp32, are divided to fit codes.

    A code has three bits behind its leading one whatever its size, down to 1/28672 of the largest: a scale that is too
    large by some powers of two costs no accuracy.
    """
    mantissa, exponent = torch.frexp(bound * (ROUNDED / LARGEST))
    return torch.ldexp(torch.ones_like(bound), exponent - (mantissa == 0.5).int())


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    scores: Scores,
    group: str,
    batch: Batch,
    sinks: Tensor | None = None,
    gate: Tensor | None = None,
    codes: CodeScales | None = None,
) -> Tensor:
    """Heads [T, heads, D] and relative states [T, heads * states] to [T, heads * D]; see `ops/attention`.

    `codes`: the scales, where the cache holds codes.
    """
    states = r.unflatten(1, (-1, len(scores.bias)))
    v_scale = None if codes is None else codes.v
    return attention(q, k, v, states, scores, batch.view(group), batch.packing, sinks, gate, v_scale)
