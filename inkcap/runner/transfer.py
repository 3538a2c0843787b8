"""Numbers between host and device without waiting: lists to the device, and a step's results back."""

import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

HOST = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}
WHOLE = {torch.int32: "i", torch.int64: "q"}  # as struct spells them


def upload(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values`, numbers or rows of equal length, as a tensor on `device`.

    On a GPU the copy is queued behind what runs there. Its source is pinned memory that PyTorch's allocator reuses
    only after the copy. 32,768 ids in a list take struct 0.23 ms, numpy 0.45 and PyTorch 1.5.
    """
    if dtype in WHOLE and values and isinstance(values[0], int):
        host = torch.empty(len(values), dtype=dtype, pin_memory=device.type == "cuda")
        struct.pack_into(f"{len(values)}{WHOLE[dtype]}", host.numpy().data, 0, *values)
    else:
        host = torch.from_numpy(np.array(values, dtype=HOST[dtype]))
        host = host.pin_memory() if device.type == "cuda" else host
    return host if device.type == "cpu" else host.to(device, non_blocking=True)


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
