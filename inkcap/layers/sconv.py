"""Short convolutions: their taps and the plane of state each one keeps."""

import torch

from inkcap.parallel.slot import Share, Slot


class ShortConv:
    """Static taps of one convolution over a rank's channels. Its state is plane `plane` of the group `sconv`."""

    def __init__(self, channels: Share, width: int, plane: int, device: torch.device) -> None:
        self.channels = channels
        self.plane = plane
        # fp32 because all of the convolution is; the taps of one distance are contiguous, as ops read them
        self.taps = torch.empty(width, channels.count, dtype=torch.float32, device=device).t()  # [channels, width]

    def slots(self) -> dict[str, Slot]:
        """`weight` [channels, 1, width]."""
        whole = (self.channels.whole, 1, self.taps.shape[1])
        return {"weight": Slot(self.taps.unsqueeze(1), whole, dim=0, start=self.channels.start)}
