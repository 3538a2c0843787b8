"""Block tables, and the beginning of a step, in one launch each, whose floor is that of a launch.

`newest` and `spread` must not be launched so that they overlap with what ran before: they are the first of a step. The
kernel behind `newest` may start with it: that one reads ids, so it waits, and lets nothing start before it has.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.rows.ref import enter_blocks, newest, spread

MOST_GROUPS = 3
SPREAD = 64  # tokens of a program
ENTERED = 128  # entries of a program


@triton.jit
def slot_of(table, stride, row, position, inside, BLOCK: tl.constexpr):
    """Where the state of tokens goes, -1 where their block is 0."""
    held = tl.load(table + row * stride + position // BLOCK, mask=inside, other=0).to(tl.int64)
    return tl.where(held > 0, held * BLOCK + position % BLOCK, -1)


@triton.jit
def newest_kernel(
    rows, tokens, lengths, ids, positions, first, slots,
    table0, table1, table2, stride0, stride1, stride2,
    T, capacity,
    BLOCK0: tl.constexpr, BLOCK1: tl.constexpr, BLOCK2: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl.trigger(PDL)
    at = tl.arange(0, WIDE)
    inside = at < T
    row = tl.load(rows + at, mask=inside, other=0).to(tl.int64)
    position = tl.load(lengths + row, mask=inside, other=1) - 1
    tl.store(positions + at, position, mask=inside)
    tl.store(first + at, position.to(tl.int32), mask=inside)
    token = tl.load(tokens + row * capacity + position, mask=inside, other=0)
    tl.store(ids + at, token.to(tl.int64), mask=inside)
    if GROUPS > 0:
        tl.store(slots + at, slot_of(table0, stride0, row, position, inside, BLOCK0), mask=inside)
    if GROUPS > 1:
        tl.store(slots + T + at, slot_of(table1, stride1, row, position, inside, BLOCK1), mask=inside)
    if GROUPS > 2:
        tl.store(slots + 2 * T + at, slot_of(table2, stride2, row, position, inside, BLOCK2), mask=inside)


@triton.jit(do_not_specialize=["sequences", "T", "S"])
def spread_kernel(
    starts, rows, first, tokens, ids, row_of, positions, slots,
    table0, table1, table2, stride0, stride1, stride2,
    sequences, T, S, capacity,
    BLOCK0: tl.constexpr, BLOCK1: tl.constexpr, BLOCK2: tl.constexpr, GROUPS: tl.constexpr,
    RP: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BT + tl.arange(0, BT)
    inside = at < T
    i = tl.arange(0, RP)
    begins = tl.load(starts + i, mask=i < sequences, other=2**31 - 1)
    sequence = tl.sum((begins[None, :] <= at[:, None]).to(tl.int32), 1) - 1
    row = tl.load(rows + sequence, mask=inside, other=0)
    position = tl.load(first + sequence, mask=inside, other=0) + at - tl.load(starts + sequence, mask=inside, other=0)
    tl.store(row_of + at, row, mask=inside)
    row, position = row.to(tl.int64), position.to(tl.int64)
    tl.store(positions + at, position, mask=inside)
    token = tl.load(tokens + row * capacity + position, mask=inside, other=0)
    tl.store(ids + at, token.to(tl.int64), mask=inside)
    if GROUPS > 0:
        tl.store(slots + at, slot_of(table0, stride0, row, position, inside, BLOCK0), mask=inside)
    if GROUPS > 1:
        tl.store(slots + S + at, slot_of(table1, stride1, row, position, inside, BLOCK1), mask=inside)
    if GROUPS > 2:
        tl.store(slots + 2 * S + at, slot_of(table2, stride2, row, position, inside, BLOCK2), mask=inside)


def padded(
    tables: Sequence[Tensor], blocks: Sequence[int], filler: Tensor
) -> tuple[list[Tensor], list[int], list[int]]:
    """Tables, their strides and block sizes, made as many as kernels take."""
    missing = MOST_GROUPS - len(tables)
    assert missing >= 0, f"{len(tables)} cache groups; the kernels take {MOST_GROUPS}"
    strides = [table.stride(0) for table in tables]
    return [*tables, *[filler] * missing], strides + [0] * missing, [*blocks, *[1] * missing]


@newest.implement("triton", when=lambda device: device.type == "cuda", tokenwise=True)
def newest_triton(
    rows: Tensor, tokens: Tensor, lengths: Tensor, tables: Sequence[Tensor], blocks: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """`newest` of the reference, for at most three groups."""
    count, groups = len(rows), len(tables)
    ids = torch.empty(count, dtype=torch.int64, device=rows.device)
    positions, first = torch.empty_like(ids), torch.empty_like(rows)
    slots = torch.empty(groups, count, dtype=torch.int64, device=rows.device)
    given, strides, sizes = padded(tables, blocks, rows)
    newest_kernel[(1,)](
        rows, tokens, lengths, ids, positions, first, slots, *given, *strides, count, tokens.stride(0),
        *sizes, GROUPS=groups, WIDE=triton.next_power_of_2(count), PDL=pdl.supported(rows.device),
        num_warps=1 if count <= 64 else 4,
    )  # fmt: skip
    return ids, positions, first, list(slots)


@spread.implement("triton", when=lambda device: device.type == "cuda", tokenwise=True)
def spread_triton(
    starts: Tensor,
    rows: Tensor,
    first: Tensor,
    tokens: Tensor,
    tables: Sequence[Tensor],
    blocks: Sequence[int],
    count: int,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """`spread` of the reference, for at most three groups. One kernel serves all steps of a table."""
    ids = torch.empty(count, dtype=torch.int64, device=rows.device)
    positions, row_of = torch.empty_like(ids), torch.empty_like(ids, dtype=torch.int32)
    pitch = count + count % 2  # every group's begin at multiples of 16 bytes: other kernels ask for it
    slots = torch.empty(len(tables), pitch, dtype=torch.int64, device=rows.device)
    given, strides, sizes = padded(tables, blocks, rows)
    spread_kernel[(triton.cdiv(count, SPREAD),)](
        starts, rows, first, tokens, ids, row_of, positions, slots, *given, *strides,
        len(rows), count, pitch, tokens.stride(0),
        *sizes, GROUPS=len(tables), RP=triton.next_power_of_2(len(tokens)), BT=SPREAD, num_warps=4,
    )  # fmt: skip
    return ids, row_of, positions, [own[:count] for own in slots]


@triton.jit(do_not_specialize=["N"])
def enter_kernel(entries, table0, table1, table2, stride0, stride1, stride2, N, GROUPS: tl.constexpr, BE: tl.constexpr):
    at = tl.program_id(0) * BE + tl.arange(0, BE)
    inside = at < N
    group = tl.load(entries + at, mask=inside, other=-1)
    row = tl.load(entries + N + at, mask=inside, other=0).to(tl.int64)
    index = tl.load(entries + 2 * N + at, mask=inside, other=0)
    block = tl.load(entries + 3 * N + at, mask=inside, other=0)
    if GROUPS > 0:
        tl.store(table0 + row * stride0 + index, block, mask=group == 0)
    if GROUPS > 1:
        tl.store(table1 + row * stride1 + index, block, mask=group == 1)
    if GROUPS > 2:
        tl.store(table2 + row * stride2 + index, block, mask=group == 2)


@enter_blocks.implement("triton", when=lambda device: device.type == "cuda", tokenwise=True)
def enter_blocks_triton(entries: Tensor, tables: Sequence[Tensor]) -> None:
    """`enter_blocks` of the reference, for at most three tables. Entries are read where they lie, on the host."""
    given, strides, _ = padded(tables, [1] * len(tables), tables[0])
    count = entries.shape[1]
    enter_kernel[(triton.cdiv(count, ENTERED),)](
        entries, *given, *strides, count, GROUPS=len(tables), BE=ENTERED, num_warps=4
    )
