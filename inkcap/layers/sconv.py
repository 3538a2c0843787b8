"""Short convolutions: their taps and the plane of state each one keeps."""

import torch
from torch import Tensor

from inkcap.parallel.share import Share
from inkcap.parallel.slot import Slot


class ShortConv:
    """Static taps of one convolution over a rank's channels. Its state is plane `plane` of the group `sconv`.

    Token and taps' sum are multiplied by `scale`.
    """

    def __init__(self, channels: Share, width: int, plane: int, device: torch.device, scale: float = 1.0) -> None:
        self.channels = channels
        self.plane = plane
        self.scale = scale
        # fp32 because all of the convolution is; the taps of one distance are contiguous, as ops read them
        self.taps = torch.empty(width, channels.count, dtype=torch.float32, device=device).t()  # [channels, width]

    def slots(self) -> dict[str, Slot]:
        """`weight` [channels, 1, width]."""
        whole = (self.channels.whole, 1, self.taps.shape[1])
        return {"weight": Slot(self.taps.unsqueeze(1), whole, dim=0, start=self.channels.start)}


class DynamicTaps:
    """Taps of a convolution that every token changes: static ones per channel, plus a projection shared by a head.

    Both are stored by distance, as published: the token itself comes first.
    """

    def __init__(self, heads: Share, size: int, width: int, device: torch.device) -> None:
        self.heads = heads
        self.size = size
        self.static = torch.empty(width, heads.count * size, dtype=torch.float32, device=device)
        # as `ops.sconv` takes them, the token itself last, [channels, width]: made by `unpack`
        self.taps = torch.empty(width, heads.count * size, dtype=torch.float32, device=device).t()

    def slots(self) -> dict[str, Slot]:
        """`static` [width, channels]."""
        channels = self.heads.times(self.size)
        return {"static": Slot(self.static, (len(self.static), channels.whole), dim=1, start=channels.start)}

    def unpack(self) -> None:
        """Called once the slots are filled; captured steps read what this makes, so it stays where it is."""
        self.taps.copy_(self.static.flip(0).t())

    def added(self, projected: Tensor) -> Tensor:
        """A token's projection [T, heads * width] as what `ops.sconv` adds: [T, heads, width]."""
        return projected.unflatten(1, (self.heads.count, -1))
