"""Inkling's attention: one product for q, k, v and the relative states; RMS-normed heads; full or sliding."""

import torch
from torch import Tensor

from inkcap.layers.attention import Heads, RelBias, attend, code_slots, empty_codes, power_for
from inkcap.layers.batch import Batch
from inkcap.layers.linear import Columns, prefixed
from inkcap.layers.norm import RMSNorm
from inkcap.layers.sconv import ShortConv
from inkcap.ops.attn_prep.ref import attn_prep
from inkcap.ops.values import HeadWeights, LogScaling, Normed, Scores
from inkcap.parallel.slot import Slot


class Attention:
    """Up to, not including, the output projection. Sliding when `window` is given."""

    def __init__(
        self,
        channels: int,
        heads: Heads,
        bias: RelBias,
        conv_width: int,
        eps: float,
        window: int | None,
        scaling: LogScaling | None,
        dtype: torch.dtype,
        device: torch.device,
        coded: bool = False,
    ) -> None:
        """`coded`: keys and values are cached as codes, whose scales `bound_codes` makes."""
        query, kv, size = heads.query, heads.kv, heads.size
        shares = {"q": query.times(size), "k": kv.times(size), "v": kv.times(size), "r": query.times(len(bias.proj))}
        self.heads = heads
        self.group = "full" if window is None else "window"
        self.qkvr = Columns(channels, shares, dtype, device)
        self.k_sconv = ShortConv(kv.times(size), conv_width, 0, device)
        self.v_sconv = ShortConv(kv.times(size), conv_width, 1, device)
        self.q_norm = RMSNorm(size, eps, device)
        self.k_norm = RMSNorm(size, eps, device)
        self.bias = bias
        self.scaling = scaling
        self.codes = empty_codes(kv.count, device) if coded else None
        self.weights = HeadWeights(
            self.k_sconv.taps, self.v_sconv.taps, self.q_norm.weight, self.k_norm.weight, eps, self.codes
        )
        self.scores = Scores(1.0 / size, window, bias.proj, scaling)

    def slots(self) -> dict[str, Slot]:
        """`{q,k,v,r}.weight`, `{k_sconv,v_sconv}.weight`, `{q_norm,k_norm}.weight` and `rel.proj`."""
        return {
            **self.qkvr.slots(),
            **prefixed("k_sconv", self.k_sconv.slots()),
            **prefixed("v_sconv", self.v_sconv.slots()),
            **prefixed("q_norm", self.q_norm.slots()),
            **prefixed("k_norm", self.k_norm.slots()),
            **prefixed("rel", self.bias.slots()),
        }

    def code_slots(self) -> dict[str, Slot]:
        """`k_scale` and `v_scale` [kv heads], where keys and values are cached as codes."""
        return code_slots(self.codes, self.heads.kv)

    def bound_codes(self, norm: Tensor) -> None:
        """Make scales by which no key and no value saturates, whatever the input; `norm` [C]: of the rows to come.

        A normed row is at most sqrt(C) long before its weight, a normed key sqrt(D); a convolved value is at most the
        largest product of its channel times one and the taps' sizes. The values' bound is some hundred times what they
        are, which codes can bear (see `power_for`), and needs no prompt to be measured on.
        """
        if self.codes is None:
            return
        size = self.heads.size
        key = self.k_norm.weight.abs().max() * size**0.5
        longest = (self.qkvr.slots()["v.weight"].target.float() * norm).norm(dim=1) * len(norm) ** 0.5  # [channels]
        value = longest * (1 + self.v_sconv.taps.abs().sum(1))
        self.codes.k.copy_(power_for(key).expand_as(self.codes.k))
        self.codes.v.copy_(power_for(value.view(-1, size).amax(1)))

    def __call__(self, rows: Normed, batch: Batch) -> Tensor:
        """Normed rows [T, C] to [T, this rank's heads * size]."""
        q, k, v, r = self.qkvr(rows)
        q, k, v = attn_prep(
            q, k, v, self.weights, batch.view("sconv"), batch.view(self.group), batch.packing, self.scaling
        )
        return attend(q, k, v, r, self.scores, self.group, batch, codes=self.codes)
