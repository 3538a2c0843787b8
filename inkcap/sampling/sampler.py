"""Logits to tokens and log-probabilities of one step: what each row asks for, then one draw for all."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inkcap.base.request import Logprobs
from inkcap.ops.sample.ref import allow, penalize, sample
from inkcap.sampling.logprobs import Scored, entries, score
from inkcap.sampling.rows import BadWords, Draws, RowExtras


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token a row, and what was asked about it, where the logits are."""

    tokens: Tensor  # [S] int64; -1 where the row's logits are not numbers
    wanted: list[int]  # places of rows that asked for log-probabilities
    scored: Scored | None  # of these, from the logits before masks, penalties and temperature; None: nobody asked

    @property
    def numbers(self) -> list[Tensor]:
        """What `collect` reads on the host."""
        return [self.tokens, *(self.scored.numbers if self.scored is not None else ())]

    def collect(self, numbers: Sequence[Tensor]) -> tuple[list[int], list[Logprobs | None]]:
        """Tokens and log-probabilities of each row, from `numbers` on the host.

        Raises ValueError when a row's logits are not numbers.
        """
        tokens, *scores = numbers
        if (tokens < 0).any():
            raise ValueError("the model gave logits that are not finite")
        found: list[Logprobs | None] = [None] * len(tokens)
        if self.scored is not None:
            for place, entry in zip(self.wanted, entries(self.scored, scores), strict=True):
                found[place] = entry
        return tokens.tolist(), found


class Sampler:
    """Draws tokens of one vocabulary, of which `banned` ids never come out. Waits for nothing on the device."""

    def __init__(self, banned: Sequence[int], device: torch.device) -> None:
        self.banned = torch.tensor([*banned], dtype=torch.int64, device=device)

    def _ban(self, logits: Tensor) -> None:
        if len(self.banned):
            logits.index_fill_(1, self.banned, -torch.inf)

    def draw(self, logits: Tensor, draws: Draws) -> Sampled:
        """Draw from logits [S, V] float32, which are changed in place.

        In this order: log-probabilities are taken; penalties, then biases; banned ids and what rules forbid, disallowed
        ids, stop ids before `min_tokens` and last ids of bad words are masked; temperature, top-k, top-p, min-p. A row
        that would have no token left is drawn without its disallowed ids, or without its stop ids and bad words.
        """
        wanted = [place for place, count in enumerate(draws.logprobs) if count is not None]
        raw = None
        if wanted:  # a copy
            raw = logits.clone() if len(wanted) == len(logits) else torch.stack([logits[place] for place in wanted])
        for place, extras in draws.extras.items():
            _shift(logits[place], extras)
        self._ban(logits)
        for place, extras in draws.extras.items():
            if draws.masks is not None:
                allow(logits[place : place + 1], draws.masks[place : place + 1])
            _mask(logits[place], extras, draws.known[place])
        tokens = sample(logits, draws.temperature, draws.limits, draws.seeds, draws.positions, draws.masks)
        if raw is None:
            return Sampled(tokens, wanted, None)
        own = tokens.clamp(min=0)  # a row without a token fails the step anyway
        if len(wanted) < len(tokens):
            own = torch.stack([own[place] for place in wanted])
        return Sampled(tokens, wanted, score(raw, own, [c for c in draws.logprobs if c is not None]))


def _shift(logits: Tensor, extras: RowExtras) -> None:
    """Penalties and biases of one row [V], in place."""
    if extras.counts is not None and extras.seen is not None:
        penalize(logits, extras.counts, extras.seen, extras.repetition, extras.presence, extras.frequency)
    if extras.bias_ids is not None and extras.biases is not None:
        logits[extras.bias_ids] += extras.biases


def _mask(logits: Tensor, extras: RowExtras, known: Tensor) -> None:
    """Mask one row [V] in place. known: [length] int32, the row's tokens."""
    if extras.forbidden is not None:
        left = logits.masked_fill(extras.forbidden, -torch.inf)
        logits.copy_(torch.where(left.isneginf().all(), logits, left))
    early = extras.stops is not None and len(known) < extras.stops_from
    if not early and extras.bad_words is None:
        return
    masked = logits.clone()
    if early and extras.stops is not None:
        masked.index_fill_(0, extras.stops, -torch.inf)
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
