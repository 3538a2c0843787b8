"""Inkling 2's decoder layers: plain ones, and those of a loop, into which later passes bring messages."""

from torch import Tensor

from inkcap.layers.batch import Batch
from inkcap.layers.blockstream import BlockMix, BlockStream, Reads, RunningSum
from inkcap.layers.experts import RoutedExperts
from inkcap.layers.linear import Row, prefixed
from inkcap.layers.sconv import ShortConv
from inkcap.models.inkling2.attention import Attention
from inkcap.models.inkling2.message import MessageGates, Messages
from inkcap.parallel.slot import Slot


class DecoderLayer:
    """Attention, which reads one mixture of the stream or one each for queries, keys and values; then experts."""

    def __init__(
        self,
        attn_input: BlockMix | RunningSum,
        attention: Attention,
        attn_out: Row,
        attn_sconv: ShortConv,
        mlp_input: BlockMix,
        mlp: RoutedExperts,
        mlp_sconv: ShortConv,
        opens_block: bool,
    ) -> None:
        self.attn_input = attn_input
        self.attention = attention
        self.attn_out = attn_out
        self.attn_sconv = attn_sconv
        self.mlp_input = mlp_input
        self.mlp = mlp
        self.mlp_sconv = mlp_sconv
        self.opens_block = opens_block

    def slots(self) -> dict[str, Slot]:
        """Those of the inputs, and of `attention`, `attn_out`, `attn_sconv`, `mlp` and `mlp_sconv`."""
        return {
            **self.attn_input.slots(),
            **prefixed("attention", self.attention.slots()),
            **prefixed("attn_out", self.attn_out.slots()),
            **prefixed("attn_sconv", self.attn_sconv.slots()),
            **self.mlp_input.slots(),
            **prefixed("mlp", self.mlp.slots()),
            **prefixed("mlp_sconv", self.mlp_sconv.slots()),
        }

    def code_slots(self) -> dict[str, Slot]:
        """Scales of the cache's codes."""
        return self.attention.code_slots()

    def unpack(self) -> None:
        """Decode what is stored in codes, and make what is made of the weights."""
        self.attention.convs.unpack()
        self.mlp.routed.unpack()

    def forward(self, stream: BlockStream, batch: Batch) -> None:
        """One visit."""
        self.visit(stream, batch, self.attn_input, self.mlp_input)

    def visit(self, stream: BlockStream, batch: Batch, attn_reads: Reads, mlp_reads: Reads) -> None:
        """One visit that reads the stream so. A block is closed behind attention's read and before its sum."""
        heads: Tensor = self.attention(stream.read(attn_reads), batch)
        if self.opens_block:
            stream.close_block()
        stream.write(heads, self.attn_out, self.attn_sconv, batch)
        (x,) = stream.read(mlp_reads)
        stream.write(self.mlp(x), self.mlp, self.mlp_sconv, batch, ends_layer=True)


class LoopedLayer:
    """A layer of the loop."""

    def __init__(self, layer: DecoderLayer, attn_input: BlockMix, gates: MessageGates) -> None:
        self.layer = layer
        self.attn_input = attn_input
        self.gates = gates

    def slots(self) -> dict[str, Slot]:
        """Those of the layer, and `gates`."""
        return {**self.layer.slots(), **prefixed("gates", self.gates.slots())}

    def code_slots(self) -> dict[str, Slot]:
        """Scales of the cache's codes."""
        return self.layer.code_slots()

    def unpack(self) -> None:
        """Decode what is stored in codes."""
        self.layer.unpack()

    def forward(self, stream: BlockStream, batch: Batch) -> None:
        """A visit of the first pass."""
        self.layer.forward(stream, batch)

    def again(self, stream: BlockStream, batch: Batch, messages: Messages) -> None:
        """A visit of a later pass: messages of the pass before are gated into all inputs."""
        attn_reads = self.gates.of_attention(self.attn_input, messages)
        self.layer.visit(stream, batch, attn_reads, self.gates.of_mlp(self.layer.mlp_input, messages))
