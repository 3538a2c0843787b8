"""Log-probabilities of given tokens and of the likeliest alternatives, from logits as the model gave them.

Two halves: `score` works where the logits are and waits for nothing, `entries` reads its numbers on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inkcap.base.request import Logprobs


@dataclass(frozen=True, slots=True)
class Scored:
    """What is known of N rows: the given token itself first, then the likeliest in any order."""

    counts: list[int]  # alternatives wanted
    logits: Tensor  # [N, V]
    ids: Tensor  # [N, 1 + n] int64
    values: Tensor  # [N, 1 + n]: their logits
    chances: Tensor  # [N, 1 + n]: their log-probabilities
    ranks: Tensor  # [N] int64: of the token itself

    @property
    def numbers(self) -> list[Tensor]:
        """What `entries` reads on the host."""
        return [self.ids, self.values, self.chances, self.ranks]


def score(logits: Tensor, tokens: Tensor, counts: list[int]) -> Scored:
    """Score rows of logits [N, V] float32, N at least 1, of tokens [N] int64 with `counts[i]` alternatives each.

    Of a row that drew -1, since its logits are not numbers, the scores mean nothing: no index may be beyond the end.
    """
    own = tokens.clamp(min=0)[:, None]
    ranks = (logits > logits.gather(1, own)).sum(1) + 1
    most = max(counts)
    # one more than wanted, to see whether a tie was cut
    order = logits.topk(min(most + 1, logits.shape[1]), dim=1).indices if most else own[:, :0]
    picked = torch.cat((own, order), dim=1)  # [N, 1 + n]
    chances = logits.log_softmax(1).gather(1, picked)
    return Scored(counts, logits, picked, logits.gather(1, picked), chances, ranks)


def entries(scored: Scored, numbers: Sequence[Tensor]) -> list[Logprobs]:
    """One entry a row. numbers: `scored.numbers`, on the host.

    Alternatives are the likeliest tokens (ties: lowest id first); the token itself is among them if it is likely.
    Its rank is one more than the number of tokens that are likelier.
    """
    ids, values, chances, ranks = (tensor.tolist() for tensor in numbers)
    return [
        _entry(scored.logits[row], count, ranks[row], list(zip(values[row], chances[row], ids[row], strict=True)))
        for row, count in enumerate(scored.counts)
    ]


def logprobs(logits: Tensor, tokens: Tensor, counts: list[int]) -> list[Logprobs]:
    """Both halves at once."""
    if not counts:
        return []
    scored = score(logits, tokens, counts)
    return entries(scored, scored.numbers)


def _entry(logits: Tensor, count: int, rank: int, found: list[tuple[float, float, int]]) -> Logprobs:
    """One row's entry. found: (logit, log-probability, id) of the token itself, then of the likeliest in any order."""
    own, *likely = found
    if count and count < len(likely) and likely[count][0] == likely[count - 1][0]:
        # a tie was cut: take all that are as likely as the last one wanted
        ids = torch.nonzero(logits >= likely[count][0]).flatten()
        likely = list(zip(logits[ids].tolist(), logits.log_softmax(0)[ids].tolist(), ids.tolist(), strict=True))
    likely.sort(key=lambda entry: (-entry[0], entry[2]))
    entries = [own, *likely[:count]]
    return Logprobs([token for _, _, token in entries], [chance for _, chance, _ in entries], rank)
