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


@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_shares(tokens, monkeypatch):
    monkeypatch.setattr(kernels, "MANY", 4)
    sources, q = made_sources(2, tokens), torch.randn(8, CHANNELS)
    torch.testing.assert_close(mix_shares_triton(sources, q, EPS), mix_shares.reference(sources, q, EPS))


@pytest.mark.parametrize("tokens", [1, 3, 7, 35], ids=["one", "few", "more", "many"])
@pytest.mark.parametrize(("gates", "shared", "weights"), [(3, True, 1), (3, False, 3), (1, True, 1)])
def test_gates(tokens, gates, shared, weights, monkeypatch):
    monkeypatch.setattr(kernels, "FEW", 4)
    monkeypatch.setattr(kernels, "MANY", 8)
    senders = made_sources(2, tokens)
    shares = mix_shares.reference(senders, torch.randn(gates, CHANNELS), EPS).unbind(0)
    down = torch.randn(gates, RANK, 2 * CHANNELS) * (2 * CHANNELS) ** -0.5
    forget, gain = torch.randn(2, gates, CHANNELS, RANK).unbind(0)
    norms = Norms(torch.randn(weights, CHANNELS), 0.1, torch.float32)
    queries = torch.randn(1 if shared else gates, CHANNELS)
    case = (made_sources(4, tokens), queries, EPS, senders, shares, Gates(down, forget, gain), norms)
    got, want = message_gate_triton(*case), message_gate.reference(*case)
    assert len(got) == gates
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.tensor(), other.tensor(), rtol=1e-4, atol=1e-4)
