"""Log-probabilities of given tokens and of the likeliest alternatives, from logits as the model gave them."""

import torch
from torch import Tensor

from inkcap.base.request import Logprobs


def logprobs(logits: Tensor, tokens: Tensor, counts: list[int]) -> list[Logprobs]:
    """One entry for each row of logits [N, V] float32, of tokens [N] int64 with `counts[i]` alternatives.

    Alternatives are the likeliest tokens (ties: lowest id first); the token itself is among them if it is likely.
    Its rank is one more than the number of tokens that are likelier.
    """
    if not counts:
        return []
    logs = logits.log_softmax(1)  # [N, V]
    own = tokens[:, None]
    ranks = (logits > logits.gather(1, own)).sum(1) + 1
    most = max(counts)
    # one more than wanted, to see whether a tie was cut
    order = logits.topk(min(most + 1, logits.shape[1]), dim=1).indices if most else own[:, :0]
    picked = torch.cat((own, order), dim=1)  # [N, 1 + order]
    chances, values = logs.gather(1, picked).tolist(), logits.gather(1, picked).tolist()
    return [
        _entry(logits[row], logs[row], count, rank, list(zip(values[row], chances[row], ids, strict=True)))
        for row, (count, rank, ids) in enumerate(zip(counts, ranks.tolist(), picked.tolist(), strict=True))
    ]


def _entry(logits: Tensor, logs: Tensor, count: int, rank: int, found: list[tuple[float, float, int]]) -> Logprobs:
    """One row's entry. found: (logit, log-probability, id) of the token itself, then of the likeliest in any order."""
    own, *likely = found
    if count and count < len(likely) and likely[count][0] == likely[count - 1][0]:
        # a tie was cut: take all that are as likely as the last one wanted
        ids = torch.nonzero(logits >= likely[count][0]).flatten()
        likely = list(zip(logits[ids].tolist(), logs[ids].tolist(), ids.tolist(), strict=True))
    likely.sort(key=lambda entry: (-entry[0], entry[2]))
    entries = [own, *likely[:count]]
    return Logprobs([token for _, _, token in entries], [chance for _, chance, _ in entries], rank)
