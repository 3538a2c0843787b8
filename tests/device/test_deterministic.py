"""Deterministic mode on a GPU: a token has the same bits whatever else is in its step, op by op and in whole models."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from device import test_engine, test_engine2
from device.test_engine import GPU, requests
from ops import tokenwise
from toy import run

import inkcap.ops  # noqa: F401  declares the implementations
from inkcap.ops.dispatch import OPS, bind
from inkcap.ops.linear.few import in_parts, sum_parts
from inkcap.ops.linear.fixed import FEW, in_tiles

pytestmark = pytest.mark.gpu
CUTS = [0, 1, 6, 22, 39, 103, 168, 300]  # of 300 tokens: as many programs' shapes as there are


@pytest.fixture(autouse=True)
def unbound():
    torch.manual_seed(0)
    yield
    bind(torch.device("cpu"))


CODED = [name for name in tokenwise.NAMES if name.startswith(("experts", "routed"))]


@pytest.mark.parametrize(
    ("name", "bits"), [(name, 16) for name in tokenwise.NAMES] + [(name, bits) for name in CODED for bits in (4, 8)]
)
def test_tokens_of_one_op(name, bits):
    bind(GPU, deterministic=True)
    for channels, units, experts in ((6144, 384, 64), (2304, 1152, 32)):
        case = tokenwise.cases(
            GPU, torch.bfloat16, CUTS[-1], channels=channels, units=units, experts=experts, bits=bits, rows=1664
        )[name]
        whole = case(OPS[name], slice(None))
        parts = [case(OPS[name], slice(first, stop)) for first, stop in pairwise(CUTS)]
        for place, tensor in enumerate(whole):
            assert tensor.isfinite().all()
            assert torch.equal(torch.cat([part[place] for part in parts]), tensor)


@pytest.mark.parametrize(("rows", "length"), [(1664, 6144), (2304, 1152), (258, 2304)])
def test_products_in_parts_and_in_tiles(rows, length):
    """All tiles, since how large a matrix is decides which of them a model takes."""
    x, w = (torch.randn(n, length, dtype=torch.bfloat16, device=GPU) for n in (CUTS[-1], rows))
    whole = in_tiles(x, w, torch.float32)
    torch.testing.assert_close(whole, x.float() @ w.float().t(), rtol=1e-3, atol=1e-3 * length**0.5)
    for count in (1, 16, 17, 64, 65):
        assert torch.equal(in_tiles(x[:count], w, torch.float32), whole[:count])
        if count <= FEW:
            assert torch.equal(sum_parts(in_parts(x[:count], w), torch.float32), whole[:count])


@pytest.mark.parametrize("module", [test_engine, test_engine2], ids=["plain", "loop"])
def test_whole_models(module):
    """Alone and eager; captured, in company, in other chunks; the second time behind prefix hits."""
    wanted = requests(module.LENGTHS)
    make = partial(module.worker, GPU, torch.bfloat16, deterministic=True)
    alone = run(make(graphs=False, rows=1), wanted, 0)
    for how in ({"graphs": False, "rows": 4, "chunk": 37}, {"rows": 3}, {"rows": 9, "chunk": 64}):
        made = make(**how)
        assert run(made, wanted, 1) == alone
        assert run(made, wanted, 1) == alone
