"""What drawing a token means: penalties, temperature, top-k, top-p, min-p, and Gumbel noise keyed by position.

The noise of token `id` at `position` of a request with `seed` is a pure function of the three, in integers, so that
every implementation, batch and rank draws alike. All arithmetic wraps; `>>` shifts zeros in:

    mix(x)   x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9;  x ^= x >> 27;  x *= 0x94D049BB133111EB;  x ^= x >> 31    64 bit
    key      mix(mix(seed + 0x9E3779B97F4A7C15) + position); low half a, high half b
    h        x = id * 0x9E3779B1 + a                                                                          32 bit
             x ^= x >> 16;  x *= 0x21F0AAAD;  x ^= x >> 15;  x += b;  x *= 0x735A2D97;  h = x ^ x >> 15
    gumbel   -log(-log1p(-(h + 0.5) / 2**32))                                                            float64

`mix` is the finaliser of SplitMix64 (Steele, Lea, Flood 2014). The uniform number is the distance from 1, since it
is the upper tail of the Gumbel distribution that decides, and there a small number has all its digits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from inkcap.ops.dispatch import op
from inkcap.ops.rows.ref import append_tokens

STRIDE = 0x9E3779B1  # between the counters of neighbouring ids
LOW = 0xFFFFFFFF
TURNS = 2**31  # draws are counted modulo this


def noise_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Keys [S, 2] int64, each below 2**32, of seeds [S] and positions [S] int64."""
    key = _mix64(_mix64(seeds + _signed(0x9E3779B97F4A7C15)) + positions)
    return torch.stack((key & LOW, (key >> 32) & LOW), dim=1)


def noise_bits(keys: Tensor, ids: Tensor) -> Tensor:
    """h [S, n] int64, below 2**32, of keys [S, 2] and token ids [n] or [S, n] int64."""
    low, high = keys[:, :1], keys[:, 1:]
    x = (ids * STRIDE + low) & LOW
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & LOW
    x = ((x ^ (x >> 15)) + high) & LOW
    x = (x * 0x735A2D97) & LOW
    return x ^ (x >> 15)


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise in float64 of 32 random bits."""
    return -torch.log(-torch.log1p(-(bits.double() + 0.5) * 2.0**-32))


@dataclass(frozen=True, slots=True)
class Limits:
    """Which tokens S rows may draw. Top-k acts on the distribution at a row's temperature, top-p on what top-k left,
    min-p on the ratio to the most likely token. Each keeps whatever ties with the last it keeps."""

    top_k: Tensor  # [S] int32, 0: off
    top_p: Tensor  # [S] float32, 1: off
    min_p: Tensor  # [S] float32, 0: off


@op
def allow(logits: Tensor, masks: Tensor) -> None:
    """Set what masks forbid to -inf, in place.

    logits: [S, V] float32; masks: [S, W] int32, 32 W at least V: bit i of word w stands for token 32 w + i.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=masks.device)
    bits = (masks[:, :, None] >> shifts) & 1  # [S, W, 32]
    logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)


@op
def sample(
    logits: Tensor,
    temperature: Tensor,
    limits: Limits | None,
    seeds: Tensor,
    positions: Tensor,
    masks: Tensor | None = None,
) -> Tensor:
    """One token a row: the most likely one where temperature is 0 (ties: lowest id), else a draw.

    logits: [S, V] float32, -inf where masked; temperature: [S] float32; limits: None if no row has any; seeds,
    positions: [S] int64, the position is that of the drawn token; masks: as of `allow`, which may be applied to logits
    in place. Returns [S] int64, -1 where a row's largest logit is not finite or one is no number.
    """
    if masks is not None:
        allow(logits, masks)
    greedy = temperature == 0
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]  # [S, V]
    bits = noise_bits(noise_keys(seeds, positions), torch.arange(logits.shape[1], device=logits.device))
    scores = scaled.double() + gumbel(bits)  # [S, V]
    if limits is not None:
        keep = scaled >= threshold(scaled, limits.top_k, limits.top_p, limits.min_p)[:, None]
        scores = torch.where(keep, scores, -torch.inf)
    drawn = torch.where(greedy, logits.argmax(1), scores.argmax(1))
    return torch.where(logits.amax(1).isfinite(), drawn, -1)  # NaN wins every maximum


@op
def draw_next(
    logits: Tensor,
    banned: Tensor,
    temperature: Tensor,
    limits: Limits | None,
    seeds: Tensor,
    rows: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    spare: int,
    board: Tensor,
    turn: Tensor,
) -> Tensor:
    """`sample` for the next position of each of `rows` [S] int32, which gets its token; the host finds it on the board.

    banned: [B] int64, ids that are not drawn; what logits say of them is lost. tokens, lengths and spare: of
    `append_tokens`. turn: [1] int64, the number of draws modulo TURNS, this one included afterwards. board: [lines, at
    least S] int64, which the host can read; line turn % lines gets a word for each entry, turn * 2**32 + token modulo
    2**32, so that whoever reads it knows of which draw it is. `lines` divides TURNS.

    Where kernels overlap, only the logits may be new: all else is complete before the forward begins.
    """
    if len(banned):
        logits.index_fill_(1, banned, -torch.inf)
    turn.add_(1).remainder_(TURNS)
    drawn = sample(logits, temperature, limits, seeds, lengths[rows.long()])
    append_tokens(rows, drawn, tokens, lengths, spare)
    words = board.to(turn.device, non_blocking=True)  # all lines: where a copy goes cannot depend on a number
    words[:, : len(rows)].index_copy_(0, turn % len(board), ((turn << 32) | (drawn & LOW))[None])
    board.copy_(words, non_blocking=True)
    return drawn


def threshold(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest logit [S] each row may draw. scaled: [S, V] float32, divided by the temperature."""
    falling = scaled.sort(dim=1, descending=True).values
    width = scaled.shape[1]
    highest = falling[:, :1]
    fewest = torch.where(top_k == 0, width, top_k).clamp(max=width).long()
    least = falling.gather(1, fewest[:, None] - 1)  # [S, 1]
    weights = torch.where(falling >= least, (falling.double() - highest).exp(), 0.0)
    mass = weights.cumsum(1)
    before = (mass < top_p[:, None].double() * mass[:, -1:]).sum(1, keepdim=True).clamp(max=width - 1)
    least = torch.where((top_p < 1)[:, None], torch.maximum(least, falling.gather(1, before)), least)
    least = torch.maximum(least, highest + min_p[:, None].log())
    return least.squeeze(1)


@op
def penalize(
    logits: Tensor, counts: Tensor, seen: Tensor, repetition: float, presence: float, frequency: float
) -> None:
    """Make one row's known tokens less likely, in place.

    logits: [V] float32; counts: [V] int32, how often the output has a token; seen: [V] bool, prompt or output has it.
    A seen token's logit is divided by `repetition` if positive and multiplied if not (Keskar et al. 2019); then
    `frequency` per occurrence and `presence` once are taken off tokens of the output.
    """
    logits.copy_(torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits))
    logits -= frequency * counts + presence * (counts > 0)


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit word."""
    return word - 2**64 if word >= 2**63 else word


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical shift to the right of int64."""
    return (x >> by) & (2 ** (64 - by) - 1)
