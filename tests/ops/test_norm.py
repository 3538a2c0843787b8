"""RMS norms against float64."""

import pytest
import torch

from inkcap.ops.norm.ref import embed_norm, rms_norm

EPS = 1e-3  # large enough to matter for the small rows

pytestmark = pytest.mark.usefixtures("ops")


def expected(x, weight):
    x, weight = x.double(), weight.double()
    out = torch.zeros_like(x)
    for row in range(len(x)):
        out[row] = x[row] / ((x[row] ** 2).sum() / x.shape[1] + EPS) ** 0.5 * weight
    return out


@pytest.mark.parametrize(("rows", "channels"), [(1, 1), (3, 7), (5, 130), (0, 4)])
def test_rms_norm(rows, channels):
    x = torch.randn(rows, channels) * torch.tensor([1.0, 100.0, 0.01, 3.0, 0.0])[:rows, None]
    weight = torch.randn(channels)
    torch.testing.assert_close(rms_norm(x, weight, EPS).double(), expected(x, weight), rtol=2e-6, atol=1e-6)


def test_rms_norm_of_heads_reads_the_last_axis():
    x, weight = torch.randn(4, 3, 10), torch.randn(10)
    got = rms_norm(x, weight, EPS)
    torch.testing.assert_close(got.flatten(0, 1).double(), expected(x.flatten(0, 1), weight), rtol=2e-6, atol=1e-6)


def test_bf16_is_rounded_once():
    x, weight = torch.randn(40, 33).bfloat16(), torch.randn(33)
    got = rms_norm(x, weight, EPS)
    assert got.dtype == torch.bfloat16
    once = expected(x, weight)
    twice = expected(x, torch.ones(33)).bfloat16().double() * weight
    assert (got.double() - once).abs().max() < (twice.bfloat16().double() - once).abs().max()
    assert (got == once.float().bfloat16()).float().mean() > 0.999  # but for ties at the last fp32 bit


def test_embed_norm_reads_rows_by_id():
    rows, weight = torch.randn(11, 6), torch.randn(6)
    ids = torch.tensor([10, 0, 0, 7])
    got = embed_norm(ids, rows, weight, EPS)
    torch.testing.assert_close(got.double(), expected(rows[ids], weight), rtol=2e-6, atol=1e-6)
