"""What sampling needs to know of its rows: values all rows have, and structures that few rows use."""

from dataclasses import dataclass, field

from torch import Tensor

from inkcap.ops.sample.ref import Limits


@dataclass(frozen=True, slots=True)
class BadWords:
    """Token sequences that must not come about. A word's last id is banned while its prefix ends the row."""

    prefixes: Tensor  # [words, longest prefix] int32, right-aligned; -1 where a prefix is shorter
    lasts: Tensor  # [words] int64


@dataclass(slots=True)
class RowExtras:
    """Masks, biases and penalties of one row; None where the row has none."""

    stops: Tensor | None = None  # [n] int64, not drawn at positions before `stops_from`
    stops_from: int = 0
    bias_ids: Tensor | None = None  # [n] int64
    biases: Tensor | None = None  # [n] float32
    forbidden: Tensor | None = None  # [V] bool: what allowed_token_ids leaves out
    bad_words: BadWords | None = None
    seen: Tensor | None = None  # [V] bool: prompt or output has it; None: no penalties
    counts: Tensor | None = None  # [V] int32: how often the output has it; None: no penalties
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    @property
    def empty(self) -> bool:
        """Whether nothing is left that changes a draw."""
        return self.stops is self.bias_ids is self.forbidden is self.bad_words is self.seen is None


@dataclass(frozen=True, slots=True)
class Draws:
    """S tokens to draw, one a row of the logits; as `ops.sample` takes them."""

    temperature: Tensor  # [S] float32
    limits: Limits | None  # None: no row has any
    seeds: Tensor  # [S] int64
    positions: Tensor  # [S] int64: of the tokens to draw
    logprobs: list[int | None]  # alternatives wanted with each
    extras: dict[int, RowExtras] = field(default_factory=dict)  # by place in 0 .. S - 1
    known: dict[int, Tensor] = field(default_factory=dict)  # the row's tokens [length] int32, for places with extras
    masks: Tensor | None = None  # [S, WORDS] int32: what rules allow; None: everything
