"""What a later pass of the loop gets from the one before: messages, and gates that let them into a layer's inputs."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from inkcap.layers.blockstream import BlockMix, Inputs, Reads
from inkcap.ops.mix.ref import message_gate, mix_shares
from inkcap.ops.values import Gates
from inkcap.parallel.slot import Slot

ROLES = ("q", "k", "v", "mlp")
ORDER = ("q", "k", "mlp", "v")  # in which a layer's queries over the pass before are kept


@dataclass(frozen=True, slots=True)
class Messages:
    """To one layer: the sources of all messages, and what each role's is made of."""

    sources: list[Tensor]  # [T, C] each
    shares: tuple[Tensor, ...]  # fp32 [T, S] for each of ROLES


class MessageGates:
    """The four gates of one layer: each forgets part of an input and gains part of a message, per channel.

    Every rank holds all of them.
    """

    def __init__(self, channels: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.down = torch.empty(len(ROLES), rank, 2 * channels, dtype=dtype, device=device)
        self.forget, self.gain = (
            torch.empty(len(ROLES), channels, rank, dtype=dtype, device=device) for _ in ("forget", "gain")
        )
        self.attention = Gates(self.down[:3], self.forget[:3], self.gain[:3])
        self.mlp = Gates(self.down[3:], self.forget[3:], self.gain[3:])

    def slots(self) -> dict[str, Slot]:
        """`{q,k,v,mlp}.down` [R, 2 C], `.forget` and `.gain` [C, R]."""
        tensors = {"down": self.down, "forget": self.forget, "gain": self.gain}
        return {
            f"{role}.{name}": Slot(tensor[i], tuple(tensor[i].shape))
            for i, role in enumerate(ROLES)
            for name, tensor in tensors.items()
        }

    def of_attention(self, reads: BlockMix, messages: Messages) -> Reads:
        """Reads three inputs, through one mixture or three."""
        return partial(self.gated, reads, self.attention, messages.sources, messages.shares[:3])

    def of_mlp(self, reads: BlockMix, messages: Messages) -> Reads:
        """Reads one input."""
        return partial(self.gated, reads, self.mlp, messages.sources, messages.shares[3:])

    def gated(
        self,
        reads: BlockMix,
        gates: Gates,
        senders: list[Tensor],
        shares: tuple[Tensor, ...],
        sources: list[Tensor],
        late: int,
    ) -> Inputs:
        """Mixtures of `sources` with messages of `senders` let in."""
        return message_gate(sources, reads.queries, reads.eps, senders, shares, gates, reads.norms, late)


class Messenger:
    """Queries of every looped layer over the blocks that the pass before made."""

    def __init__(self, layers: int, channels: int, eps: float, device: torch.device) -> None:
        # [layers, two halves of two roles]: what is published apart lies between each other, in the order of ORDER
        self.queries = torch.empty(2 * layers, 2, channels, dtype=torch.float32, device=device)
        self.eps = eps

    def slots(self) -> dict[str, Slot]:
        """`outer` and `inner` [2 layers, C]: queries of q and mlp, and of k and v, layer by layer."""
        halves = {name: self.queries[:, i] for i, name in enumerate(("outer", "inner"))}
        return {name: Slot(half, tuple(half.shape)) for name, half in halves.items()}

    def __call__(self, sources: list[Tensor]) -> list[Messages]:
        """Messages of a whole pass out of sources [T, C], one for each layer of the loop."""
        shares = mix_shares(sources, self.queries.flatten(0, 1), self.eps).unflatten(0, (-1, len(ORDER)))
        return [Messages(sources, tuple(layer[ORDER.index(role)] for role in ROLES)) for layer in shares]
