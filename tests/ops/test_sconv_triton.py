"""The kernel of the short convolution: the reference's tests, run with it under the interpreter."""

from dataclasses import replace

import pytest
import torch
from ops import test_sconv
from ops.shapes import convolved

from inkcap.ops.sconv.ref import sconv
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
    for module in ("triton", "walk"):
        monkeypatch.setattr(f"inkcap.ops.sconv.{module}.WIDE", 1)
    monkeypatch.setattr("inkcap.ops.sconv.triton.WALKED", 1)
    monkeypatch.setattr("inkcap.ops.sconv.walk.WALK", (at_once, 4, min(2, at_once), 1))
    for width, channels in ((4, 6), (2, 5)):
        test_sconv.test_static_taps(width, channels, residual)


@pytest.mark.parametrize("width", [4, 2])
def test_walks_of_tokens_whose_inputs_nobody_keeps(width, monkeypatch):
    """Programs in the middle of a prompt, one that has its beginning and one that has two sequences."""
    for module in ("triton", "walk"):
        monkeypatch.setattr(f"inkcap.ops.sconv.{module}.WIDE", 1)
    monkeypatch.setattr("inkcap.ops.sconv.triton.WALKED", 1)
    monkeypatch.setattr("inkcap.ops.sconv.walk.WALK", (4, 4, 2, 1))
    taps = torch.randn(width, 6).t()
    steps = convolved(6, (((1, 5), (2, 1)), ((1, 19), (2, 7))), torch.float32, torch.device("cpu"))
    for number, (view, packing, _) in enumerate(steps):
        x, residual = torch.randn(2, len(packing.positions), 6)
        if number > 0:
            view = replace(view, slots=torch.full_like(view.slots, -1))
        want = sconv.reference(x, taps, view, packing, plane=1, scale=0.5, residual=residual)
        got = sconv_triton(x, taps, view, packing, plane=1, scale=0.5, residual=residual)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


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
