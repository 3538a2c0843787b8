"""Inkling 2's decoder layers, by what attention reads and by whether a loop brings messages."""

from torch import Tensor

from inkcap.layers.batch import Batch
from inkcap.layers.blockstream import BlockMix, BlockStream, RunningSum
from inkcap.layers.experts import RoutedExperts
from inkcap.layers.linear import Row, prefixed
from inkcap.layers.norm import RMSNorm
from inkcap.layers.sconv import ShortConv
from inkcap.models.inkling2.attention import JointAttention, SplitAttention
from inkcap.models.inkling2.message import Gates, Messages
from inkcap.ops.values import Normed
from inkcap.parallel.slot import Slot


class Sublayers:
    """What all kinds of layers have: the ends of both sublayers, and how the MLP reads the stream."""

    def __init__(
        self,
        attn_out: Row,
        attn_sconv: ShortConv,
        mlp_mix: BlockMix,
        mlp_norm: RMSNorm,
        mlp: RoutedExperts,
        mlp_sconv: ShortConv,
        opens_block: bool,
    ) -> None:
        self.attn_out = attn_out
        self.attn_sconv = attn_sconv
        self.mlp_mix = mlp_mix
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_sconv = mlp_sconv
        self.opens_block = opens_block

    def slots(self) -> dict[str, Slot]:
        """`attn_out`, `attn_sconv`, `mlp_mix`, `mlp_norm`, `mlp` and `mlp_sconv`."""
        return {
            **prefixed("attn_out", self.attn_out.slots()),
            **prefixed("attn_sconv", self.attn_sconv.slots()),
            **prefixed("mlp_mix", self.mlp_mix.slots()),
            **prefixed("mlp_norm", self.mlp_norm.slots()),
            **prefixed("mlp", self.mlp.slots()),
            **prefixed("mlp_sconv", self.mlp_sconv.slots()),
        }

    def write_heads(self, stream: BlockStream, heads: Tensor, batch: Batch) -> None:
        """The end of attention. A block is closed behind its mixture and before its sum."""
        if self.opens_block:
            stream.close_block()
        stream.write(heads, self.attn_out, self.attn_sconv, batch)


class SlidingLayer:
    """Attention reads one mixture."""

    def __init__(
        self, attention: JointAttention, mix: BlockMix | RunningSum, norm: RMSNorm, sublayers: Sublayers
    ) -> None:
        self.attention = attention
        self.attn_mix = mix
        self.attn_norm = norm
        self.parts = sublayers

    def slots(self) -> dict[str, Slot]:
        """`attention`, `attn_mix` unless it is the first layer, `attn_norm`, and those of the sublayers."""
        return {
            **prefixed("attention", self.attention.slots()),
            **prefixed("attn_mix", self.attn_mix.slots()),
            **prefixed("attn_norm", self.attn_norm.slots()),
            **self.parts.slots(),
        }

    def forward(self, stream: BlockStream, batch: Batch) -> None:
        """One visit."""
        parts = self.parts
        (x,) = stream.read(self.attn_mix)
        parts.write_heads(stream, self.attention(self.attn_norm(x), batch), batch)
        (x,) = stream.read(parts.mlp_mix)
        stream.write(parts.mlp(parts.mlp_norm(x)), parts.mlp, parts.mlp_sconv, batch, ends_layer=True)


