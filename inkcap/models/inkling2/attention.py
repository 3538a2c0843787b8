"""Inkling 2's attention: clipped heads, sinks and an output gate. Ends before the output projection."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from inkcap.layers.attention import Heads, RelBias, attend
from inkcap.layers.batch import Batch
from inkcap.layers.linear import Columns, prefixed
from inkcap.layers.sconv import DynamicTaps, ShortConv
from inkcap.ops.attn_prep.ref import attn_prep_clip
from inkcap.ops.values import ClipWeights, LogScaling, Normed, Scores
from inkcap.parallel.slot import Share, Slot


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


class StaticInput:
    """Keys or values of one input, convolved with taps that no token changes."""

    def __init__(self, name: str, geometry: Geometry, plane: int, dtype: torch.dtype, device: torch.device) -> None:
        columns = geometry.heads.kv.times(geometry.heads.size)
        self.name = name
        self.product = Columns(geometry.channels, {name: columns}, dtype, device)
        self.conv = ShortConv(columns, geometry.conv_width, plane, device, static_scale(geometry))

    def slots(self) -> dict[str, Slot]:
        """`NAME.weight` and `NAME_sconv.weight`."""
        return {**self.product.slots(), **prefixed(f"{self.name}_sconv", self.conv.slots())}

    def __call__(self, rows: Normed) -> tuple[Tensor, Tensor, None]:
        """Columns [T, kv heads * D], their taps, and nothing to add to these."""
        (columns,) = self.product(rows)
        return columns, self.conv.taps, None


class DynamicInput:
    """Keys or values of one input, and what this input adds to the taps of their convolution."""

    def __init__(self, name: str, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> None:
        kv, size, width = geometry.heads.kv, geometry.heads.size, geometry.conv_width
        self.name = name
        self.product = Columns(geometry.channels, {name: kv.times(size), "dynamic": kv.times(width)}, dtype, device)
        self.taps = DynamicTaps(kv, size, width, device)

    def slots(self) -> dict[str, Slot]:
        """`NAME.weight`, `NAME_sconv.static` [W, channels] and `NAME_sconv.dynamic` [kv heads * W, C]."""
        product = self.product.slots()
        return {
            f"{self.name}.weight": product[f"{self.name}.weight"],
            f"{self.name}_sconv.dynamic": product["dynamic.weight"],
            **prefixed(f"{self.name}_sconv", self.taps.slots()),
        }

    def __call__(self, rows: Normed) -> tuple[Tensor, Tensor, Tensor]:
        """Columns [T, kv heads * D], the static taps, and what each token adds to them."""
        columns, dynamic = self.product(rows)
        return columns, self.taps.taps(), self.taps.added(dynamic)


def static_scale(geometry: Geometry) -> float:
    """Of a convolution whose token and taps add W + 1 terms."""
    return 1 / math.sqrt(geometry.conv_width + 1)


def dynamic_scale(geometry: Geometry) -> float:
    """Of a convolution whose token and two sets of taps add 2 W + 1 terms."""
    return 1 / math.sqrt(2 * geometry.conv_width + 1)


class JointAttention:
    """Everything is projected from one input, in one product, and the convolutions are static."""

    def __init__(self, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> None:
        columns = geometry.heads.kv.times(geometry.heads.size)
        shares = {**geometry.queries(), "k": columns, "v": columns}
        scale = static_scale(geometry)
        self.geometry = geometry
        self.product = Columns(geometry.channels, shares, dtype, device)
        self.k_sconv = ShortConv(columns, geometry.conv_width, 0, device, scale)
        self.v_sconv = ShortConv(columns, geometry.conv_width, 1, device, scale)
        self.core = Core(geometry, scale, dtype, device)

    def slots(self) -> dict[str, Slot]:
        """`{q,r,gate,sink,k,v}.weight`, `{k_sconv,v_sconv}.weight` and those of the core."""
        return {
            **self.product.slots(),
            **prefixed("k_sconv", self.k_sconv.slots()),
            **prefixed("v_sconv", self.v_sconv.slots()),
            **self.core.slots(),
        }

    def __call__(self, rows: Normed, batch: Batch) -> Tensor:
        """Normed rows [T, C] to [T, this rank's heads * D]."""
        q, r, gate, sink, k, v = self.product(rows)
        return self.core((q, r, gate, sink), (k, self.k_sconv.taps, None), (v, self.v_sconv.taps, None), batch)


class SplitAttention:
    """Queries, keys and values have an input each; keys and values bring their convolutions."""

    def __init__(
        self,
        geometry: Geometry,
        key: StaticInput | DynamicInput,
        value: StaticInput | DynamicInput,
        conv_scale: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.geometry = geometry
        self.queries = Columns(geometry.channels, geometry.queries(), dtype, device)
        self.key = key
        self.value = value
        self.core = Core(geometry, conv_scale, dtype, device)

    def slots(self) -> dict[str, Slot]:
        """`{q,r,gate,sink}.weight`, those of keys and values, and those of the core."""
        return {**self.queries.slots(), **self.key.slots(), **self.value.slots(), **self.core.slots()}

    def __call__(self, q: Normed, k: Normed, v: Normed, batch: Batch) -> Tensor:
        """Normed rows [T, C] of queries, keys and values to [T, this rank's heads * D]."""
        return self.core(self.queries(q), self.key(k), self.value(v), batch)


class Core:
    """From projections to gated heads."""

    def __init__(self, geometry: Geometry, conv_scale: float, dtype: torch.dtype, device: torch.device) -> None:
        self.geometry = geometry
        self.conv_scale = conv_scale
        self.group = "full" if geometry.window is None else "window"
        self.scales = HeadScales(geometry, device)
        self.bias = RelBias(geometry.states, geometry.extent, dtype, device)
        # log scaling reaches the bias through the relative states, so attention itself scales nothing
        self.scores = Scores(geometry.heads.size**-0.5, geometry.window, self.bias.proj, None)

    def slots(self) -> dict[str, Slot]:
        """`{q_clip,r_clip}.scale` and `rel.proj` [states, extent]."""
        return {**self.scales.slots(), **prefixed("rel", self.bias.slots())}

    def __call__(
        self,
        queries: tuple[Tensor, ...],
        key: tuple[Tensor, Tensor, Tensor | None],
        value: tuple[Tensor, Tensor, Tensor | None],
        batch: Batch,
    ) -> Tensor:
        """Columns of q, r, gate and sink; of keys and values, each with its taps and what tokens add to them."""
        q, r, gate, sink = queries
        (k, k_taps, k_added), (v, v_taps, v_added) = key, value
        numbers = self.geometry
        weights = ClipWeights(
            k_taps,
            v_taps,
            self.conv_scale,
            self.scales.q,
            self.scales.r,
            numbers.qk_limit,
            numbers.r_limit,
            numbers.eps,
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
        return attend(q, k, v, r.flatten(1), self.scores, self.group, batch, sink, gate)
