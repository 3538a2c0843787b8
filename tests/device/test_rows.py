"""The beginning of a step on a GPU: every token's id, row, position and slots, bit for bit."""

from itertools import accumulate

import pytest
import torch

from inkcap.ops.rows.ref import spread
from inkcap.ops.rows.triton import spread_triton

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
