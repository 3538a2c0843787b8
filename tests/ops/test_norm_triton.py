"""Norms of the kernels against the references, under the interpreter."""

import pytest
import torch

from inkcap.ops.norm.ref import embed_norm, rms_norm
from inkcap.ops.norm.triton import embed_norm_triton, rms_norm_triton

SHAPES = [(1, 8), (5, 100), (3, 2, 17)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rms_norm(shape, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), torch.rand(shape[-1]) + 0.5
    torch.testing.assert_close(rms_norm_triton(x, weight, 1e-2), rms_norm.reference(x, weight, 1e-2))


def test_rms_norm_of_rows_that_stand_apart():
    torch.manual_seed(0)
    x, weight = torch.randn(4, 40)[:, 3:23], torch.rand(20)
    torch.testing.assert_close(rms_norm_triton(x, weight, 1e-6), rms_norm.reference(x, weight, 1e-6))
    columns = torch.randn(20, 4).t()
    torch.testing.assert_close(rms_norm_triton(columns, weight, 1e-6), rms_norm.reference(columns, weight, 1e-6))


def test_embed_norm():
    torch.manual_seed(0)
    table, weight, ids = torch.randn(9, 12), torch.rand(12), torch.tensor([8, 0, 0, 3])
    got = embed_norm_triton(ids, table, weight, 1e-6)
    torch.testing.assert_close(got, embed_norm.reference(ids, table, weight, 1e-6))


def test_nothing_to_norm():
    assert rms_norm_triton(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
