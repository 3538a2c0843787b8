"""Routers: which experts a token uses, and how much."""

import torch
from torch import Tensor

from inkcap.ops.quantize.ref import Rounding
from inkcap.ops.router.ref import route_sigmoid, route_sigmoid_rounded, route_sink
from inkcap.ops.values import Normed, Routed
from inkcap.parallel.slot import Slot


class SinkRouter:
    """Chooses by biased sigmoid; shared experts compete in the weights. Every rank holds all of it and routes alike."""

    def __init__(
        self,
        channels: int,
        experts: int,
        shared: int,
        top_k: int,
        route_scale: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.top_k = top_k
        self.route_scale = route_scale
        self.weight = torch.empty(experts + shared, channels, dtype=dtype, device=device)
        self.bias = torch.empty(experts, dtype=torch.float32, device=device)
        self.global_scale = torch.empty(1, dtype=torch.float32, device=device)

    def slots(self) -> dict[str, Slot]:
        """`weight` [experts + shared, C], `bias` [experts] and `global_scale` [1]."""
        tensors = {"weight": self.weight, "bias": self.bias, "global_scale": self.global_scale}
        return {name: Slot(tensor, tuple(tensor.shape)) for name, tensor in tensors.items()}

    def __call__(self, rows: Normed) -> Routed:
        """Normed rows [T, C] to choice and weights."""
        return route_sink(
            rows, self.weight, self.bias, self.global_scale, top_k=self.top_k, route_scale=self.route_scale
        )


class SigmoidRouter:
    """Chooses by biased sigmoid; weights are normalised over the chosen. Every rank holds all of it and routes alike.

    There are no shared experts.
    """

    def __init__(
        self, channels: int, experts: int, top_k: int, route_scale: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.top_k = top_k
        self.route_scale = route_scale
        self.weight = torch.empty(experts, channels, dtype=dtype, device=device)
        self.bias = torch.empty(experts, dtype=torch.float32, device=device)

    def slots(self) -> dict[str, Slot]:
        """`weight` [experts, C] and `bias` [experts]."""
        return {
            name: Slot(tensor, tuple(tensor.shape)) for name, tensor in (("weight", self.weight), ("bias", self.bias))
        }

    def __call__(self, rows: Normed) -> Routed:
        """Normed rows [T, C] to choice and weights."""
        return route_sigmoid(rows, self.weight, self.bias, top_k=self.top_k, route_scale=self.route_scale)

    def rounding(self, rows: Normed, how: Rounding) -> tuple[Routed, Tensor]:
        """The same, and the normed rows [T, C] rounded, which it does not see so."""
        return route_sigmoid_rounded(rows, self.weight, self.bias, how, top_k=self.top_k, route_scale=self.route_scale)
