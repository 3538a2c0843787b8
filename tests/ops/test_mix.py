"""The mixture over blocks and the gate behind it, against float64 arithmetic written out per token."""

import math

import pytest
import torch

from inkcap.ops.mix.ref import message_gate, mix

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


def test_gate_forgets_and_gains_per_channel():
    draw = torch.Generator().manual_seed(2)
    rows, message = torch.randn(4, 12, generator=draw) * 3, torch.randn(4, 12, generator=draw)
    down, forget, gain = (torch.randn(*shape, generator=draw) for shape in ((5, 24), (12, 5), (12, 5)))
    got = message_gate(rows, message, down, forget, gain, EPS)
    for t in range(4):
        z, m = rows[t].double(), message[t].double()
        state = down.double() @ torch.cat([rms(z), rms(m)])
        want = (1 - torch.tanh(forget.double() @ state)) * z + torch.tanh(gain.double() @ state) * m
        torch.testing.assert_close(got[t].double(), want, rtol=1e-4, atol=1e-4)


def test_gate_rounds_around_its_first_product_only():
    draw = torch.Generator().manual_seed(3)
    rows, message = torch.randn(4, 12, generator=draw), torch.randn(4, 12, generator=draw)
    down = torch.randn(5, 24, generator=draw).bfloat16()
    forget, gain = torch.randn(12, 5, generator=draw), torch.randn(12, 5, generator=draw)
    got = message_gate(rows, message, down, forget, gain, EPS)
    assert got.dtype == torch.float32
    unrounded = message_gate(rows, message, down.float(), forget, gain, EPS)
    assert not torch.equal(got, unrounded)
    torch.testing.assert_close(got, unrounded, rtol=0.1, atol=0.1)
