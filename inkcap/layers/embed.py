"""From token ids to hidden states, and from hidden states to logits."""

import torch
from torch import Tensor

from inkcap.layers.linear import prefixed
from inkcap.layers.norm import RMSNorm
from inkcap.ops.linear.ref import logits
from inkcap.ops.norm.ref import embed_norm
from inkcap.parallel.comm import Comm
from inkcap.parallel.share import split
from inkcap.parallel.slot import Slot

ALIGNED = 64  # rows: a library's product whose result has another number of columns is a third slower


class NormedEmbedding:
    """A table of `vocabulary` rows, normed when read. Every rank holds all of it."""

    def __init__(self, vocabulary: int, channels: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.table = torch.empty(vocabulary, channels, dtype=dtype, device=device)
        self.norm = RMSNorm(channels, eps, device)

    def slots(self) -> dict[str, Slot]:
        """`weight` [V, C] and `norm.weight` [C]."""
        return {"weight": Slot(self.table, tuple(self.table.shape)), **prefixed("norm", self.norm.slots())}

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] to hidden states [T, C]."""
        return embed_norm(ids, self.table, self.norm.weight, self.norm.eps)


class Head:
    """Logits of the words that exist, times `scale`, under a soft cap if there is one. The words are spread over ranks.

    `vocabulary` counts the rows of the checkpoint's matrix, padding included; ids from `existing` on are padding.
    """

    def __init__(
        self,
        vocabulary: int,
        existing: int,
        channels: int,
        scale: float,
        comm: Comm,
        dtype: torch.dtype,
        device: torch.device,
        soft_cap: float | None = None,
    ) -> None:
        self.words = split(vocabulary, comm, "vocabulary")
        self.existing = existing
        self.scale = scale
        self.soft_cap = soft_cap
        self.comm = comm
        self.weight = torch.empty(self.words.count, channels, dtype=dtype, device=device)
        # ranks gather equal parts, then cut
        self.used = self.weight if comm.size > 1 else self.weight[: -(-existing // ALIGNED) * ALIGNED]

    def slots(self) -> dict[str, Slot]:
        """`weight` [V, C]."""
        whole = (self.words.whole, self.weight.shape[1])
        return {"weight": Slot(self.weight, whole, dim=0, start=self.words.start)}

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [S, C] to logits [S, existing] in fp32, whole on every rank; rows may stand apart."""
        return self.comm.all_gather(logits(hidden, self.used, self.scale, self.soft_cap), 1)[:, : self.existing]
