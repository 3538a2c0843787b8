"""RMS norm as a layer: who consumes the rows computes it, once."""

import pytest
import torch

from inkcap.layers.norm import RMSNorm

CPU = torch.device("cpu")


def norm(dtype=None):
    made = RMSNorm(6, 1e-3, CPU, dtype)
    made.slots()["weight"].fill(torch.linspace(-1, 2, 6))
    return made


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_rows_against_float64(dtype):
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    got = norm(dtype)(x).tensor()
    assert got.dtype == (dtype or x.dtype)
    want = x.double() / (x.double().square().mean(1, keepdim=True) + 1e-3).sqrt() * torch.linspace(-1, 2, 6).double()
    torch.testing.assert_close(got.double(), want, rtol=2**-8 if dtype else 1e-5, atol=1e-6)


def test_consumers_share_what_one_of_them_computed():
    rows = norm()(torch.ones(2, 6))
    assert rows.normed is None
    assert rows.tensor() is rows.tensor()


def test_slots_have_the_published_shape():
    (slot,) = norm().slots().values()
    assert (slot.whole, slot.dim, slot.target.dtype) == ((6,), None, torch.float32)
