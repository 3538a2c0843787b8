"""Drawing at real vocabularies: kernels on the device against the reference on the CPU."""

import pytest
import torch

from inkcap.ops.sample.ref import Limits, sample
from inkcap.ops.sample.triton import sample_triton

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("words", [25128, 200_058])
@pytest.mark.parametrize("spread", [0.1, 3.0, 12.0])
def test_draws_are_those_of_the_reference(words, spread):
    torch.manual_seed(words)
    rows = 96
    logits = torch.randn(rows, words) * spread
    logits[::3] = (logits[::3] * 8).round() / 8  # ties
    logits[1::4, 7::11] = -torch.inf
    heat = torch.tensor([0.0, 1.0, 0.6, 1.4]).repeat(24)
    top_k = torch.tensor([0, 0, 50, 1, 0, 1000], dtype=torch.int32).repeat(16)
    top_p = torch.tensor([1.0, 0.9, 0.999]).repeat(32)
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.05, 0.0]).repeat(20)[:rows]
    seeds, positions = torch.randint(0, 2**62, (rows,)), torch.randint(0, 10**6, (rows,))
    expected = sample.reference(logits, heat, Limits(top_k, top_p, min_p), seeds, positions)
    logits, heat, top_k, top_p, min_p, seeds, positions = (
        tensor.cuda() for tensor in (logits, heat, top_k, top_p, min_p, seeds, positions)
    )
    assert torch.equal(sample_triton(logits, heat, Limits(top_k, top_p, min_p), seeds, positions).cpu(), expected)
    plain = sample.reference(logits, heat, None, seeds, positions)
    assert torch.equal(sample_triton(logits, heat, None, seeds, positions), plain)
