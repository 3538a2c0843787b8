"""The beginning of a step on a GPU: every token's id, row, position and slots, bit for bit; and block tables."""

from itertools import accumulate

import pytest
import torch

from inkcap.ops.rows.ref import enter_blocks, newest, spread
from inkcap.ops.rows.triton import enter_blocks_triton, newest_triton, spread_triton
from inkcap.runner.transfer import Lent, hosted

GPU = torch.device("cuda")
BLOCKS = (64, 4, 64)
ROWS, CAPACITY = 65, 40_000

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("counts", [[1], [8192], [1, 300, 2, 64, 7825], [13] * 64])
def test_spread(counts):
    torch.manual_seed(0)
    tokens = torch.randint(0, 50_000, (ROWS, CAPACITY), dtype=torch.int32, device=GPU)
    tables = [
        torch.randint(0, 3, (ROWS, -(-CAPACITY // block)), dtype=torch.int32, device=GPU) * 70_000_000
        for block in BLOCKS
    ]
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=GPU)
    rows = torch.randperm(ROWS, device=GPU)[: len(counts)].int()
    first = torch.randint(0, CAPACITY - 8192, (len(counts),), device=GPU).int()
    arguments = starts, rows, first, tokens, tables, BLOCKS, sum(counts)
    for got, want in zip(spread_triton(*arguments), spread.reference(*arguments), strict=True):
        for g, w in zip(got, want, strict=True) if isinstance(got, list) else [(got, want)]:
            assert g.dtype == w.dtype
            assert torch.equal(g, w)


@pytest.mark.parametrize("count", [1, 8, 65])
def test_newest(count):
    torch.manual_seed(0)
    tokens = torch.randint(0, 50_000, (ROWS, CAPACITY), dtype=torch.int32, device=GPU)
    lengths = torch.randint(1, CAPACITY, (ROWS,), device=GPU)
    tables = [
        torch.randint(0, 3, (ROWS, -(-CAPACITY // block)), dtype=torch.int32, device=GPU) * 70_000_000
        for block in BLOCKS
    ]
    arguments = torch.randperm(ROWS, device=GPU)[:count].int(), tokens, lengths, tables, BLOCKS
    for got, want in zip(newest_triton(*arguments), newest.reference(*arguments), strict=True):
        for g, w in zip(got, want, strict=True) if isinstance(got, list) else [(got, want)]:
            assert g.dtype == w.dtype
            assert torch.equal(g, w)


@pytest.mark.parametrize("count", [1, 3, 1000])
def test_entries_are_read_from_the_host_when_the_device_comes_to_them(count):
    """Many in flight, the memory of which would be given to the next if nobody kept it."""
    torch.manual_seed(count)
    tables = [torch.zeros(ROWS, 500, dtype=torch.int32, device=GPU) for _ in BLOCKS]
    wanted = [table.cpu() for table in tables]
    lent = Lent()
    given = []
    for number in range(1, 30):
        places = torch.randperm(len(tables) * ROWS * 500)[:count]
        group, row, index = places // (ROWS * 500), places // 500 % ROWS, places % 500
        given.append([*group.tolist(), *row.tolist(), *index.tolist(), *[number] * count])
        enter_blocks.reference(torch.tensor(given[-1], dtype=torch.int32).view(4, -1), wanted)
    for busy in (0, 1_000_000_000):  # first what compiles; then half a second, however slow the host is
        for table in tables:
            table.zero_()
        torch.cuda.synchronize()
        torch.cuda._sleep(busy)
        for entries in given:
            host = hosted(entries, torch.int32, GPU).view(4, -1)
            assert host.is_pinned()
            enter_blocks_triton(host, tables)
            lent.keep(host)
            if busy and entries is given[0]:
                assert lent.held
    torch.cuda.synchronize()
    for found, want in zip(tables, wanted, strict=True):
        assert torch.equal(found.cpu(), want)
    lent.keep(torch.empty(1))
    assert not lent.held
