"""Attention on a CPU: sequences with one query in one padded call, the others in tiles of queries.

The bias depends on the distance alone, so it is never gathered. For one query the keys are laid out newest first: key j
is at distance j. For a tile of queries the bias of all distances is one product, of which each query's row is a view
shifted by one. A sink is one more key of zeros behind the others, whose bias is the sink.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inkcap.ops import paged
from inkcap.ops.attention.ref import attention
from inkcap.ops.values import GroupView, Packing, Scores

TILE = 128  # queries at once; bounds the memory of the bias
CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # of E4M3, all of them


@dataclass(frozen=True, slots=True)
class Singles:
    """Sequences with one query in this step."""

    tokens: Tensor | None  # [N] their tokens; None when the step has no others
    blocks: Tensor  # [N * (keys + more)] newest first; behind a sequence's oldest visible key that key is repeated
    offsets: Tensor  # [N * (keys + more)]
    keys: int
    more: int  # places for a sink behind them: 0 or 1
    mask: Tensor | None  # [N, 1, keys] fp32, -inf at the repetitions; None when there are none


def locate(view: GroupView, packing: Packing, window: int | None, more: int) -> Singles | None:
    """Index tensors of a step, made once for all layers of the group; None when no sequence has one query."""
    if (Singles, window, more) in view.memo:
        return view.memo[Singles, window, more]  # pyright: ignore[reportReturnType]  # a memo has no types
    spans = [span for span in packing.spans if span[1] - span[0] == 1]
    made = None
    if spans:
        device = view.table.device
        starts, _, rows, positions = (torch.tensor(column, device=device) for column in zip(*spans, strict=True))
        seen = positions + 1 if window is None else (positions + 1).clamp(max=window)  # [N]
        keys = int(seen.max())
        back = torch.minimum(torch.arange(keys + more, device=device), seen[:, None] - 1)  # [N, keys + more]
        at = positions[:, None] - back
        blocks = view.table[rows].gather(1, at // view.block).long()
        mask = None
        if len({min(span[3] + 1, window or span[3] + 1) for span in spans}) > 1:
            repeated = torch.arange(keys, device=device) >= seen[:, None]
            mask = torch.zeros(repeated.shape, device=device).masked_fill(repeated, -torch.inf).unsqueeze(1)
        tokens = None if len(spans) == len(packing.spans) else starts
        made = Singles(tokens, blocks.flatten(), (at % view.block).flatten(), keys, more, mask)
    view.memo[Singles, window, more] = made
    return made


def decoded(x: Tensor) -> Tensor:
    """Codes as fp32, anything else as it is. By a table: 0.7 ns each on one core, torch's conversion takes 3.9."""
    if x.dtype is not torch.float8_e4m3fn:
        return x
    return CODES.index_select(0, x.reshape(-1).view(torch.uint8).int()).view(x.shape)


