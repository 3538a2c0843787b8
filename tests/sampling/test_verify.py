"""Acceptance: agreement reproduces undrafted output, rejection reproduces the target distribution."""

import numpy as np
import torch

from inkcap.ops.sample.ref import sample
from inkcap.sampling.verify import agreement, rejection


def test_agreement_takes_the_agreeing_prefix_and_one_more():
    drafts = torch.tensor([[5, 6, 7], [5, 6, 7], [9, 6, 7], [5, -1, -1], [5, 9, 7]])
    drawn = torch.tensor([[5, 6, 7, 8], [5, 6, 1, 8], [5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    assert agreement(drafts, drawn).tolist() == [4, 3, 1, 2, 2]


def test_agreement_without_drafts_is_one_token():
    assert agreement(torch.empty(2, 0, dtype=torch.int64), torch.tensor([[3], [4]])).tolist() == [1, 1]


def chain(token: int, heat: float = 1.0) -> torch.Tensor:
    """Logits [5] of a first-order chain."""
    return torch.randn(5, generator=torch.Generator().manual_seed(token)) * 1.5 / heat


def draw(logits: torch.Tensor, seed: int, position: int) -> int:
    return int(sample.reference(logits[None], torch.ones(1), None, torch.tensor([seed]), torch.tensor([position])))


def test_agreement_gives_the_tokens_of_a_run_without_drafts():
    for seed in range(20):
        plain = [0]
        while len(plain) < 25:
            plain.append(draw(chain(plain[-1]), seed, len(plain)))
        drafted = [0]
        while len(drafted) < 25:
            guesses: list[int] = []
            for _ in range(3):  # a worse model with the same noise
                last = (drafted + guesses)[-1]
                guesses.append(draw(chain(last, heat=2.0), seed, len(drafted) + len(guesses)))
            drawn = [draw(chain((drafted + guesses)[len(drafted) - 1 + i]), seed, len(drafted) + i) for i in range(4)]
            count = int(agreement(torch.tensor([guesses]), torch.tensor([drawn])))
            drafted += drawn[:count]
        assert drafted[:25] == plain


def test_rejection_gives_pairs_as_the_model_would():
    """Two drafted tokens of 60,000 rows: the joint distribution of the first two tokens that come out."""
    rows = 60_000
    steps = torch.arange(rows)
    target = torch.stack([chain(token).softmax(0) for token in range(5)]).double()
    worse = torch.stack([chain(token + 50).softmax(0) for token in range(5)]).double()
    generator = torch.Generator().manual_seed(1)
    first = worse[0].multinomial(rows, replacement=True, generator=generator)
    second = worse[first].multinomial(1, generator=generator)[:, 0]
    drafts = torch.stack((first, second), dim=1)
    proposals = torch.stack((worse[0].expand(rows, -1), worse[first]), dim=1)
    targets = torch.stack((target[0].expand(rows, -1), target[first], target[second]), dim=1)
    tokens, counts = rejection(drafts, proposals, targets, torch.full_like(steps, 7), steps * 10)
    assert set(counts.tolist()) == {1, 2, 3}
    found = np.bincount(tokens[:, 0].numpy(), minlength=5)
    expected = rows * target[0].numpy()
    assert ((found - expected) ** 2 / expected).sum() < 25  # 4 degrees of freedom
    for token in range(5):  # the second token, given the first stood
        both = (tokens[:, 0] == token) & (counts > 1)
        found = np.bincount(tokens[both, 1].numpy(), minlength=5)
        expected = int(both.sum()) * target[token].numpy()
        assert ((found - expected) ** 2 / expected).sum() < 25, token
    for token in range(5):  # the third, given two stood
        both = (tokens[:, 1] == token) & (counts > 2)
        found = np.bincount(tokens[both, 2].numpy(), minlength=5)
        expected = int(both.sum()) * target[token].numpy()
        assert ((found - expected) ** 2 / expected).sum() < 25, token
    best = torch.minimum(target[0], worse[0]).sum()
    assert abs((counts > 1).double().mean() - best) < 0.01


def test_rejection_of_equal_distributions_rejects_nothing():
    chances = torch.full((50, 3, 8), 1 / 8)
    drafts = torch.arange(100).view(50, 2) % 8
    tokens, counts = rejection(drafts, chances[:, :2], chances, torch.arange(50), torch.arange(50))
    assert counts.tolist() == [3] * 50
    assert torch.equal(tokens[:, :2], drafts)
