"""The kernels of the experts: the references' tests run with them, and their parts, under the interpreter."""

from dataclasses import replace

import pytest
import torch
from ops import test_experts
from ops.shapes import MIXED, convolved

from inkcap.ops.experts import fragments, group
from inkcap.ops.experts import triton as experts
from inkcap.ops.experts.group import tiles, width_of
from inkcap.ops.experts.ref import experts_settle, routed_settle
from inkcap.ops.experts.triton import (
    experts_down_triton,
    experts_settle_triton,
    experts_up_triton,
    routed_down_triton,
    routed_settle_triton,
    routed_up_triton,
)
from inkcap.ops.values import Activated, Routed

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def ops(monkeypatch):
    torch.manual_seed(0)
    for name, function in (
        ("experts_up", experts_up_triton),
        ("experts_down", experts_down_triton),
        ("experts_settle", experts_settle_triton),
        ("routed_up", routed_up_triton),
        ("routed_down", routed_down_triton),
        ("routed_settle", routed_settle_triton),
    ):
        monkeypatch.setattr(test_experts, name, function)


@pytest.mark.parametrize("case", test_experts.CASES)
def test_both_halves(case):
    test_experts.test_both_halves(case, test_experts.CHANNELS, test_experts.UNITS)


def test_down_takes_activations_that_another_op_made():
    test_experts.test_down_takes_activations_that_another_op_made()


def test_settle_behind_experts():
    test_experts.test_settle_behind_experts()


