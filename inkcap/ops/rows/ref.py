"""What a decode step reads of the table of rows, and what it adds to it: the two ends of a step without the host."""

from collections.abc import Sequence

import torch
from torch import Tensor

from inkcap.ops.dispatch import op


@op
def newest(
    rows: Tensor, tokens: Tensor, lengths: Tensor, tables: Sequence[Tensor], blocks: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The newest token of each of `rows` [T] int32, its position, and where its state goes.

    tokens: [every row, capacity] int32; lengths: [every row] int64, at least 1 in `rows`; tables: one block table
    [every row, width] int32 per cache group, `blocks` its tokens per block. Returns ids [T] int64, positions [T] int64
    and the same in int32, and slots [T] int64 per group: block * size + offset, or -1 where the block is 0.
    """
    row = rows.long()
    positions = lengths[row] - 1
    slots = []
    for table, size in zip(tables, blocks, strict=True):
        held = table[row, positions // size].long()
        slots.append(torch.where(held > 0, held * size + positions % size, -1))
    return tokens[row, positions].long(), positions, positions.int(), slots


@op
def append_tokens(rows: Tensor, drawn: Tensor, tokens: Tensor, lengths: Tensor, spare: int) -> None:
    """Add `drawn` [T] int64 to `rows` [T] int32, one token each; entries whose row is `spare` add nothing.

    tokens and lengths as in `newest`, changed in place. Rows other than `spare` are distinct.
    """
    row = rows.long()
    at = lengths[row]
    own = row != spare
    tokens[row, at] = torch.where(own, drawn.int(), tokens[row, at])
    lengths[row] = at + own