class FullLayer:
    """Attention reads three mixtures: of queries, keys and values."""

    def __init__(
        self, attention: SplitAttention, mix: BlockMix | RunningSum, norms: tuple[RMSNorm, ...], sublayers: Sublayers
    ) -> None:
        self.attention = attention
        self.attn_mix = mix
        self.norms = norms
        self.parts = sublayers

    def slots(self) -> dict[str, Slot]:
        """`attention`, `attn_mix` unless it is the first layer, `{q,k,v}_norm`, and those of the sublayers."""
        norms = {f"{name}_norm": norm for name, norm in zip("qkv", self.norms, strict=True)}
        return {
            **prefixed("attention", self.attention.slots()),
            **prefixed("attn_mix", self.attn_mix.slots()),
            **{key: slot for name, norm in norms.items() for key, slot in prefixed(name, norm.slots()).items()},
            **self.parts.slots(),
        }

    def forward(self, stream: BlockStream, batch: Batch) -> None:
        """One visit."""
        parts = self.parts
        q, k, v = (norm(x) for norm, x in zip(self.norms, stream.read(self.attn_mix), strict=True))
        parts.write_heads(stream, self.attention(q, k, v, batch), batch)
        (x,) = stream.read(parts.mlp_mix)
        stream.write(parts.mlp(parts.mlp_norm(x)), parts.mlp, parts.mlp_sconv, batch, ends_layer=True)


class SharedInput:
    """A looped sliding layer reads one mixture; the gates of queries, keys and values each change it in their way."""

    def __init__(self, mix: BlockMix, norm: RMSNorm) -> None:
        self.mix = mix
        self.norm = norm

    def slots(self) -> dict[str, Slot]:
        """`attn_mix` and `attn_norm`."""
        return {**prefixed("attn_mix", self.mix.slots()), **prefixed("attn_norm", self.norm.slots())}

    def __call__(self, stream: BlockStream, gates: Gates, messages: Messages | None) -> tuple[Normed, ...]:
        """Inputs of queries, keys and values."""
        (x,) = stream.read(self.mix)
        if messages is None:
            return (self.norm(x),) * 3
        return tuple(self.norm(gate(x, message)) for gate, message in zip(gates.attention, messages[:3], strict=True))


class SeparateInputs:
    """A looped full layer reads three mixtures."""

    def __init__(self, mix: BlockMix, norms: tuple[RMSNorm, ...]) -> None:
        self.mix = mix
        self.norms = norms

    def slots(self) -> dict[str, Slot]:
        """`attn_mix` and `{q,k,v}_norm`."""
        norms = {f"{name}_norm": norm for name, norm in zip("qkv", self.norms, strict=True)}
        return {
            **prefixed("attn_mix", self.mix.slots()),
            **{key: slot for name, norm in norms.items() for key, slot in prefixed(name, norm.slots()).items()},
        }

    def __call__(self, stream: BlockStream, gates: Gates, messages: Messages | None) -> tuple[Normed, ...]:
        """Inputs of queries, keys and values."""
        inputs = stream.read(self.mix)
        if messages is not None:
            inputs = [gate(x, m) for gate, x, m in zip(gates.attention, inputs, messages[:3], strict=True)]
        return tuple(norm(x) for norm, x in zip(self.norms, inputs, strict=True))


class LoopedLayer:
    """A layer of the loop: in later passes, messages of the pass before are gated into all four inputs."""

    def __init__(
        self, attention: SplitAttention, inputs: SharedInput | SeparateInputs, gates: Gates, sublayers: Sublayers
    ) -> None:
        self.attention = attention
        self.inputs = inputs
        self.gates = gates
        self.parts = sublayers

    def slots(self) -> dict[str, Slot]:
        """`attention`, those of the inputs, `gates`, and those of the sublayers."""
        return {
            **prefixed("attention", self.attention.slots()),
            **self.inputs.slots(),
            **prefixed("gates", self.gates.slots()),
            **self.parts.slots(),
        }

    def forward(self, stream: BlockStream, batch: Batch, messages: Messages | None) -> None:
        """One visit, in the first pass without messages."""
        parts = self.parts
        q, k, v = self.inputs(stream, self.gates, messages)
        parts.write_heads(stream, self.attention(q, k, v, batch), batch)
        (x,) = stream.read(parts.mlp_mix)
        if messages is not None:
            x = self.gates.mlp(x, messages[3])
        stream.write(parts.mlp(parts.mlp_norm(x)), parts.mlp, parts.mlp_sconv, batch, ends_layer=True)