def test_routed_experts_alone():
    test_experts.test_routed_experts_alone()


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("shared", [0, 2])
def test_settle_of_single_tokens_convolves_inside(tokens, shared):
    """Steps with one token of each sequence, whose history comes from the plane, against the reference."""
    channels, units, steps = 20, 12, [tuple((row, 1) for row in range(tokens))] * 5
    w2, shared_w2 = torch.randn(5, channels, units), torch.randn(channels, shared, units)
    taps = torch.randn(4, channels).t()
    for view, packing, plane in convolved(channels, steps, torch.float32, CPU):
        route = test_experts.routed(tokens, 5, 2, shared)
        act = Activated(torch.randn(tokens, 2, units), torch.randn(tokens, shared, units), route)
        where = (torch.randn(tokens, channels), taps, view, packing)
        kept = plane.clone()
        if shared:
            want, _ = experts_settle.reference(act, w2, shared_w2, *where, plane=1)
        else:
            want, _ = routed_settle.reference(act.routed, route, w2, *where, plane=1, conv_scale=0.5)
        after = plane.clone()
        plane.copy_(kept)
        if shared:
            got, _ = experts_settle_triton(act, w2, shared_w2, *where, plane=1)
        else:
            got, _ = routed_settle_triton(act.routed, route, w2, *where, plane=1, conv_scale=0.5)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(plane, after, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_settle_of_longer_spans():
    """Steps of several sequences against the reference."""
    channels, units = 20, 12
    w2, shared_w2 = torch.randn(5, channels, units), torch.randn(channels, 2, units)
    taps = torch.randn(4, channels).t()
    for view, packing, plane in convolved(channels, MIXED, torch.float32, CPU):
        tokens = len(packing.positions)
        route = test_experts.routed(tokens, 5, 2, 2)
        act = Activated(torch.randn(tokens, 2, units), torch.randn(tokens, 2, units), route)
        where = (torch.randn(tokens, channels), taps, view, packing)
        kept = plane.clone()
        want, _ = experts_settle.reference(act, w2, shared_w2, *where, plane=1)
        after = plane.clone()
        plane.copy_(kept)
        got, _ = experts_settle_triton(act, w2, shared_w2, *where, plane=1)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(plane, after, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("at_once", [1, 4, 32])
def test_sums_on_the_way_to_the_convolution(at_once, monkeypatch):
    """Steps of several sequences, whose tokens a program takes some at a time, against the reference."""
    monkeypatch.setattr("inkcap.ops.experts.triton.WALKED", 1)
    monkeypatch.setattr("inkcap.ops.sconv.walk.WIDE", 1)
    monkeypatch.setattr("inkcap.ops.sconv.walk.WALK", (at_once, 16, min(2, at_once), 1))
    channels, units = 20, 12
    w2, shared_w2 = torch.randn(5, channels, units), torch.randn(channels, 2, units)
    taps = torch.randn(4, channels).t()
    for view, packing, plane in convolved(channels, MIXED, torch.float32, CPU):
        tokens = len(packing.positions)
        route = test_experts.routed(tokens, 5, 2, 2)
        act = Activated(torch.randn(tokens, 2, units), torch.randn(tokens, 2, units), route)
        where = (torch.randn(tokens, channels), taps, view, packing)
        kept = plane.clone()
        want, _ = experts_settle.reference(act, w2, shared_w2, *where, plane=1)
        after = plane.clone()
        plane.copy_(kept)
        got, _ = experts_settle_triton(act, w2, shared_w2, *where, plane=1)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(plane, after, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k", "width"), [(1, 9, 3, 16), (40, 3, 2, 16), (70, 5, 1, 32)])
def test_tiles_cover_every_use_once_in_order(monkeypatch, pieces, tokens, experts, top_k, width):
    monkeypatch.setattr(group, "PAIRWISE", 0 if pieces else 1 << 20)
    monkeypatch.setattr(group, "PIECE", 16)
    monkeypatch.setattr(group, "PART", 4)
    route = test_experts.routed(tokens, experts, top_k, 0)
    route.choice[: tokens // 2] = route.choice[0]  # skewed
    made = tiles(route, experts, width)
    assert tiles(route, experts, width) is made
    flat = route.choice.flatten()
    assert torch.equal(made.order.long(), flat.sort(stable=True).indices)
    seen, ended, last = [], False, width
    for expert, start, stop in zip(made.expert.tolist(), made.start.tolist(), made.stop.tolist(), strict=True):
        ended = ended or expert < 0
        assert (expert < 0) == ended
        if not ended:
            assert 0 < stop - start <= -(-last * 4 // width) * width // 4  # larger quarters first
            last = stop - start
            assert (flat[made.order[start:stop].long()] == expert).all()
            seen += range(start, stop)
    assert sorted(seen) == list(range(tokens * top_k))
    assert made.number == (made.expert >= 0).sum()


def test_wide_tiles_have_tokens_as_the_first_operand(monkeypatch):
    monkeypatch.setattr("inkcap.ops.experts.triton.width_of", lambda uses, experts: 128)
    test_experts.test_both_halves((9, 7, 3, 1), test_experts.CHANNELS, test_experts.UNITS)


def test_width_grows_with_the_uses_of_an_expert():
    assert [width_of(6 * tokens, 256) for tokens in (2, 64, 1024, 2048, 8192)] == [16, 16, 32, 64, 128]


def test_nothing_to_do():
    route = Routed(torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2), torch.empty(0, 1))
    act = Activated(torch.empty(0, 2, 4), torch.empty(0, 1, 4), route)
    assert experts_down_triton(act, torch.randn(3, 8, 4), torch.randn(8, 1, 4)).shape == (0, 8)


def test_one_token_under_a_wider_bound_is_convolved(monkeypatch):
    """A step whose bound is two tokens a sequence takes no launch that reads all other inputs from the state."""
    monkeypatch.setattr(experts, "as_alone", lambda *_, paired: True)
    monkeypatch.setattr(fragments, "down", None)
    channels, units = 20, 12
    w2, taps = torch.randn(5, channels, units), torch.randn(channels, 4)
    for view, packing, plane in convolved(channels, [((0, 1),)] * 3, torch.float32, CPU):
        wider = replace(packing, spans=tuple((start, stop + 1, *rest) for start, stop, *rest in packing.spans))
        act, residual = torch.randn(1, 2, units), torch.randn(1, channels)
        route = Routed(torch.tensor([[3, 1]]), torch.rand(1, 2), torch.empty(1, 0))
        kept = plane.clone()
        want, _ = routed_settle.reference(act, route, w2, residual, taps, view, packing, plane=1)
        plane.copy_(kept)
        got, _ = experts.down(act, None, route, w2, None, residual, taps, view, wider, 1, 1.0, fixed=True)
        torch.testing.assert_close(got, want)
