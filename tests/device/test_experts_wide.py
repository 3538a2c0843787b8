"""The products of experts for many tokens against fp32 products, expert by expert."""

import pytest
import torch
from ops.shapes import coded, normal

import inkcap.ops  # noqa: F401  declares the implementations
from inkcap.ops.act.ref import swiglu, swiglu_capped
from inkcap.ops.dispatch import bind
from inkcap.ops.experts.wide import fits, wide
from inkcap.ops.quantize.coded import Coded
from inkcap.ops.values import Caps, Routed

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
COUNTS = [0, 1, 63, 64, 65, 0, 128, 129, 192, 193, 256, 257, 700, 3]  # uses of an expert: parts of tiles full, begun


@pytest.fixture(autouse=True)
def bound():
    torch.manual_seed(0)
    bind(GPU)
    yield
    bind(torch.device("cpu"))


def routed(tokens, share, experts):
    return Routed(torch.rand(tokens, experts, device=GPU).topk(share, 1).indices, *(torch.ones(1, device=GPU),) * 2)


def compared(x, w, route, *, paired, caps=None):
    """Both results [uses, ..] of a product of each use's expert with its row of x."""
    rows = w.shape[1]
    share = route.choice.numel() // len(x)
    out = torch.full((route.choice.numel(), rows // (2 if paired else 1)), float("nan"), device=GPU).bfloat16()
    assert fits(x, w)
    wide(x, w, route, share, out, paired=paired, caps=caps)
    want = torch.empty(out.shape, device=GPU)
    for expert in range(len(w)):
        mine = (route.choice.flatten() == expert).nonzero().squeeze(1)
        matrix = Coded(w.codes, w.scales, w.factor, torch.float32)[expert] if isinstance(w, Coded) else w[expert]
        product = x[mine // share].float() @ matrix.float().t()
        if paired:
            product = swiglu(product) if caps is None else swiglu_capped(product, caps)
        want[mine] = product
    assert out.isfinite().all()
    assert (out - want).norm() <= 6e-3 * want.norm()
    assert (out - want).abs().amax(1).div(want.abs().amax(1) + 1e-3).max() <= 2e-2  # of no row alone
    return out


def used(counts, bits, rows, length):
    """x, weights of that many bits, and a routing in which experts have `counts` uses."""
    choice = torch.repeat_interleave(torch.arange(len(counts), device=GPU), torch.tensor(counts, device=GPU))
    route = Routed(choice[torch.randperm(len(choice), device=GPU)][:, None], *(torch.ones(1, device=GPU),) * 2)
    w = normal(len(counts), rows, length, device=GPU, scale=length**-0.5)
    w = coded(bits, len(counts), rows, length, GPU, torch.bfloat16) if bits < 16 else w
    return normal(len(choice), length, device=GPU), w, route


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_few_tiles(bits):
    """For a sanitizer, under which all others take minutes."""
    compared(*used([1, 0, 70], bits, 256, 128), paired=False)


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("caps", [None, Caps(3.0, 2.0)])
def test_any_number_of_uses_of_an_expert(bits, caps):
    for rows, length in ((384, 640), (256, 128)):
        case = used(COUNTS, bits, rows, length)
        compared(*case, paired=True, caps=caps)
        if caps is None:
            compared(*case, paired=False)


@pytest.mark.parametrize("bits", [4, 16])
def test_both_halves_of_a_rank(bits):
    """As prefill has them, twice: the ring ends in another state, and nothing of one launch is left for the next."""
    for tokens in (8192, 3000):
        route = routed(tokens, 6, 256)
        for rows, length, paired in ((768, 6144, True), (6144, 384, False)):
            w = normal(256, rows, length, device=GPU, scale=length**-0.5)
            w = coded(bits, 256, rows, length, GPU, torch.bfloat16) if bits < 16 else w
            x = normal(tokens if paired else 6 * tokens, length, device=GPU)
            first = compared(x, w, route, paired=paired)
            assert torch.equal(first, compared(x, w, route, paired=paired))


def test_sizes_that_tiles_do_not_divide_are_left_to_others():
    for rows, length in ((260, 128), (256, 192)):
        assert not fits(normal(3, length, device=GPU), normal(2, rows, length, device=GPU))
    assert not fits(normal(3, 128, device=GPU).float(), normal(2, 256, 128, device=GPU).float())
    assert not fits(normal(3, 256, device=GPU)[:, ::2], normal(2, 256, 128, device=GPU))
