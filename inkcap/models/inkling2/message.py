"""What a later pass of the loop gets from the one before: messages, and gates that let them into a layer's inputs."""

import torch
from torch import Tensor

from inkcap.layers.linear import prefixed
from inkcap.ops.mix.ref import message_gate, mix
from inkcap.parallel.slot import Slot

ROLES = ("q", "k", "v", "mlp")

Messages = tuple[Tensor, ...]  # fp32 [T, C] for each of ROLES


class Gate:
    """Forgets part of an input and gains part of a message, per channel. Every rank holds all of it."""

    def __init__(self, channels: int, rank: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.down = torch.empty(rank, 2 * channels, dtype=dtype, device=device)
        self.forget = torch.empty(channels, rank, dtype=torch.float32, device=device)
        self.gain = torch.empty(channels, rank, dtype=torch.float32, device=device)
        self.eps = eps

    def slots(self) -> dict[str, Slot]:
        """`down` [rank, 2 C], `forget` and `gain` [C, rank]."""
        tensors = {"down": self.down, "forget": self.forget, "gain": self.gain}
        return {name: Slot(tensor, tuple(tensor.shape)) for name, tensor in tensors.items()}

    def __call__(self, rows: Tensor, message: Tensor) -> Tensor:
        """fp32 rows [T, C] and message [T, C] to gated rows [T, C]."""
        return message_gate(rows, message, self.down, self.forget, self.gain, self.eps)


class Gates:
    """The four gates of one layer."""

    def __init__(self, channels: int, rank: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        every = [Gate(channels, rank, eps, dtype, device) for _ in ROLES]
        self.attention = every[:3]
        self.mlp = every[3]

    def slots(self) -> dict[str, Slot]:
        """`{q,k,v,mlp}.{down,forget,gain}`."""
        gates = dict(zip(ROLES, (*self.attention, self.mlp), strict=True))
        return {key: slot for name, gate in gates.items() for key, slot in prefixed(name, gate.slots()).items()}


class Messenger:
    """Queries of every looped layer over the blocks that the pass before made. Stored in two halves, as published."""

    def __init__(self, layers: int, channels: int, eps: float, device: torch.device) -> None:
        self.outer = torch.empty(2 * layers, channels, dtype=torch.float32, device=device)  # q, mlp of each layer
        self.inner = torch.empty(2 * layers, channels, dtype=torch.float32, device=device)  # k, v of each layer
        self.eps = eps

    def slots(self) -> dict[str, Slot]:
        """`outer` and `inner` [2 layers, C]: queries of q and mlp, and of k and v, layer by layer."""
        return {name: Slot(half, tuple(half.shape)) for name, half in (("outer", self.outer), ("inner", self.inner))}

    def __call__(self, sources: list[Tensor], layer: int) -> Messages:
        """Messages to one layer, counted from the loop's first, out of sources [T, C]."""
        (q, mlp), (k, v) = self.outer[2 * layer : 2 * layer + 2], self.inner[2 * layer : 2 * layer + 2]
        return mix(sources, torch.stack((q, k, v, mlp)), self.eps).unbind(0)
