"""Products of the kernels against the references, under the interpreter."""

import pytest
import torch
from ops.shapes import SETTLES, same_dtype, settle_case

from inkcap.ops.linear.device import chunks
from inkcap.ops.linear.each import project_each_triton
from inkcap.ops.linear.ref import logits, product, project, project_each, settle
from inkcap.ops.linear.triton import logits_triton, product_triton, project_triton, settle_triton
from inkcap.ops.values import Normed


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_chunks_cover_a_row():
    for size, want in ((6144, (2048, 3)), (384, (128, 3)), (1024, (1024, 1)), (3072, (1024, 3)), (8192, (2048, 4))):
        assert chunks(size) == want
    assert chunks(7) == (8, 1)  # masked
    assert chunks(5000) == (2048, 3)
    assert chunks(8200) == (0, 0)  # left to the library


@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 11), (300, 70), (7, 5), (8200, 3)])
def test_project(tokens, inputs, outputs):
    x, norm, weight = torch.randn(tokens, inputs), torch.rand(inputs) + 0.5, torch.randn(outputs, inputs)
    got = project_triton(Normed(x, norm, 1e-2), weight)
    torch.testing.assert_close(got, project.reference(Normed(x, norm, 1e-2), weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("length", "parts"), [(300, 3), (64, 1)])
def test_project_norms_a_few_rows_on_the_way_where_their_squares_are_known(length, parts):
    x, norm, weight = torch.randn(5, length), torch.rand(length) + 0.5, torch.randn(70, length)
    squares = torch.stack([part.square().sum(1) for part in x.chunk(parts, 1)], 1)
    rows = Normed(x, norm, 1e-2, squares)
    got = project_triton(rows, weight)
    want = Normed(x, norm, 1e-2)
    torch.testing.assert_close(got, project.reference(want, weight), rtol=1e-4, atol=1e-4)
    assert rows.normed is not None
    torch.testing.assert_close(rows.normed, want.tensor(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_project_each(tokens):
    norm, weight, widths = torch.rand(300) + 0.5, torch.randn(150, 300), (70, 65, 15)
    inputs = [Normed(torch.randn(tokens, 300), norm, 1e-2) for _ in widths]
    want = project_each.reference(inputs, weight, widths)
    for each in inputs:
        each.normed = None
    for got, each in zip(project_each_triton(inputs, weight, widths), want, strict=True):
        torch.testing.assert_close(got, each, rtol=1e-4, atol=1e-4)


def test_project_takes_fp32_rows_that_are_normed_to_another_dtype():
    x, norm, weight = torch.randn(1, 64), torch.rand(64), torch.randn(9, 64).half()
    got = project_triton(Normed(x, norm, 1e-6, dtype=torch.float16), weight)
    want = project.reference(Normed(x, norm, 1e-6, dtype=torch.float16), weight)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize(("inputs", "outputs"), [(300, 70), (8200, 3)])
def test_product(tokens, inputs, outputs):
    x, weight = torch.randn(tokens, inputs), torch.randn(outputs, inputs)
    torch.testing.assert_close(product_triton(x, weight), product.reference(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", SETTLES)
def test_settle(case):
    """Each step of a sequence: prompts, then single tokens, whose history comes from the plane."""
    for arguments, plane in settle_case(case, torch.float32, torch.device("cpu")):
        kept = plane.clone()
        want, _ = settle.reference(**arguments)
        after = plane.clone()
        plane.copy_(kept)
        got, squares = settle_triton(**arguments)
        assert same_dtype(got, want)
        if squares is not None:
            torch.testing.assert_close(squares.sum(1), got.float().square().sum(1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(plane, after, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_settle_leaves_a_padding_token_without_a_slot_unstored():
    ((arguments, plane), *_) = settle_case(SETTLES[0], torch.float32, torch.device("cpu"))
    arguments["view"].slots.fill_(-1)
    kept = plane.clone()
    settle_triton(**arguments)
    assert torch.equal(plane.nan_to_num(7.0), kept.nan_to_num(7.0))


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("rows", [1, 3])
def test_logits(rows, cap):
    hidden, weight = torch.randn(rows, 48), torch.randn(13, 48)
    got = logits_triton(hidden, weight, 1 / 24, cap)
    torch.testing.assert_close(got, logits.reference(hidden, weight, 1 / 24, cap), rtol=1e-4, atol=1e-5)
