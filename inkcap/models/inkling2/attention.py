"""Inkling 2's attention: clipped heads, sinks and an output gate. Ends before the output projection."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inkcap.layers.attention import Heads, RelBias, attend, code_slots, empty_codes, power_for
from inkcap.layers.batch import Batch
from inkcap.layers.blockstream import Inputs
from inkcap.layers.linear import Columns, prefixed
from inkcap.layers.sconv import DynamicTaps, ShortConv
from inkcap.ops.attn_prep.ref import attn_prep_clip
from inkcap.ops.values import ClipWeights, LogScaling, Scores
from inkcap.parallel.share import Share
from inkcap.parallel.slot import Slot


@dataclass(frozen=True)
class Geometry:
    """The numbers of one attention layer on one rank."""

    channels: int
    heads: Heads
    states: int  # relative states of a head
    extent: int  # tokens with a bias
    window: int | None  # tokens; None: everything
    scaling: LogScaling | None
    conv_width: int
    qk_limit: float
    r_limit: float
    eps: float

    def queries(self) -> dict[str, Share]:
        """What is projected from the query's input: columns of q, relative states, gate and sinks."""
        query, size = self.heads.query, self.heads.size
        return {"q": query.times(size), "r": query.times(self.states), "gate": query.times(size), "sink": query}


class HeadScales:
    """Learned scales before the clips of queries and relative states."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        query = geometry.heads.query
        self.query = query
        self.q = torch.empty(query.count, geometry.heads.size, dtype=torch.float32, device=device)
        self.r = torch.empty(query.count, geometry.states, dtype=torch.float32, device=device)

    def slots(self) -> dict[str, Slot]:
        """`q_clip.scale` [heads, D] and `r_clip.scale` [heads, states]."""
        return {
            f"{name}_clip.scale": Slot(scale, (self.query.whole, scale.shape[1]), dim=0, start=self.query.start)
            for name, scale in (("q", self.q), ("r", self.r))
        }


def static_scale(width: int) -> float:
    """Of a convolution whose token and taps add W + 1 terms."""
    return 1 / math.sqrt(width + 1)


Convolved = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # columns of k and v, and what tokens add to their taps


class StaticConvs:
    """Convolutions of keys and values with taps that no token changes."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        columns = geometry.heads.kv.times(geometry.heads.size)
        self.columns = {name: {name: columns} for name in "kv"}  # what is projected from the input of each
        self.scale = static_scale(geometry.conv_width)
        self.convs = [ShortConv(columns, geometry.conv_width, plane, device, self.scale) for plane in (0, 1)]

    def slots(self, projected: Mapping[str, Slot]) -> dict[str, Slot]:
        """`{k,v}.weight` out of what is projected, and `{k_sconv,v_sconv}.weight`."""
        k, v = (conv.slots() for conv in self.convs)
        return {**projected, **prefixed("k_sconv", k), **prefixed("v_sconv", v)}

    def unpack(self) -> None:
        """Nothing is made of the taps."""

    def taps(self) -> list[Tensor]:
        """Of keys and of values, [channels, W]."""
        return [conv.taps for conv in self.convs]

    def __call__(self, columns: Sequence[Tensor]) -> Convolved:
        """What was projected."""
        k, v = columns
        return k, v, None, None


