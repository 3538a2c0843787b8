"""The kernels of rounding and encoding, in the interpreter: the bits of the references, to the sign of a zero."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from ops.test_quantize import rows

from inkcap.ops.quantize import ref, triton
from inkcap.ops.quantize.triton import (
    mxfp8_encode_triton,
    nvfp4_encode_four_over_six_triton,
    nvfp4_encode_triton,
    round_rows_triton,
)

DTYPES = [torch.float32, torch.float16]


@pytest.fixture(autouse=True)
def quiet():
    """Blocks of zeros divide by zero, as on a GPU, where nobody is told."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with np.errstate(all="ignore"):
        yield


def same(found, wanted):
    """Equal to the last bit, but for the bits of NaN."""
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        if got.dtype != torch.uint8:
            got, want = got.float(), want.float()
            assert torch.equal(got.isnan(), want.isnan())
            got, want = got.nan_to_num(9e9).view(torch.int32), want.nan_to_num(9e9).view(torch.int32)
        assert torch.equal(got, want)


def agree(x, factor, limit):
    """Everything that can be made of x [..., K], K a multiple of 32, against the references."""
    amax, one = x.abs().amax(-1), torch.tensor(factor)
    same(nvfp4_encode_four_over_six_triton(x, amax, limit), ref.nvfp4_encode_four_over_six.reference(x, amax, limit))
    same(nvfp4_encode_triton(x, one), ref.nvfp4_encode.reference(x, one))
    same(nvfp4_encode_triton(x, one, ref.E4M3_TINY), ref.nvfp4_encode.reference(x, one, ref.E4M3_TINY))
    same(mxfp8_encode_triton(x), ref.mxfp8_encode.reference(x))
    for how in (ref.Rounding(16, limit=limit), ref.Rounding(16, one), ref.Rounding(32)):
        same([round_rows_triton(x, how)], [ref.round_rows.reference(x, how)])
    how = ref.Rounding(16, limit=limit)
    same([round_rows_triton(x, how, 3 * amax)], [ref.round_rows.reference(x, how, 3 * amax)])


@settings(max_examples=8, deadline=None)
@given(rows(64), st.floats(2.0**-20, 2.0**10, width=32), st.sampled_from([256.0, 448.0, 1000.0 / 6]))
def test_rows_of_special_values(x, factor, limit):
    with np.errstate(all="ignore"):
        agree(torch.from_numpy(x), factor, limit)


@settings(max_examples=8, deadline=None)
@given(arrays(np.float32, (1, 32), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_rows_of_anything(x):
    with np.errstate(all="ignore"):
        agree(torch.from_numpy(x), 0.37, 256.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_stay_visible(value):
    """The sign of NaN, and so of a code that means NaN, is the processor's own."""
    x = torch.ones(2, 96)
    x[0, 40] = value
    for how in (ref.Rounding(16), ref.Rounding(16, torch.tensor(0.2)), ref.Rounding(32)):
        same([round_rows_triton(x, how)], [ref.round_rows.reference(x, how)])
    assert mxfp8_encode_triton(x)[1].tolist() == [[119, 255, 119], [119] * 3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [96, 544])
def test_sizes(dtype, columns):
    x = torch.randn(2, 2, columns) * torch.logspace(-6, 2, 4).view(2, 2, 1)
    x[0, 0, :32], x[1, 1] = 0.0, 0.0
    agree(x.to(dtype), 0.003, 256.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_scale_and_the_ties_of_every_code(dtype):
    """A block's maximum chooses the scale; what stands beside it lies on ties and next to them."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = torch.cat([torch.tensor([6.0]), ties, -ties * (1 + 2**-9), ties[-1:] * (1 - 2**-9)])
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:, None]
    agree((scales * near).view(1, -1).to(dtype), 1.0, 448.0)


def test_sums_of_errors_go_in_order_of_columns():
    """Blocks whose choice between 6 and 4 is another when their columns are turned round."""
    x = torch.randint(-40, 41, (20000, 16)) / 4
    amax = x.abs().max().expand(len(x))
    scales, turned = (ref.nvfp4_encode_four_over_six.reference(own, amax, 256.0)[1] for own in (x, x.flip(1)))
    chosen = x[(scales.float() != turned.float())[:, 0]]
    assert len(chosen) > 32
    row = torch.cat([torch.full((1, 16), 10.0), chosen[:31]]).view(1, -1)
    agree(row, 1.0, 256.0)
    agree(row.view(1, -1, 16).flip(2).view(1, -1), 1.0, 256.0)


def test_equal_errors_and_full_ranges():
    """A lone maximum is exact under both scales; 448 is the last that needs no larger power of two."""
    x = torch.zeros(2, 96)
    x[0, ::16], x[1, ::32] = torch.tensor([6.0, 3.0, 1.5, 0.75, 6.0, 448.0]), torch.tensor([448.0, 448.00006, 0.875])
    agree(x, 1.0, 256.0)


@pytest.mark.parametrize("size", [1e-44, 1e-24, 1e24, 1e38])
def test_rows_at_the_ends_of_the_range(size):
    agree((torch.rand(2, 96) - 0.5) * size, 1.0, 256.0)


@pytest.mark.parametrize("size", [2e-37, 2e36])
def test_subnormals_and_infinities_on_the_way(size, monkeypatch):
    """Of 20,000 blocks some would choose otherwise if a code's power of two came last."""
    monkeypatch.setattr(triton, "COLUMNS", (512, 16384, 1024))
    x = ((torch.rand(20000, 16) - 0.5) * size).view(1, -1)
    args = x, x.abs().amax(-1), 256.0
    same(nvfp4_encode_four_over_six_triton(*args), ref.nvfp4_encode_four_over_six.reference(*args))


def test_a_factor_for_each_matrix_and_strided_rows():
    x = torch.randn(3, 4, 64)[:, :, :48]
    factor = torch.rand(3) + 0.01
    same(nvfp4_encode_triton(x, factor), ref.nvfp4_encode.reference(x, factor))
    amax = x.abs().amax((1, 2))
    same(nvfp4_encode_four_over_six_triton(x, amax, 256.0), ref.nvfp4_encode_four_over_six.reference(x, amax, 256.0))
    every = torch.randn(4, 128)[:, ::2]
    same(mxfp8_encode_triton(every), ref.mxfp8_encode.reference(every))


def test_parts_of_rows_are_rounded_as_the_whole():
    x, how = torch.randn(3, 128) * torch.linspace(0.01, 3, 128), ref.Rounding(16)
    amax, whole = x.abs().amax(-1), round_rows_triton(x, how)
    parts = [round_rows_triton(part, how, amax) for part in x.chunk(2, 1)]
    assert torch.equal(torch.cat(parts, 1), whole)
    assert not torch.equal(round_rows_triton(x[:, :64], how), whole[:, :64])


def test_no_rows():
    for how in (ref.Rounding(16), ref.Rounding(16, torch.tensor(1.0)), ref.Rounding(32)):
        assert round_rows_triton(torch.zeros(0, 3, 64), how).shape == (0, 3, 64)


@pytest.mark.parametrize("columns", [0, 8, 33])
def test_columns_must_fill_blocks(columns):
    for how in (ref.Rounding(16), ref.Rounding(32)):
        with pytest.raises(ValueError, match="do not divide"):
            round_rows_triton(torch.zeros(3, columns), how)
