"""What the runner needs of a model of either generation."""

from typing import Protocol

from torch import Tensor

from inkcap.cache.state import LayerState
from inkcap.layers.batch import Batch
from inkcap.parallel.slot import Slot


class Model(Protocol):
    """A built model on one rank. Call it under torch.inference_mode(), after its slots are filled and unpacked."""

    family: str  # "inkling", ...
    vocab_size: int  # ids below this exist; logits have this many columns
    max_length: int  # tokens
    states: list[LayerState]  # every visit's state; visits are numbered from 0

    def slots(self) -> dict[str, Slot]:
        """Every tensor of a checkpoint the model wants, by the model's own names, with this rank's part of it."""
        ...

    def code_slots(self) -> dict[str, Slot]:
        """Scales of the cache's codes, if it has codes; made by `unpack`, to be replaced before the first step."""
        ...

    def unpack(self) -> None:
        """Called once all slots are filled: decode what is stored in codes, where ops want it decoded."""
        ...

    def forward(self, batch: Batch) -> Tensor:
        """Run all layers, writing state through the batch's views. Returns normed hidden states [T, D]."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [S, vocab_size] in fp32 of hidden states [S, D], whole on every rank."""
        ...
