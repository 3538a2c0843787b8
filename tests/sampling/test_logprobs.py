"""Log-probabilities against float64, with ties in every place."""

import torch

from inkcap.sampling.logprobs import logprobs, score


def test_values_ranks_and_alternatives_against_float64():
    logits = torch.randn(30, 97, generator=torch.Generator().manual_seed(0)) * 4
    logits[10:] = logits[10:].round()  # many ties
    logits[20:] = 1.0
    tokens = torch.arange(30) * 3
    counts = [row % 6 for row in range(29)] + [97]
    for row, entry in enumerate(logprobs(logits, tokens, counts)):
        exact = logits[row].double().log_softmax(0)
        ranked = sorted(range(97), key=lambda i: (-float(logits[row, i]), i))
        assert entry.token_ids == [int(tokens[row]), *ranked[: counts[row]]], row
        assert entry.rank == 1 + sum(float(x) > float(logits[row, tokens[row]]) for x in logits[row])
        torch.testing.assert_close(torch.tensor(entry.logprobs).double(), exact[entry.token_ids], rtol=0, atol=1e-5)


def test_company_with_other_counts_changes_nothing():
    logits = torch.randn(12, 500, generator=torch.Generator().manual_seed(1)).round()
    tokens, counts = torch.arange(12), [3, 0, 20, 1, 5, 5, 499, 2, 0, 7, 1, 500]
    together = logprobs(logits, tokens, counts)
    for row, count in enumerate(counts):
        assert logprobs(logits[row : row + 1], tokens[row : row + 1], [count]) == [together[row]]


def test_nothing_asked_gives_nothing():
    assert logprobs(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), []) == []


def test_a_row_that_drew_nothing_is_scored_without_harm():
    """Its logits are not numbers, which whoever collects the tokens says; a GPU would die of an index of -1."""
    logits = torch.tensor([[1.0, 2.0, 3.0], [torch.nan] * 3])
    scored = score(logits, torch.tensor([2, -1]), [1, 1])
    assert scored.ids[0, 0] == 2
    assert (scored.ids >= 0).all()
