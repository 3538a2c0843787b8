"""Which drafted tokens stand, and what replaces the first that does not. Two rules; the first is the default."""

import torch
from torch import Tensor

from inkcap.ops.sample.ref import gumbel, noise_bits, noise_keys

# Added to a position for the noise of rejection: what the draft at that position was drawn with must not decide on it.
SECOND_STREAM = 1 << 62


def agreement(drafts: Tensor, drawn: Tensor) -> Tensor:
    """How many of the drawn tokens stand, at least one each: drafts are accepted while they are what was drawn anyway.

    drafts: [R, W], -1 where a row has fewer; drawn: [R, W + 1], the token drawn at each drafted position and behind
    the last, as if there were no drafts. Returns [R] int64. Row i adds drawn[i, :count], the same tokens as without
    drafts whatever they were.
    """
    return (drafts == drawn[:, :-1]).cumprod(1).sum(1) + 1


def rejection(
    drafts: Tensor, proposals: Tensor, targets: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """The classic rule (Leviathan et al. 2023, Chen et al. 2023): tokens [R, W + 1] and how many of them stand [R].

    drafts: [R, W] int64, each drawn from proposals: [R, W, V], probabilities; targets: [R, W + 1, V], the model's
    probabilities at those positions and behind the last; seeds: [R]; positions: [R] of the first draft. A draft x
    stands with probability min(1, target(x) / proposal(x)); what replaces the first that falls is drawn from
    max(target - proposal, 0), and if none falls one more token from the last target. Each token is distributed as its
    target, but which token comes out depends on the drafts.
    """
    width, vocabulary = proposals.shape[1:]
    keys = torch.stack([noise_keys(seeds, positions + offset + SECOND_STREAM) for offset in range(width + 1)], dim=1)
    # the coin of a position is the noise of an id that no token has
    coin_ids = torch.full((1,), vocabulary, device=drafts.device)
    coins = (noise_bits(keys[:, :-1].flatten(0, 1), coin_ids).double() + 0.5).view(-1, width) * 2.0**-32  # [R, W]
    at = drafts[..., None]
    offered, wanted = proposals.gather(2, at).squeeze(2), targets[:, :-1].gather(2, at).squeeze(2)  # [R, W]
    stands = coins * offered <= wanted
    count = stands.cumprod(1).sum(1)  # [R] drafts that stand
    left = targets.clone()
    left[:, :-1] = (targets[:, :-1] - proposals).clamp(min=0)
    row = torch.arange(len(drafts), device=drafts.device)
    ids = torch.arange(vocabulary, device=drafts.device)
    scores = left[row, count].double().log() + gumbel(noise_bits(keys[row, count], ids))  # [R, V]
    tokens = torch.nn.functional.pad(drafts, (0, 1))
    tokens[row, count] = scores.argmax(1)
    return tokens, count + 1
