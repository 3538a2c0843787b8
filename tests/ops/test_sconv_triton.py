"""The kernel of the short convolution: the reference's tests, run with it under the interpreter."""

import pytest
import torch
from ops import test_sconv

from inkcap.ops.sconv.triton import sconv_triton


@pytest.fixture(autouse=True)
def ops(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(test_sconv, "sconv", sconv_triton)


@pytest.mark.parametrize(("width", "channels"), [(4, 6), (4, 1), (2, 5)])
@pytest.mark.parametrize("residual", [False, True])
def test_static_taps(width, channels, residual):
    test_sconv.test_static_taps(width, channels, residual)


@pytest.mark.parametrize("at_once", [1, 4, 32])
@pytest.mark.parametrize("residual", [False, True])
def test_walks(at_once, residual, monkeypatch):
    """Programs that take some tokens one after the other, of several sequences; also with a number before."""
    monkeypatch.setattr("inkcap.ops.sconv.triton.WALKED", 1)
    monkeypatch.setattr("inkcap.ops.sconv.walk.WALK", (at_once, 4, min(2, at_once), 1))
    for width, channels in ((4, 6), (2, 5)):
        test_sconv.test_static_taps(width, channels, residual)


def test_fp16_is_rounded_once():
    got, want = test_sconv.run(4, 40, "float16", test_sconv.static(4, 40), residual=True)
    for g, w in zip(got, want, strict=True):
        assert (g == w.half().double()).float().mean() > 0.98  # but for ties at the last fp32 bit, of either rounding


def test_taps_per_token_and_head():
    test_sconv.test_taps_per_token_and_head()


def test_taps_added_per_token_and_head():
    test_sconv.test_taps_added_per_token_and_head()


def test_tokens_without_a_slot_are_not_stored_and_others_planes_stay():
    test_sconv.test_tokens_without_a_slot_are_not_stored_and_others_planes_stay()
