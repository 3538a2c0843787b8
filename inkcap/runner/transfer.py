"""Numbers between host and device without waiting: lists to the device, and a step's results back."""

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values`, numbers or rows of equal length, as a tensor on `device`.

    On a GPU the copy is queued behind what runs there. Its source is pinned memory that PyTorch's allocator reuses
    only after the copy.
    """
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class Download:
    """Tensors on their way to the host. `wait` gives them once they are there; a CPU's are there at once."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.event: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            self.tensors = [
                torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors
            ]
            self.event = torch.cuda.Event()
            self.event.record()

    def wait(self) -> Sequence[Tensor]:
        """The tensors, in the order given. From any thread."""
        if self.event is not None:
            with torch.cuda.device(self.event.device):  # a thread starts with the first one, where it may have no part
                self.event.synchronize()
        return self.tensors
