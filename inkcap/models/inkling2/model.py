"""Inkling 2's text model: decoder layers over a block stream, and the head. A loop visits some layers several times.

Slots of the model, with the shapes of the published tensors (V padded vocabulary, H hidden, W convolution width):

    embed.weight [V, H]                   embed.norm.weight [H]
    mix.query [H]                         norm.weight [H]
    head.weight [V, H]
    layers.N.attn_mix.query [H]           sliding; full: [3, H]; none in layer 0
    layers.N.attn_norm.weight [H]         sliding; full: layers.N.{q,k,v}_norm.weight
    layers.N.attention.{q,k,v,r,gate,sink}.weight
    layers.N.attention.{q_clip,r_clip}.scale [heads, D] and [heads, d_rel]
    layers.N.attention.{k_sconv,v_sconv}.weight [channels, 1, W]                                            sliding
    layers.N.attention.{k_sconv,v_sconv}.static [W, channels], .dynamic [kv heads * W, H]                   full
    layers.N.attention.rel.proj [d_rel, extent]
    layers.N.attn_out.weight              layers.N.{attn_sconv,mlp_sconv}.weight [H, 1, W]
    layers.N.mlp_mix.query [H]            layers.N.mlp_norm.weight [H]
    layers.N.mlp.router.weight [E, H], .router.bias [E], .experts.w13 [E, 2 I, H], .experts.w2 [E, H, I]
    loop:  layers.N.gates.{q,k,v,mlp}.down [R, 2 H], .forget and .gain [H, R]
           messenger.outer and .inner [2 looped layers, H]
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from inkcap.layers.batch import Batch
from inkcap.layers.blockstream import BlockStream
from inkcap.layers.embed import Head, NormedEmbedding
from inkcap.layers.formats import Stored
from inkcap.layers.linear import prefixed
from inkcap.models.inkling2.build import MIX_EPS, build_layer, build_looped, build_mix
from inkcap.models.inkling2.config import Inkling2Config
from inkcap.models.inkling2.layer import DecoderLayer, LoopedLayer
from inkcap.models.inkling2.message import Messenger
from inkcap.parallel.comm import Comm
from inkcap.parallel.slot import Slot

DENSE: Mapping[int, Stored] = {}


class Stack:
    """Layers that are visited once, in order; `first` is the visit of the first one."""

    def __init__(self, layers: list[DecoderLayer], first: int) -> None:
        self.layers = layers
        self.first = first

    def forward(self, stream: BlockStream, batch: Batch) -> None:
        """All layers."""
        for visit, layer in enumerate(self.layers, self.first):
            layer.forward(stream, batch.at(visit))


class LoopedStack:
    """Layers that are visited once a pass. Every pass starts from the same place; only messages know of the last."""

    def __init__(self, layers: list[LoopedLayer], messenger: Messenger, passes: int, first: int) -> None:
        self.layers = layers
        self.messenger = messenger
        self.passes = passes
        self.first = first

    def forward(self, stream: BlockStream, batch: Batch) -> None:
        """All passes over all layers."""
        entry = stream.place()
        for visit, layer in enumerate(self.layers, self.first):
            layer.forward(stream, batch.at(visit))
        for number in range(1, self.passes):
            done = stream.place()
            # the block that a pass closes first is the sum it started from, which every pass knows
            sources = [*done.blocks[len(entry.blocks) + 1 :], done.partial]
            stream.resume(entry)
            first = self.first + number * len(self.layers)
            for visit, (layer, messages) in enumerate(zip(self.layers, self.messenger(sources), strict=True), first):
                layer.again(stream, batch.at(visit), messages)


class Inkling2:
    """The text model on one rank of `comm`. Parameters are empty until the slots are filled.

    `stored` says how the experts of a layer are stored, where that is not dense; those need `unpack` once their slots
    are filled. `kv_dtype` is E4M3 where keys and values are cached in codes. Raises ConfigInvalid when the ranks cannot
    share the heads, widths or words evenly.
    """

    family = "inkling2"

    def __init__(
        self,
        config: Inkling2Config,
        comm: Comm,
        dtype: torch.dtype,
        device: torch.device,
        stored: Mapping[int, Stored] = DENSE,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.vocab_size = config.unpadded_vocab_size
        self.max_length = config.max_length
        self.embed = NormedEmbedding(config.vocab_size, config.hidden_size, config.rms_norm_eps, dtype, device)
        self.layers: list[DecoderLayer | LoopedLayer] = []
        self.stacks: list[Stack | LoopedStack] = []
        self.messenger: Messenger | None = None
        self.build_stacks(config, comm, dtype, device, stored, kv_dtype is not None)
        self.last = build_mix("mix", "norm", config, dtype, device)
        self.output = Head(
            config.vocab_size,
            config.unpadded_vocab_size,
            config.hidden_size,
            1.0,
            comm,
            dtype,
            device,
            config.final_logit_softcapping,
        )
        self.states = config.states(comm, *(str(kind or dtype).removeprefix("torch.") for kind in (dtype, kv_dtype)))

    def build_stacks(
        self,
        config: Inkling2Config,
        comm: Comm,
        dtype: torch.dtype,
        device: torch.device,
        stored: Mapping[int, Stored],
        coded: bool,
    ) -> None:
        """Layers before the loop, the loop, and layers behind it; or all layers in one stack."""

        def plain(start: int, stop: int, first: int) -> None:
            layers = [
                build_layer(config, layer, stored.get(layer, Stored()), comm, dtype, device, coded)
                for layer in range(start, stop)
            ]
            self.layers += layers
            self.stacks.append(Stack(layers, first))

        loop = config.loop
        if loop is None:
            plain(0, config.num_hidden_layers, 0)
            return
        plain(0, loop.start, 0)
        looped = [
            build_looped(config, layer, loop.gate_rank, stored.get(layer, Stored()), comm, dtype, device, coded)
            for layer in range(loop.start, loop.stop)
        ]
        self.messenger = Messenger(len(looped), config.hidden_size, MIX_EPS, device)
        self.layers += looped
        self.stacks.append(LoopedStack(looped, self.messenger, loop.passes, loop.start))
        plain(loop.stop, config.num_hidden_layers, loop.start + loop.passes * len(looped))

    def slots(self) -> dict[str, Slot]:
        """Every tensor the model wants; see the top of the file."""
        layers = {f"layers.{n}": layer.slots() for n, layer in enumerate(self.layers)}
        return {
            **prefixed("embed", self.embed.slots()),
            **{key: slot for name, slots in layers.items() for key, slot in prefixed(name, slots).items()},
            **({} if self.messenger is None else prefixed("messenger", self.messenger.slots())),
            **self.last.slots(),
            **prefixed("head", self.output.slots()),
        }

    def code_slots(self) -> dict[str, Slot]:
        """Scales of the cache's codes, `layers.N.attention.{k,v}_scale`; the visits of a layer share them."""
        layers = {f"layers.{n}.attention": layer.code_slots() for n, layer in enumerate(self.layers)}
        return {key: slot for name, slots in layers.items() for key, slot in prefixed(name, slots).items()}

    def unpack(self) -> None:
        """Decode what is stored in codes, layer by layer."""
        for layer in self.layers:
            layer.unpack()

    def forward(self, batch: Batch) -> Tensor:
        """All visits over the step's T tokens: hidden states [T, H] after the final norm."""
        stream = BlockStream(self.embed(batch.ids))
        for stack in self.stacks:
            stack.forward(stream, batch)
        (hidden,) = stream.read(self.last)
        return hidden.tensor()

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states [S, H] to logits [S, vocab_size] in fp32, whole on every rank."""
        return self.output(hidden)
