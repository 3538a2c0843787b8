"""Both ends of a decode step in one launch each. They move a few bytes a row; the floor is that of a launch.

`newest` must not be launched so that it overlaps with what ran before: it is the first kernel of a step.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops.rows.ref import append_tokens, newest

MOST_GROUPS = 3


@triton.jit
def newest_kernel(
    rows, tokens, lengths, ids, positions, first, slots,
    table0, table1, table2, stride0, stride1, stride2,
    T, capacity,
    BLOCK0: tl.constexpr, BLOCK1: tl.constexpr, BLOCK2: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, WIDE)
    inside = at < T
    row = tl.load(rows + at, mask=inside, other=0).to(tl.int64)
    position = tl.load(lengths + row, mask=inside, other=1) - 1
    tl.store(positions + at, position, mask=inside)
    tl.store(first + at, position.to(tl.int32), mask=inside)
    token = tl.load(tokens + row * capacity + position, mask=inside, other=0)
    tl.store(ids + at, token.to(tl.int64), mask=inside)
    if GROUPS > 0:
        held = tl.load(table0 + row * stride0 + position // BLOCK0, mask=inside, other=0).to(tl.int64)
        tl.store(slots + at, tl.where(held > 0, held * BLOCK0 + position % BLOCK0, -1), mask=inside)
    if GROUPS > 1:
        held = tl.load(table1 + row * stride1 + position // BLOCK1, mask=inside, other=0).to(tl.int64)
        tl.store(slots + T + at, tl.where(held > 0, held * BLOCK1 + position % BLOCK1, -1), mask=inside)
    if GROUPS > 2:
        held = tl.load(table2 + row * stride2 + position // BLOCK2, mask=inside, other=0).to(tl.int64)
        tl.store(slots + 2 * T + at, tl.where(held > 0, held * BLOCK2 + position % BLOCK2, -1), mask=inside)


@newest.implement("triton", when=lambda device: device.type == "cuda", tokenwise=True)
def newest_triton(
    rows: Tensor, tokens: Tensor, lengths: Tensor, tables: Sequence[Tensor], blocks: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """`newest` of the reference, for at most three groups."""
    count, groups = len(rows), len(tables)
    assert groups <= MOST_GROUPS, f"{groups} cache groups; the kernel takes {MOST_GROUPS}"
    ids = torch.empty(count, dtype=torch.int64, device=rows.device)
    positions, first = torch.empty_like(ids), torch.empty_like(rows)
    slots = torch.empty(groups, count, dtype=torch.int64, device=rows.device)
    padding = MOST_GROUPS - groups
    given = [*tables, *[rows] * padding]
    strides = [*(table.stride(0) for table in tables), *[0] * padding]
    newest_kernel[(1,)](
        rows, tokens, lengths, ids, positions, first, slots, *given, *strides, count, tokens.stride(0),
        *blocks, *[1] * padding, GROUPS=groups, WIDE=triton.next_power_of_2(count), num_warps=1 if count <= 64 else 4,
    )  # fmt: skip
    return ids, positions, first, list(slots)


@triton.jit
def append_kernel(rows, drawn, tokens, lengths, spare, T, capacity, WIDE: tl.constexpr):
    at = tl.arange(0, WIDE)
    row = tl.load(rows + at, mask=at < T, other=0).to(tl.int64)
    own = (at < T) & (row != spare)
    length = tl.load(lengths + row, mask=own, other=0)
    token = tl.load(drawn + at, mask=own, other=0)
    tl.store(tokens + row * capacity + length, token.to(tl.int32), mask=own)
    tl.store(lengths + row, length + 1, mask=own)


@append_tokens.implement("triton", when=lambda device: device.type == "cuda", tokenwise=True)
def append_tokens_triton(rows: Tensor, drawn: Tensor, tokens: Tensor, lengths: Tensor, spare: int) -> None:
    """`append_tokens` of the reference. Each row is one lane's: no two write the same place."""
    append_kernel[(1,)](
        rows, drawn, tokens, lengths, spare, len(rows), tokens.stride(0),
        WIDE=triton.next_power_of_2(len(rows)), num_warps=1 if len(rows) <= 64 else 4,
    )  # fmt: skip
