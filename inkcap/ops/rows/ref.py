"""What a step reads of the table of rows and adds to it, without waiting for the host."""

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
    return tokens[row, positions].long(), positions, positions.int(), slots_of(row, positions, tables, blocks)


def slots_of(row: Tensor, positions: Tensor, tables: Sequence[Tensor], blocks: Sequence[int]) -> list[Tensor]:
    """Slots [T] of tokens at `positions` [T] of table rows `row` [T], per group."""
    slots = []
    for table, size in zip(tables, blocks, strict=True):
        held = table[row, positions // size].long()
        slots.append(torch.where(held > 0, held * size + positions % size, -1))
    return slots


@op
def spread(
    starts: Tensor,
    rows: Tensor,
    first: Tensor,
    tokens: Tensor,
    tables: Sequence[Tensor],
    blocks: Sequence[int],
    count: int,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """All T = `count` tokens of R sequences: ids, table rows, positions, and where their state goes.

    starts [R + 1], rows [R] and first [R] as in `Packing`; tokens, tables and blocks as in `newest`. Returns ids [T]
    int64, rows [T] int32, positions [T] int64, and slots [T] int64 per group as in `newest`.
    """
    widths = starts.diff().long()
    row_of = rows.repeat_interleave(widths, output_size=count)
    shift = (first - starts[:-1]).repeat_interleave(widths, output_size=count)
    row, positions = row_of.long(), torch.arange(count, device=starts.device) + shift
    return tokens[row, positions].long(), row_of, positions, slots_of(row, positions, tables, blocks)


def append_tokens(rows: Tensor, drawn: Tensor, tokens: Tensor, lengths: Tensor, spare: int) -> None:
    """Add `drawn` [T] int64 to `rows` [T] int32, one token each; entries whose row is `spare` add nothing.

    tokens and lengths as in `newest`, changed in place. Rows other than `spare` are distinct.
    """
    row = rows.long()
    at = lengths[row]
    own = row != spare
    tokens[row, at] = torch.where(own, drawn.int(), tokens[row, at])
    lengths[row] = at + own


@op
def enter_blocks(entries: Tensor, tables: Sequence[Tensor]) -> None:
    """Enter blocks into block tables [every row, width] int32, in place.

    entries: [4, N] int32 on the host: number of the table, row, index and block of each. Where the tables are on a GPU
    they lie in pinned memory and must stay as they are until the device has read them. No place occurs twice.
    """
    for number, table in enumerate(tables):
        _, row, index, block = entries[:, entries[0] == number].to(table.device)
        table[row, index] = block