class DynamicConvs:
    """Convolutions of keys and values to whose taps each token adds something of its own."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        kv, size, width = geometry.heads.kv, geometry.heads.size, geometry.conv_width
        self.columns = {name: {name: kv.times(size), f"{name}_taps": kv.times(width)} for name in "kv"}
        self.scale = 1 / math.sqrt(2 * width + 1)  # token and two sets of taps
        self.convs = [DynamicTaps(kv, size, width, device) for _ in "kv"]

    def slots(self, projected: Mapping[str, Slot]) -> dict[str, Slot]:
        """`{k,v}.weight` and `{k_sconv,v_sconv}.dynamic` [kv heads * W, C] out of what is projected, and `.static`."""
        k, v = (conv.slots() for conv in self.convs)
        renamed = {"k_taps.weight": "k_sconv.dynamic", "v_taps.weight": "v_sconv.dynamic"}
        slots = {renamed.get(name, name): slot for name, slot in projected.items()}
        return {**slots, **prefixed("k_sconv", k), **prefixed("v_sconv", v)}

    def unpack(self) -> None:
        """Called once the slots are filled."""
        for conv in self.convs:
            conv.unpack()

    def taps(self) -> list[Tensor]:
        """Of keys and of values, [channels, W], without what tokens add."""
        return [conv.taps for conv in self.convs]

    def __call__(self, columns: Sequence[Tensor]) -> Convolved:
        """What was projected, in parts."""
        k, k_taps, v, v_taps = columns
        return k, v, self.convs[0].added(k_taps), self.convs[1].added(v_taps)


class Attention:
    """Queries, keys and values of one input or of one each, all in one stack of products."""

    def __init__(self, geometry: Geometry, dtype: torch.dtype, device: torch.device, coded: bool = False) -> None:
        """`coded`: keys and values are cached as codes; their clip and their norm are bounds, so none saturates."""
        self.geometry = geometry
        self.group = "full" if geometry.window is None else "window"
        self.convs = DynamicConvs(geometry, device) if geometry.window is None else StaticConvs(geometry, device)
        queries, keys, values = geometry.queries(), self.convs.columns["k"], self.convs.columns["v"]
        self.counts = [len(queries), len(keys), len(values)]  # parts of each input
        self.product = Columns(geometry.channels, {**queries, **keys, **values}, dtype, device)
        self.scales = HeadScales(geometry, device)
        heads = geometry.heads
        self.codes = empty_codes(heads.kv.count, device) if coded else None
        if self.codes is not None:
            for scale, bound in ((self.codes.k, geometry.qk_limit), (self.codes.v, heads.size**0.5)):
                scale.copy_(power_for(torch.full_like(scale, bound)))
        self.bias = RelBias(geometry.states, geometry.extent, dtype, device)
        # log scaling reaches the bias through the relative states, so attention itself scales nothing
        self.scores = Scores(geometry.heads.size**-0.5, geometry.window, self.bias.proj, None)

    def slots(self) -> dict[str, Slot]:
        """`{q,r,gate,sink}.weight`, those of keys, values and convolutions, `{q_clip,r_clip}.scale` and `rel.proj`."""
        return {
            **self.convs.slots(self.product.slots()),
            **self.scales.slots(),
            **prefixed("rel", self.bias.slots()),
        }

    def code_slots(self) -> dict[str, Slot]:
        """`k_scale` and `v_scale` [kv heads], where keys and values are cached as codes."""
        return code_slots(self.codes, self.geometry.heads.kv)

    def __call__(self, inputs: Inputs, batch: Batch) -> Tensor:
        """One normed input [T, C], or three, to gated heads [T, this rank's heads * D]."""
        numbers = self.geometry
        q, r, gate, sink, *columns = self.product.each(inputs if len(inputs) > 1 else inputs * 3, self.counts)
        k, v, k_added, v_added = self.convs(columns)
        k_taps, v_taps = self.convs.taps()
        weights = ClipWeights(
            k_taps,
            v_taps,
            self.convs.scale,
            self.scales.q,
            self.scales.r,
            numbers.qk_limit,
            numbers.r_limit,
            numbers.eps,
            self.codes,
        )
        q, k, v, r = attn_prep_clip(
            q,
            k,
            v,
            r,
            weights,
            batch.view("sconv"),
            batch.view(self.group),
            batch.packing,
            numbers.scaling,
            k_added,
            v_added,
        )
        return attend(q, k, v, r.flatten(1), self.scores, self.group, batch, sink, gate, self.codes)
