"""Geometry of heads, the learned bias by distance, and the attention both of them end in."""

from dataclasses import dataclass

import torch
from torch import Tensor

from inkcap.layers.batch import Batch
from inkcap.ops.attention.ref import attention
from inkcap.ops.values import Scores
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
) -> Tensor:
    """Heads [T, heads, D] and relative states [T, heads * states] to [T, heads * D]; see `ops/attention`."""
    states = r.unflatten(1, (-1, len(scores.bias)))
    return attention(q, k, v, states, scores, batch.view(group), batch.packing, sinks, gate)
