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
    values, chosen = logits.gather(1, order).tolist(), order.tolist()
    made = []
    for row, (count, token, rank) in enumerate(zip(counts, tokens.tolist(), ranks.tolist(), strict=True)):
        ids = [token, *_likeliest(logits[row], values[row], chosen[row], count)]
        made.append(Logprobs(ids, logs[row, ids].tolist(), rank))
    return made


def _likeliest(logits: Tensor, values: list[float], ids: list[int], count: int) -> list[int]:
    """The `count` likeliest ids of one row, of which `values` and `ids` are the first few, ties in any order."""
    if count and count < len(values) and values[count] == values[count - 1]:
        ids = torch.nonzero(logits >= values[count]).flatten().tolist()
        values = logits[ids].tolist()
    ranked = sorted(zip(values, ids, strict=True), key=lambda entry: (-entry[0], entry[1]))
    return [token for _, token in ranked[:count]]
