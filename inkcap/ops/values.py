"""What ops take besides tensors."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inkcap.ops.norm.ref import rms_norm


@dataclass(frozen=True, slots=True)
class GroupView:
    """Where one step's tokens find and keep the state of one cache group, for one visit of one layer.

    A plane is one kind of state of one visit: [blocks, block, ...], a strided view of the group's arena. The state of
    absolute position p of table row r stands at `plane[table[r, p // block], p % block]`. Block 0 belongs to nobody:
    table entries that hold nothing point at it, and `slots` is -1 there, so that nothing is stored.
    """

    block: int  # tokens in one block
    table: Tensor  # [rows, blocks of a row] int32
    slots: Tensor  # [T] int64: block id * block + offset of each of the step's tokens; -1: not kept
    planes: tuple[Tensor, ...] = ()
    memo: dict[object, object] = field(default_factory=dict, repr=False, compare=False)
    """Index tensors that ops derive from the other fields once and use in every visit of the step. A view whose fields
    change needs a new memo."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How the step's T tokens divide into R sequences; tokens of one sequence are consecutive, in order of position."""

    starts: Tensor  # [R + 1] int32: sequence i owns tokens starts[i] .. starts[i + 1]
    rows: Tensor  # [R] int32: its row in the block tables
    first: Tensor  # [R] int32: absolute position of its first token in this step
    row_of: Tensor  # [T] int32: table row of each token
    positions: Tensor  # [T] int64: absolute position of each token
    spans: tuple[tuple[int, int, int, int], ...]  # per sequence on the host: (start, stop, row, first position)

    @property
    def widest(self) -> int:
        """The most tokens that one sequence has in this step; at least 1."""
        return max(stop - start for start, stop, _, _ in self.spans)

    @property
    def reach(self) -> int:
        """The most tokens that any sequence has up to the end of this step; under a captured graph, its bound."""
        return max(first + stop - start for start, stop, _, first in self.spans)


class Normed:
    """Rows whose RMS norm is left to whoever multiplies them. Consumers on one device share the normed tensor."""

    __slots__ = ("dtype", "eps", "normed", "rows", "squares", "weight")

    def __init__(
        self, rows: Tensor, weight: Tensor, eps: float, squares: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self.rows = rows  # [T, C]
        self.dtype = rows.dtype if dtype is None else dtype  # of the normed rows, which are rounded once
        self.weight = weight  # [C] fp32
        self.eps = eps
        self.squares = squares  # [T, P] fp32, of P parts of each row, where the op that made the rows left them
        self.normed: Tensor | None = None

    def replaced(self, normed: Tensor) -> "Normed":
        """The same rows with other normed ones, such as rounded ones."""
        other = Normed(self.rows, self.weight, self.eps, self.squares, self.dtype)
        other.normed = normed
        return other

    def tensor(self) -> Tensor:
        """The normed rows [T, C], computed on the first call."""
        if self.normed is None:
            self.normed = rms_norm(self.rows, self.weight, self.eps, self.dtype)
        return self.normed


@dataclass(frozen=True, slots=True)
class Norms:
    """RMS norms of the inputs of one sublayer, which come together; one for all of them where it has a single row."""

    weight: Tensor  # [N, C] fp32
    eps: float
    dtype: torch.dtype  # of normed rows

    def of(self, number: int, rows: Tensor) -> Normed:
        """Rows [T, C] of input `number`, to be normed."""
        return Normed(rows, self.weight[min(number, len(self.weight) - 1)], self.eps, None, self.dtype)

    def later(self, inputs: Iterable[Tensor]) -> tuple[Normed, ...]:
        """All inputs, to be normed."""
        return tuple(self.of(number, rows) for number, rows in enumerate(inputs))

    def done(self, inputs: Iterable[Tensor]) -> tuple[Normed, ...]:
        """All inputs, normed already."""
        made = self.later(inputs)
        for rows in made:
            rows.normed = rows.rows
        return made


@dataclass(frozen=True, slots=True)
class Gates:
    """Low-rank gates of messages, G of them, which come together."""

    down: Tensor  # [G, R, 2 C]: of rows, then of the message
    forget: Tensor  # [G, C, R]
    gain: Tensor  # [G, C, R]


@dataclass(frozen=True, slots=True)
class LogScaling:
    """Growth of attention logits with the query's position p: 1 + alpha * ln(max(1, (p + 1) / floor))."""

    floor: float  # tokens
    alpha: float

    def factor(self, positions: Tensor) -> Tensor:
        """[T] absolute positions to [T] fp32 factors."""
        return 1.0 + self.alpha * torch.log(((positions + 1).float() / self.floor).clamp(min=1.0))

    def active(self, packing: Packing) -> bool:
        """Whether any factor of the step differs from 1."""
        return any(first + stop - start > self.floor for start, stop, _, first in packing.spans)


@dataclass(frozen=True, slots=True)
class CodeScales:
    """What codes (E4M3) of keys and values are multiplied by: powers of two, so that all such products are exact."""

    k: Tensor  # [kv heads] fp32
    v: Tensor  # [kv heads] fp32


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """What conditions the heads of one attention layer. D is the size of a head."""

    k_taps: Tensor  # [kv heads * D, W] fp32
    v_taps: Tensor  # [kv heads * D, W] fp32
    q_norm: Tensor  # [D] fp32
    k_norm: Tensor  # [D] fp32
    eps: float
    codes: CodeScales | None = None  # None: the cache has the heads' own dtype


@dataclass(frozen=True, slots=True)
class ClipWeights:
    """What conditions clipped heads of size D. Dynamic convolutions add to the taps, token by token."""

    k_taps: Tensor  # [kv heads * D, W] fp32
    v_taps: Tensor  # [kv heads * D, W] fp32
    conv_scale: float  # of both convolutions
    q_scale: Tensor  # [heads, D] fp32
    r_scale: Tensor  # [heads, states] fp32
    qk_limit: float  # longest q and k
    r_limit: float  # longest relative state
    eps: float  # of the norm of v
    codes: CodeScales | None = None  # as in HeadWeights


@dataclass(frozen=True, slots=True)
class Caps:
    """Soft caps of a gated activation: cap * tanh(x / cap)."""

    gate: float
    up: float


@dataclass(frozen=True, slots=True)
class Scores:
    """How a query at position p scores a key at distance d = p - s behind it."""

    scale: float  # of q . k
    window: int | None  # keys with d >= window are not seen
    bias: Tensor  # [states, extent]: relative states times this give the bias at d < extent; it is 0 beyond
    scaling: LogScaling | None  # of the whole logit; the query comes scaled, the bias does not


@dataclass(frozen=True, slots=True)
class Routed:
    """A router's decision for T tokens, K routed experts of each and S shared ones."""

    choice: Tensor  # [T, K] int64, distinct in each row
    weights: Tensor  # [T, K] fp32
    gammas: Tensor  # [T, S] fp32
    memo: dict[object, object] = field(default_factory=dict, repr=False, compare=False)  # as in GroupView


@dataclass(frozen=True, slots=True)
class Activated:
    """What the down projections of the experts multiply."""

    routed: Tensor  # [T, K, I]
    shared: Tensor  # [T, S, I], gammas included
    route: Routed
