"""Boxes: memory through which programs of one launch tell each other words. Whoever wants a word sees when it is there:
no barrier, no fence, no second launch. Every word of a box is empty between launches.
"""

import torch
from torch import Tensor

BOXES: dict[tuple[torch.device, int, torch.dtype, int, int], Tensor] = {}


def box_of(owner: Tensor, words: int, dtype: torch.dtype, empty: int) -> Tensor:
    """[words] of an integer dtype, each of them `empty` when it is made. It is the owner's, by its address, since
    engines in one process may run at the same time.

    It must not be made while a graph is captured, which would own it; so a step is run before steps are captured. As
    graphs have its address, it stays until the process ends.
    """
    device = owner.device
    key = (device, owner.data_ptr(), dtype, words, empty)
    if key not in BOXES:
        assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
        BOXES[key] = torch.full((words,), empty, dtype=dtype, device=device)
    return BOXES[key]
