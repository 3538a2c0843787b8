"""The mixture over blocks and the gate behind it, against float64 arithmetic written out per token."""

import math

import pytest
import torch

from inkcap.ops.mix.ref import message_gate, mix, mix_norm, mix_shares
from inkcap.ops.values import Gates, Norms

EPS = 1e-6
pytestmark = pytest.mark.usefixtures("ops")


def rms(x):
    return x / math.sqrt(float((x * x).mean()) + EPS)


def test_mix_is_attention_over_normed_sources():
    draw = torch.Generator().manual_seed(0)
    sources = [torch.randn(5, 24, generator=draw) * scale for scale in (1.0, 30.0, 0.01)]
    queries = torch.randn(3, 24, generator=draw)
    got = mix(sources, queries, EPS)
    for q, query in enumerate(queries.double()):
        for t in range(5):
            normed = [rms(source[t].double()) for source in sources]
            weights = [math.exp(float(query @ row) / math.sqrt(24)) for row in normed]
            want = sum(weight / sum(weights) * row for weight, row in zip(weights, normed, strict=True))
            torch.testing.assert_close(got[q, t].double(), want, rtol=1e-5, atol=1e-6)


def test_mix_reads_sources_of_different_dtypes_in_fp32():
    draw = torch.Generator().manual_seed(1)
    blocks, partial = torch.randn(4, 16, generator=draw).bfloat16(), torch.randn(4, 16, generator=draw)
    queries = torch.randn(1, 16, generator=draw)
    got = mix([blocks, partial], queries, EPS)
    assert got.dtype == torch.float32
    assert torch.equal(got, mix([blocks.float(), partial], queries, EPS))
    assert not torch.equal(got, mix([blocks, partial.bfloat16()], queries, EPS))


def test_mix_of_zeros_is_zero():
    assert torch.equal(mix([torch.zeros(2, 8)], torch.ones(1, 8), EPS), torch.zeros(1, 2, 8))


def test_shares_are_what_a_mixture_is_made_of():
    draw = torch.Generator().manual_seed(4)
    sources = [torch.randn(5, 24, generator=draw) * scale for scale in (1.0, 30.0, 0.01)]
    queries = torch.randn(7, 24, generator=draw)
    shares = mix_shares(sources, queries, EPS)
    assert shares.shape == (7, 5, 3)
    torch.testing.assert_close(torch.einsum("qts,stc->qtc", shares, torch.stack(sources)), mix(sources, queries, EPS))


@pytest.mark.parametrize("norms", [1, 3])
def test_mixtures_are_normed_by_their_own_weights(norms):
    draw = torch.Generator().manual_seed(5)
    sources, queries = [torch.randn(5, 24, generator=draw) for _ in range(2)], torch.randn(3, 24, generator=draw)
    weights = torch.randn(norms, 24, generator=draw)
    got = mix_norm(sources, queries, EPS, Norms(weights, 0.5, torch.bfloat16))
    for q, row in enumerate(mix(sources, queries, EPS)):
        want = row / (row.square().mean(1, keepdim=True) + 0.5).sqrt() * weights[min(q, norms - 1)]
        assert got[q].dtype == got[q].tensor().dtype == torch.bfloat16
        torch.testing.assert_close(got[q].tensor(), want.bfloat16(), rtol=0.01, atol=1e-3)


def gate_case(gates, dtype=torch.float32):
    """(rows, sources, shares, gates) of four tokens and 12 channels."""
    draw = torch.Generator().manual_seed(2)
    sources = [torch.randn(4, 12, generator=draw) for _ in range(2)]
    shares = [torch.rand(4, 2, generator=draw) for _ in range(gates)]
    shapes = ((gates, 5, 24), (gates, 12, 5), (gates, 12, 5))
    return sources, shares, Gates(*(torch.randn(*shape, generator=draw).to(dtype) for shape in shapes))


PLAIN = Norms(torch.ones(1, 12), EPS, torch.float32)


@pytest.mark.parametrize("shared", [False, True])
def test_gates_forget_and_gain_per_channel(shared):
    sources, shares, gates = gate_case(3)
    queries, own = torch.randn(1 if shared else 3, 12), [torch.randn(4, 12) * 3 for _ in range(2)]
    rows = mix(own, queries, EPS)
    got = message_gate(own, queries, EPS, sources, shares, gates, PLAIN)
    for i in range(3):
        for t in range(4):
            z = rows[0 if shared else i, t].double()
            m = sum(shares[i][t, s].double() * sources[s][t].double() for s in range(2))
            state = gates.down[i].double() @ torch.cat([rms(z), rms(m)])
            kept = 1 - torch.tanh(gates.forget[i].double() @ state)
            want = kept * z + torch.tanh(gates.gain[i].double() @ state) * m
            torch.testing.assert_close(got[i].tensor()[t].double(), rms(want), rtol=1e-4, atol=1e-4)


def test_gates_round_around_their_first_product_only():
    sources, shares, gates = gate_case(1, torch.bfloat16)
    case = ([torch.randn(4, 12)], torch.randn(1, 12), EPS, sources, shares)
    (got,) = message_gate(*case, gates, PLAIN)
    assert got.tensor().dtype == torch.float32
    exact = Gates(gates.down.float(), gates.forget.float(), gates.gain.float())
    (unrounded,) = message_gate(*case, exact, PLAIN)
    assert not torch.equal(got.tensor(), unrounded.tensor())
    torch.testing.assert_close(got.tensor(), unrounded.tensor(), rtol=0.1, atol=0.1)
