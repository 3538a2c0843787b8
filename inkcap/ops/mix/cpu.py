"""Mixtures of all sources at once: one norm, one product for the scores, one for the sums."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from inkcap.ops.mix.ref import message_gate, mix


@mix.implement("cpu", when=lambda device: device.type == "cpu")
def mix_cpu(sources: Sequence[Tensor], queries: Tensor, eps: float) -> Tensor:
    """`mix` of the reference; the result may be a view with a row stride."""
    channels = queries.shape[1]
    stacked = torch.stack([source.float() for source in sources], 1)  # [T, S, C]
    normed = F.rms_norm(stacked, (channels,), None, eps)
    chances = F.linear(normed, queries).mul_(channels**-0.5).softmax(1)  # [T, S, Q]
    return torch.bmm(chances.transpose(1, 2), normed).transpose(0, 1)


@message_gate.implement("cpu", when=lambda device: device.type == "cpu")
def message_gate_cpu(rows: Tensor, message: Tensor, down: Tensor, forget: Tensor, gain: Tensor, eps: float) -> Tensor:
    """`message_gate` of the reference."""
    both = F.rms_norm(torch.stack((rows.float(), message.float()), 1), rows.shape[1:], None, eps)  # [T, 2, C]
    state = F.linear(both.flatten(1).to(down.dtype), down).float()  # [T, R]
    kept = torch.addcmul(rows, F.linear(state, forget).tanh_(), rows, value=-1)
    return torch.addcmul(kept, F.linear(state, gain).tanh_(), message)
