"""What ops take besides tensors."""

from dataclasses import dataclass

from torch import Tensor


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


@dataclass(frozen=True, slots=True)
class Packing:
    """How the step's T tokens divide into R sequences; tokens of one sequence are consecutive, in order of position."""

    starts: Tensor  # [R + 1] int32: sequence i owns tokens starts[i] .. starts[i + 1]
    rows: Tensor  # [R] int32: its row in the block tables
    first: Tensor  # [R] int32: absolute position of its first token in this step
    row_of: Tensor  # [T] int32: table row of each token
    positions: Tensor  # [T] int64: absolute position of each token
    spans: tuple[tuple[int, int, int, int], ...]  # per sequence on the host: (start, stop, row, first position)
