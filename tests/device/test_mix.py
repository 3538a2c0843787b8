"""Mixtures and gates at real sizes on a card, against the references."""

import pytest
import torch

from inkcap.ops.mix.fixed import message_gate_fixed
from inkcap.ops.mix.ref import message_gate, mix_norm, mix_shares
from inkcap.ops.mix.triton import message_gate_triton, mix_norm_triton, mix_shares_triton
from inkcap.ops.values import Gates, Norms

EPS, GPU, BF16 = 1e-6, torch.device("cuda"), torch.bfloat16

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def drawn():
    torch.manual_seed(0)


def made_sources(count, tokens, channels, last=torch.float32):
    """Finished blocks, and a running sum in the middle of a layer or at its end."""
    blocks = [torch.randn(tokens, channels, device=GPU).mul_(3**i).to(BF16) for i in range(count - 1)]
    return [*blocks, torch.randn(tokens, channels, device=GPU).to(last)]


@pytest.mark.parametrize("channels", [2304, 4608])
@pytest.mark.parametrize(("count", "late"), [(1, 1), (2, 2), (4, 1), (9, 1)])
@pytest.mark.parametrize(("tokens", "queries", "last"), [(1, 1, BF16), (1, 3, BF16), (5, 1, torch.float32)])
def test_mixtures(channels, count, late, tokens, queries, last):
    sources, query = made_sources(count, tokens, channels, last), torch.randn(queries, channels, device=GPU)
    norms = Norms(torch.randn(queries, channels, device=GPU), EPS, torch.float32)
    got, want = (f(sources, query, EPS, norms, late) for f in (mix_norm_triton, mix_norm.reference))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.tensor(), other.tensor(), rtol=1e-4, atol=1e-5)
    shares = (f(sources, query, EPS) for f in (mix_shares_triton, mix_shares.reference))
    torch.testing.assert_close(*shares, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("late", [1, 2])
@pytest.mark.parametrize("left", [1.0, 0.1, 1e-2, 1e-3])
def test_sources_that_cancel(late, left):
    """As in tests/ops/test_mix_triton.py."""
    row, rest, other = torch.linalg.qr(torch.randn(4608, 3, device=GPU))[0].T[:, None].contiguous()
    norms = Norms(torch.ones(1, 4608, device=GPU), 1e-12, torch.float32)
    case = ([100 * other, 100 * row, 100 * (left * rest - row)], -30 * other, EPS, norms, late)
    got, want = (f(*case)[0].tensor() for f in (mix_norm_triton, mix_norm.reference))
    assert float(got.double().square().mean() - 1) == pytest.approx(0, abs=4e-6 + 1e-6 / left)
    assert float((got - want).norm() / want.norm()) < 1e-5 / left


@pytest.mark.parametrize("gate", [message_gate_triton, message_gate_fixed])
@pytest.mark.parametrize("tokens", [1, 7, 24, 70])
@pytest.mark.parametrize(("gates", "shared", "late"), [(3, True, 1), (3, False, 1), (1, True, 2)])
def test_gates(gate, tokens, gates, shared, late):
    channels, rank = 2304, 64
    senders = [source.to(BF16) for source in made_sources(2, tokens, channels)]
    shares = mix_shares.reference(senders, torch.randn(gates, channels, device=GPU), EPS).unbind(0)
    down = (torch.randn(gates, rank, 2 * channels, device=GPU) * (2 * channels) ** -0.5).to(BF16)
    forget, gain = (torch.randn(2, gates, channels, rank, device=GPU) * rank**-0.5).to(BF16).unbind(0)
    norms = Norms(torch.randn(1 if shared else gates, channels, device=GPU), EPS, torch.float32)
    queries = torch.randn(1 if shared else gates, channels, device=GPU)
    case = (made_sources(4, tokens, channels), queries, EPS, senders, shares, Gates(down, forget, gain), norms, late)
    for one, other in zip(gate(*case), message_gate.reference(*case), strict=True):
        # states are rounded to bf16, of sums in another order
        torch.testing.assert_close(one.tensor(), other.tensor(), rtol=2e-2, atol=5e-2)
