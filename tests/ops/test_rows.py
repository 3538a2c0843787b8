"""What steps read of the table of rows, and add to it, against loops over rows; kernels under the interpreter."""

from itertools import accumulate
from random import Random

import pytest
import torch

from inkcap.ops.rows.ref import append_tokens, enter_blocks, newest, spread
from inkcap.ops.rows.triton import enter_blocks_triton, newest_triton, spread_triton

BLOCKS = (64, 4, 16)
SPARE = 9


def table(random: Random):
    tokens = torch.randint(0, 50_000, (SPARE + 1, 200), dtype=torch.int32)
    lengths = torch.tensor([random.randrange(1, 199) for _ in range(SPARE)] + [1])
    tables = [torch.randint(0, 3, (SPARE + 1, -(-200 // block)), dtype=torch.int32) for block in BLOCKS]
    for each in tables:
        each[SPARE] = 0
    return tokens, lengths, tables


@pytest.mark.parametrize("function", [newest.reference, newest_triton])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_newest(function, groups):
    tokens, lengths, tables = table(Random(groups))
    rows = [3, 0, 8, 5, SPARE, SPARE]
    ids, positions, first, slots = function(
        torch.tensor(rows, dtype=torch.int32), tokens, lengths, tables[:groups], BLOCKS[:groups]
    )
    assert first.dtype == torch.int32
    assert len(slots) == groups
    for at, row in enumerate(rows):
        position = int(lengths[row]) - 1
        assert positions[at] == first[at] == position
        assert ids[at] == tokens[row, position]
        for found, held, block in zip(slots, tables, BLOCKS, strict=False):
            owner = int(held[row, position // block])
            assert found[at] == (owner * block + position % block if owner else -1)


@pytest.mark.parametrize("function", [spread.reference, spread_triton])
@pytest.mark.parametrize("groups", [1, 3])
def test_spread(function, groups):
    tokens, _, tables = table(Random(groups))
    spans = [(3, 5, 130), (0, 0, 1), (8, 198, 199), (5, 60, 71)]
    starts = torch.tensor([0, *accumulate(stop - first for _, first, stop in spans)], dtype=torch.int32)
    rows, first = (torch.tensor([span[i] for span in spans], dtype=torch.int32) for i in (0, 1))
    want = [(row, position) for row, begin, stop in spans for position in range(begin, stop)]
    ids, row_of, positions, slots = function(
        starts, rows, first, tokens, tables[:groups], BLOCKS[:groups], len(want)
    )  # fmt: skip
    assert [row_of.dtype, len(slots)] == [torch.int32, groups]
    assert [*zip(row_of.tolist(), positions.tolist(), strict=True)] == want
    assert ids.tolist() == [tokens[place] for place in want]
    for found, held, block in zip(slots, tables, BLOCKS, strict=False):
        owners = [int(held[row, position // block]) for row, position in want]
        assert found.tolist() == [
            owner * block + position % block if owner else -1 for owner, (_, position) in zip(owners, want, strict=True)
        ]


def test_append_tokens():
    tokens, lengths, _ = table(Random(4))
    rows, drawn = [2, 7, SPARE, 0, SPARE], [11, 12, 13, 14, 15]
    known, before = tokens.clone(), lengths.clone()
    for row, token in zip(rows, drawn, strict=True):
        if row != SPARE:
            known[row, before[row]] = token
            before[row] += 1
    append_tokens(torch.tensor(rows, dtype=torch.int32), torch.tensor(drawn), tokens, lengths, SPARE)
    assert torch.equal(tokens, known)
    assert torch.equal(lengths, before)


@pytest.mark.parametrize("function", [enter_blocks.reference, enter_blocks_triton])
@pytest.mark.parametrize(("groups", "count"), [(1, 1), (2, 7), (3, 300)])
def test_enter_blocks(function, groups, count):
    random = Random(count)
    tables = table(random)[2][:groups]
    places = [(g, row, index) for g, each in enumerate(tables) for row in range(SPARE) for index in range(len(each[0]))]
    entries = [(*place, random.randrange(1, 10**6)) for place in random.sample(places, count)]
    wanted = [each.clone() for each in tables]
    for group, row, index, block in entries:
        wanted[group][row, index] = block
    function(torch.tensor(entries, dtype=torch.int32).t().contiguous(), tables)
    assert all(torch.equal(found, want) for found, want in zip(tables, wanted, strict=True))
