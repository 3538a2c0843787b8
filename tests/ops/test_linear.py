"""Products with their surroundings, against float64."""

import math

import pytest
import torch
from steps import World

from inkcap.cache.state import LayerState, Plane
from inkcap.ops.linear.ref import LOGIT_COLUMNS, logits, product, project, settle
from inkcap.ops.values import Normed

pytestmark = pytest.mark.usefixtures("ops")


def test_project_norms_first():
    x, norm, weight = torch.randn(5, 7), torch.randn(7), torch.randn(11, 7)
    got = project(Normed(x, norm, 1e-2), weight)
    for t in range(5):
        row = x[t].double() / math.sqrt((x[t].double() ** 2).mean().item() + 1e-2) * norm.double()
        torch.testing.assert_close(got[t].double(), weight.double() @ row, rtol=1e-5, atol=1e-5)


def test_product():
    x, weight = torch.randn(5, 7), torch.randn(11, 7)
    torch.testing.assert_close(product(x, weight).double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("begins", [False, True])
def test_settle_is_product_scale_convolution_and_addition(scaled, begins):
    place = World([LayerState("sconv", 0, (Plane("x", (6,), "float32"),), 4, 4, False)], length=32)
    rows, weight, taps = torch.randn(9, 5), torch.randn(6, 5), torch.randn(6, 4)
    residual, scale = torch.randn(9, 6), torch.tensor([0.3]) if scaled else None
    got = []
    for start, stop in ((0, 6), (6, 7), (7, 9)):
        batch = place.batch([(1, start, [0] * (stop - start))]).at(0)
        base = residual[start:stop].clone()
        out, squares = settle(
            rows[start:stop],
            weight,
            None if begins else base,
            taps,
            batch.view("sconv"),
            batch.packing,
            plane=0,
            scale=scale,
            conv_scale=0.5,
        )
        assert torch.equal(base, residual[start:stop])
        assert squares is None or torch.allclose(squares, out.float().square().sum(1))
        got.append(out)
    product = rows.double() @ weight.double().t() * (0.3 if scaled else 1.0)
    padded = torch.cat([torch.zeros(3, 6).double(), product])
    want = 0.5 * (product + sum(padded[i : i + 9] * taps[:, i].double() for i in range(4)))
    if not begins:
        want += residual.double()
    torch.testing.assert_close(torch.cat(got).double(), want, rtol=1e-5, atol=1e-5)


def test_settle_rounds_the_product_before_it_is_scaled_and_convolved():
    place = World([LayerState("sconv", 0, (Plane("x", (32,), "bfloat16"),), 4, 4, False)], length=32)
    rows, weight = torch.randn(6, 48).bfloat16(), torch.randn(32, 48).bfloat16()
    batch, scale = place.batch([(1, 0, [0] * 6)]).at(0), torch.tensor([0.7])
    out, _ = settle(
        rows, weight, torch.zeros(6, 32).bfloat16(), torch.zeros(32, 4), batch.view("sconv"), batch.packing, plane=0,
        scale=scale,
    )  # fmt: skip
    product = (rows.double() @ weight.double().t()).float().bfloat16()
    want = (product.float() * scale).bfloat16()
    assert (out == want).float().mean() > 0.99  # but for ties at the last bit of the accumulator


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_logits_are_fp32_whatever_the_weights_are(dtype, cap):
    hidden, weight = torch.randn(3, 9).to(dtype), torch.randn(13, 9).to(dtype)
    got = logits(hidden, weight, 1 / 24, cap)
    want = hidden.double() @ weight.double().t() / 24
    if cap:
        want = cap * torch.tanh(want / cap)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_logits_of_more_words_than_one_piece():
    hidden, weight = torch.randn(2, 3), torch.randn(LOGIT_COLUMNS + 5, 3)
    torch.testing.assert_close(logits(hidden, weight, 2.0), 2 * hidden @ weight.t(), rtol=1e-5, atol=1e-5)
