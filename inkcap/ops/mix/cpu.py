"""Mixtures of all sources at once: one norm, one product for the scores, one for the sums."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from inkcap.ops.mix.ref import mix


@mix.implement("cpu", when=lambda device: device.type == "cpu")
def mix_cpu(sources: Sequence[Tensor], queries: Tensor, eps: float) -> Tensor:
    """`mix` of the reference; the result may be a view with a row stride."""
    channels = queries.shape[1]
    stacked = torch.stack([source.float() for source in sources], 1)  # [T, S, C]
    normed = F.rms_norm(stacked, (channels,), None, eps)
    chances = F.linear(normed, queries).mul_(channels**-0.5).softmax(1)  # [T, S, Q]
    return torch.bmm(chances.transpose(1, 2), normed).transpose(0, 1)
