"""Logits to tokens and log-probabilities of one step: what each row asks for, then one draw for all."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inkcap.base.request import Logprobs
from inkcap.ops.sample.ref import penalize, sample
from inkcap.sampling.logprobs import logprobs
from inkcap.sampling.rows import BadWords, Draws, RowExtras


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token a row, and what was asked about it."""

    tokens: Tensor  # [S] int64
    logprobs: list[Logprobs | None]  # of the logits before masks, penalties and temperature


class Sampler:
    """Draws tokens of one vocabulary, of which `banned` ids never come out."""

    def __init__(self, banned: Sequence[int], device: torch.device) -> None:
        self.banned = torch.tensor([*banned], dtype=torch.int64, device=device)

    def draw(self, logits: Tensor, draws: Draws) -> Sampled:
        """Draw from logits [S, V] float32, which are changed in place.

        In this order: log-probabilities are taken; penalties, then biases; banned and disallowed ids, stop ids before
        `min_tokens` and last ids of bad words are masked; temperature, top-k, top-p, min-p. A row whose stop ids and
        bad words would leave it no token at all is drawn without these two. Raises ValueError when a row's logits are
        not numbers.
        """
        wanted = [place for place, count in enumerate(draws.logprobs) if count is not None]
        raw = logits[wanted] if wanted else None  # a copy
        for place, extras in draws.extras.items():
            _shift(logits[place], extras)
        if len(self.banned):
            logits[:, self.banned] = -torch.inf
        for place, extras in draws.extras.items():
            _mask(logits[place], extras, draws.known[place])
        if not logits.amax(1).isfinite().all():  # NaN wins every maximum
            raise ValueError("the model gave logits that are not finite")
        tokens = sample(logits, draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.seeds, draws.positions)
        found: list[Logprobs | None] = [None] * len(draws.logprobs)
        if raw is not None:
            counts = [count for count in draws.logprobs if count is not None]
            for place, entry in zip(wanted, logprobs(raw, tokens[wanted], counts), strict=True):
                found[place] = entry
        return Sampled(tokens, found)


def _shift(logits: Tensor, extras: RowExtras) -> None:
    """Penalties and biases of one row [V], in place."""
    if extras.counts is not None and extras.seen is not None:
        penalize(logits, extras.counts, extras.seen, extras.repetition, extras.presence, extras.frequency)
    if extras.bias_ids is not None and extras.biases is not None:
        logits[extras.bias_ids] += extras.biases


def _mask(logits: Tensor, extras: RowExtras, known: Tensor) -> None:
    """Mask one row [V] in place. known: [length] int32, the row's tokens."""
    if extras.forbidden is not None:
        logits.masked_fill_(extras.forbidden, -torch.inf)
    early = extras.stops is not None and len(known) < extras.stops_from
    if not early and extras.bad_words is None:
        return
    masked = logits.clone()
    if early:
        masked[extras.stops] = -torch.inf
    if extras.bad_words is not None:
        _mask_bad_words(masked, extras.bad_words, known)
    logits.copy_(torch.where(masked.isneginf().all(), logits, masked))


def _mask_bad_words(logits: Tensor, words: BadWords, known: Tensor) -> None:
    width = words.prefixes.shape[1]
    tail = known.new_full((width,), -2)  # matches no token and is no wildcard
    short = min(width, len(known))
    tail[width - short :] = known[len(known) - short :]
    complete = ((words.prefixes == tail) | (words.prefixes == -1)).all(1)  # [words]
    logits.scatter_reduce_(0, words.lasts, torch.where(complete, -torch.inf, torch.inf), "amin")
