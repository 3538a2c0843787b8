"""The short convolution for all sequences at once: one gather of old inputs, then a few products over all tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from inkcap.ops import paged
from inkcap.ops.sconv.ref import plus, sconv
from inkcap.ops.values import GroupView, Packing


@dataclass(frozen=True, slots=True)
class Past:
    """Where the W - 1 inputs before each sequence's first token stand, and which inputs each token needs."""

    blocks: Tensor  # [R * (W - 1)]
    offsets: Tensor  # [R * (W - 1)]
    before: Tensor | None  # [R, W - 1, 1] True before position 0; None when no sequence reaches back so far
    sources: list[Tensor] | None  # per old tap [T]: row of [this step's inputs; old inputs]; None: one token a sequence
    windows: tuple[Tensor, Tensor] | None
    """Blocks and offsets [T * W] of all inputs of each token, where every sequence has one token, which is kept, and
    reaches back no further than position 0."""


def locate(view: GroupView, packing: Packing, width: int) -> Past:
    """Index tensors of a step, made once for all its convolutions."""
    found = view.memo.get((Past, width))
    if found is not None:
        return found  # pyright: ignore[reportReturnType]  # a memo has no types
    device = view.table.device
    old = packing.first.long()[:, None] + torch.arange(1 - width, 0, device=device)  # [R, W - 1]
    blocks = view.table[packing.rows.long()].gather(1, old.clamp(min=0) // view.block).long()
    before = old.unsqueeze(2) < 0 if any(first < width - 1 for _, _, _, first in packing.spans) else None
    sources = None
    if any(stop - start > 1 for start, stop, _, _ in packing.spans):
        tokens = len(packing.positions)
        starts = packing.starts.long()
        sequence = torch.repeat_interleave(torch.arange(len(old), device=device), starts.diff())
        inside = torch.arange(tokens, device=device) - starts[sequence]  # [T] index in its sequence
        base = tokens + sequence * (width - 1) + width - 1  # [T] row behind the sequence's old inputs
        sources = [
            torch.where(inside >= back, torch.arange(-back, tokens - back, device=device), base + inside - back)
            for back in range(width - 1, 0, -1)
        ]
    offsets = old % view.block
    windows = None
    tokens, own_blocks, own_offsets = paged.kept(view)
    if sources is before is tokens is None:
        own = own_blocks.unsqueeze(1), own_offsets.unsqueeze(1)
        windows = torch.cat([blocks, own[0]], 1).flatten(), torch.cat([offsets, own[1]], 1).flatten()
    made = Past(blocks.flatten(), offsets.flatten(), before, sources, windows)
    view.memo[Past, width] = made
    return made


def convolve_each(own: Tensor, old: Tensor, past: Past, columns: Tensor, added: Tensor) -> Tensor:
    """What old taps `columns` [W - 1, C] give, and what all of `added` [T, heads, W] give: [T, C]."""
    if past.sources is None:
        window = old  # [T, W - 1, C]
    else:
        inputs = torch.cat([own, old.flatten(0, 1)])
        window = torch.stack([inputs.index_select(0, source) for source in past.sources], 1)
    heads = added.shape[1]
    taps = added.flip(2).transpose(1, 2).unsqueeze(3)  # [T, W, heads, 1]
    every = columns.unflatten(1, (heads, -1)) + taps[:, :-1]  # [T, W - 1, heads, C / heads]
    made = (window.unflatten(2, (heads, -1)) * every).sum(1)
    return made.addcmul_(own.unflatten(1, (heads, -1)), taps[:, -1]).flatten(1)


@sconv.implement("cpu", when=lambda device: device.type == "cpu")
def sconv_cpu(
    x: Tensor,
    taps: Tensor,
    view: GroupView,
    packing: Packing,
    *,
    plane: int,
    scale: float = 1.0,
    residual: Tensor | None = None,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`sconv` of the reference for static taps, also with others added; without static ones it is left to it."""
    if taps.dim() == 3:
        return sconv.reference(
            x, taps, view, packing, plane=plane, scale=scale, residual=residual, added=added, dtype=dtype
        )
    width = taps.shape[1]
    columns = taps.t()  # [W, C]
    past = locate(view, packing, width)
    if past.windows is not None and added is None:
        paged.store(view, plane, x)  # first, so that one read finds the token's own input, too
        inputs = paged.gather(view, plane, *past.windows, "windows").view(-1, width, x.shape[1]).float()
        out = (inputs * columns).sum(1).add_(x)
        return plus(residual, (out if scale == 1.0 else out.mul_(scale)).to(x.dtype), dtype)
    old = paged.gather(view, plane, past.blocks, past.offsets, "past").unflatten(0, (-1, width - 1)).float()
    if past.before is not None:
        old = old.masked_fill(past.before, 0.0)
    own = x.float()
    out = torch.addcmul(own, own, columns[width - 1])
    if added is not None:
        out += convolve_each(own, old, past, columns[: width - 1], added)
    elif past.sources is None:
        out += (old * columns[: width - 1]).sum(1)
    else:
        inputs = torch.cat([own, old.flatten(0, 1)])
        for source, column in zip(past.sources, columns, strict=False):  # the last column is the token's own
            out.addcmul_(inputs.index_select(0, source), column)
    if scale != 1.0:
        out *= scale
    out = out.to(x.dtype)
    paged.store(view, plane, x)
    return plus(residual, out, dtype)
