"""Kernels of mixtures and of message gates under the interpreter, against the references."""

import pytest
import torch

from inkcap.ops.mix import triton as kernels
from inkcap.ops.mix.ref import message_gate, mix, mix_norm, mix_shares
from inkcap.ops.mix.triton import message_gate_triton, mix_norm_triton, mix_shares_triton, mix_triton
from inkcap.ops.values import Gates, Norms

EPS, CHANNELS, RANK = 1e-6, 40, 5


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def made_sources(count, tokens, dtype=torch.float32):
    """Finished blocks in the model's dtype, and a running sum in fp32."""
    blocks = [(torch.randn(tokens, CHANNELS) * 3**i).to(dtype) for i in range(count - 1)]
    return [*blocks, torch.randn(tokens, CHANNELS)]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize(("tokens", "queries"), [(1, 1), (3, 3)])
def test_mix(count, tokens, queries):
    sources, q = made_sources(count, tokens, torch.float16), torch.randn(queries, CHANNELS)
    torch.testing.assert_close(mix_triton(sources, q, EPS), mix.reference(sources, q, EPS))


@pytest.mark.parametrize("weights", [1, 3])
def test_mix_and_norm(weights):
    sources, q = made_sources(3, 2), torch.randn(3, CHANNELS)
    norms = Norms(torch.randn(weights, CHANNELS), 0.1, torch.float16)
    got, want = mix_norm_triton(sources, q, EPS, norms), mix_norm.reference(sources, q, EPS, norms)
    for one, other in zip(got, want, strict=True):
        assert one.normed is not None
        assert one.dtype == one.tensor().dtype == torch.float16
        torch.testing.assert_close(one.tensor(), other.tensor(), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("late", [1, 2])
@pytest.mark.parametrize("channels", [40, 512, 600, 1100])
def test_sources_read_early_and_late(late, channels):
    """Whole chunks, broken ones, and any number of either kind of source."""
    sources, q = [torch.randn(2, channels) * 3**i for i in range(4)], torch.randn(1, channels)
    norms = Norms(torch.randn(1, channels), 0.1, torch.float32)
    (got,) = mix_norm_triton(sources, q, EPS, norms, late)
    (want,) = mix_norm.reference(sources, q, EPS, norms, late)
    torch.testing.assert_close(got.tensor(), want.tensor(), rtol=1e-5, atol=1e-5)


def exactly(sources, query, eps):
    """One token's normed mixture in fp64."""
    rows = torch.cat(sources).double()
    rows *= (rows.square().mean(1, keepdim=True) + EPS).rsqrt()
    mixed = ((rows @ query.double()[0]) * query.shape[1] ** -0.5).softmax(0) @ rows
    return mixed * (mixed.square().mean() + eps).rsqrt()


@pytest.mark.parametrize("late", [1, 2])
@pytest.mark.parametrize("left", [1.0, 0.3, 0.1, 1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("size", [1e-2, 1e4])
def test_sources_that_cancel(late, left, size):
    """Two rows of which one is the other's negative but for a part of `left`: norm and direction are as inexact as the
    reference, up to the order of sums, though the products that the norm is made of cancel down to left^2."""
    channels, worst = 600, [0.0, 0.0]
    norms = Norms(torch.ones(1, channels), 1e-12, torch.float32)
    for seed in range(8):
        draw = torch.Generator().manual_seed(seed)
        row, rest, other = torch.linalg.qr(torch.randn(channels, 3, generator=draw))[0].T[:, None]
        sources, query = [size * other, size * row, size * (left * rest - row)], -30 * other  # so `other` has no share
        want = exactly(sources, query, norms.eps)
        for i, f in enumerate((mix_norm_triton, mix_norm.reference)):
            got = f(sources, query, EPS, norms, late)[0].tensor()[0]
            worst[i] = max(worst[i], float((got - want).norm() / want.norm()))
            assert abs(float(got.double().square().mean()) - 1) < 4e-6 + 1e-6 / left
    assert worst[0] < 6 * worst[1] + 2e-6


@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_shares(tokens, monkeypatch):
    monkeypatch.setattr(kernels, "MANY", 4)
    sources, q = made_sources(2, tokens), torch.randn(8, CHANNELS)
    torch.testing.assert_close(mix_shares_triton(sources, q, EPS), mix_shares.reference(sources, q, EPS))


@pytest.mark.parametrize("tokens", [1, 3, 7, 35], ids=["one", "few", "more", "many"])
@pytest.mark.parametrize(("gates", "shared", "weights", "late"), [(3, True, 1, 1), (3, False, 3, 2), (1, True, 1, 2)])
def test_gates(tokens, gates, shared, weights, late, monkeypatch):
    monkeypatch.setattr(kernels, "FEW", 4)
    monkeypatch.setattr(kernels, "MANY", 8)
    senders = made_sources(2, tokens)
    shares = mix_shares.reference(senders, torch.randn(gates, CHANNELS), EPS).unbind(0)
    down = torch.randn(gates, RANK, 2 * CHANNELS) * (2 * CHANNELS) ** -0.5
    forget, gain = torch.randn(2, gates, CHANNELS, RANK).unbind(0)
    norms = Norms(torch.randn(weights, CHANNELS), 0.1, torch.float32)
    queries = torch.randn(1 if shared else gates, CHANNELS)
    case = (made_sources(4, tokens), queries, EPS, senders, shares, Gates(down, forget, gain), norms, late)
    got, want = message_gate_triton(*case), message_gate.reference(*case)
    assert len(got) == gates
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.tensor(), other.tensor(), rtol=1e-4, atol=1e-4)