@attention.implement("cpu", when=lambda device: device.type == "cpu")
def attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    scores: Scores,
    view: GroupView,
    packing: Packing,
    sinks: Tensor | None = None,
    gate: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """`attention` of the reference. This step's keys must have been stored, too. Codes are decoded to fp32.

    The bias is not rounded, and log scaling is applied to the relative states instead of it. What heads attend to is
    rounded before the gate, too.
    """
    states = r.float()
    if v_scale is not None:
        q, k, v = q.float(), k.float(), v.float()
    if scores.scaling is not None and scores.scaling.active(packing):
        states = states * scores.scaling.factor(packing.positions)[:, None, None]
    singles = locate(view, packing, scores.window, sinks is not None)
    if singles is not None and singles.tokens is None:
        out = attend_singles(q, states, scores, view, singles, sinks)
    else:
        out = torch.empty_like(q)
        if singles is not None:
            chosen = singles.tokens
            sunk = None if sinks is None else sinks[chosen]
            out[chosen] = attend_singles(q[chosen], states[chosen], scores, view, singles, sunk)
        for start, stop, row, first in packing.spans:
            if stop - start > 1:
                low = 0 if scores.window is None else max(0, first - scores.window + 1)
                keys, values = k[start:stop], v[start:stop]
                if low < first:
                    keys = torch.cat([decoded(paged.read(view, 0, row, low, first)), keys])
                    values = torch.cat([decoded(paged.read(view, 1, row, low, first)), values])
                sunk = None if sinks is None else sinks[start:stop]
                target = out[start:stop]
                attend_span(q[start:stop], keys, values, states[start:stop], first - low, scores, target, sunk)
    if v_scale is not None:
        out = (out * v_scale.repeat_interleave(q.shape[1] // k.shape[1])[:, None]).to(r.dtype)
    out = out.flatten(1)
    return out if gate is None else (out.float() * gate.float().sigmoid()).to(out.dtype)


def attend_singles(
    q: Tensor, states: Tensor, scores: Scores, view: GroupView, singles: Singles, sinks: Tensor | None
) -> Tensor:
    """q [N, heads, D], states [N, heads, S] and sinks [N, heads] to [N, heads, D]."""
    name = "keys and sink" if singles.more else "keys"
    keys, values = (
        decoded(paged.gather(view, plane, singles.blocks, singles.offsets, name)).unflatten(0, (len(q), -1))
        for plane in (0, 1)
    )  # [N, keys, kv heads, D], and behind the keys one place for a sink
    near = scores.bias[:, : singles.keys]
    bias = states @ near.float()  # [N, heads, keys within the extent]
    if near.shape[1] < singles.keys:
        bias = F.pad(bias, (0, singles.keys - near.shape[1]))
    if singles.mask is not None:
        bias += singles.mask
    if sinks is not None:
        keys[:, -1].zero_()
        values[:, -1].zero_()
        bias = torch.cat([bias, sinks.float().unsqueeze(2)], 2)
    kv = keys.shape[2]
    heads = F.scaled_dot_product_attention(
        q.unflatten(1, (kv, -1)),  # the queries of a kv head take the place of a sequence's queries
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=bias.to(q.dtype).unflatten(1, (kv, -1)),
        scale=scores.scale,
    )
    return heads.flatten(1, 2)


def attend_span(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    states: Tensor,
    older: int,
    scores: Scores,
    out: Tensor,
    sinks: Tensor | None,
) -> None:
    """Queries [n, heads, D] over keys and values [older + n, kv heads, D], of which the last n are their own."""
    kv = keys.shape[1]
    extent = scores.bias.shape[1]
    for start in range(0, len(q), TILE):
        rows = q[start : start + TILE]
        n, heads, _ = rows.shape
        high = older + start + n
        low = 0 if scores.window is None else max(0, older + start - scores.window + 1)
        # column c of the product is distance span - c; query t sees key s at column s + n - 1 - t
        span = high - low - 1
        distance = torch.arange(span, -n, -1, device=q.device)
        profile = scores.bias.float()[:, distance.clamp(0, extent - 1)]
        profile = profile * ((distance >= 0) & (distance < extent))
        hidden = distance < 0 if scores.window is None else (distance < 0) | (distance >= scores.window)
        shade = torch.zeros(len(distance), device=q.device).masked_fill(hidden, -torch.inf)
        both = torch.addmm(shade, states[start : start + n].flatten(0, 1), profile).to(q.dtype)  # [n * heads, columns]
        width = len(distance)
        group = heads // kv
        bias = both.as_strided(
            (kv, group, n, high - low), (group * width, width, heads * width - 1, 1), both.storage_offset() + n - 1
        )
        seen, told = keys[low:high], values[low:high]
        if sinks is not None:
            sunk = sinks[start : start + n].to(q.dtype).t().unflatten(0, (kv, group))
            bias = torch.cat([bias, sunk.unsqueeze(3)], 3)
            seen, told = (F.pad(part, (0, 0, 0, 0, 0, 1)) for part in (seen, told))
        size = (kv, group, len(seen), q.shape[2])
        attended = F.scaled_dot_product_attention(
            rows.unflatten(1, (kv, group)).permute(1, 2, 0, 3),
            seen.transpose(0, 1).unsqueeze(1).expand(size),
            told.transpose(0, 1).unsqueeze(1).expand(size),
            attn_mask=bias,
            scale=scores.scale,
        )  # [kv heads, group, n, D]
        out[start : start + n] = attended.permute(2, 0, 1, 3).flatten(1, 2)
