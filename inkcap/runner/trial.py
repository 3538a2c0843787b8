"""Steps that are tried before there is a cache: one to be measured, all kinds that are not captured to be compiled.

Kernels are compiled for numbers of tokens and of sequences and for whether rows are long; `spans_of_kinds` gives one
step of each kind, so that no request waits for a compiler.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from inkcap.base.room import WORDS
from inkcap.cache.arena import Arena
from inkcap.cache.plan import groups_of, layout_of
from inkcap.layers.batch import Batch
from inkcap.models.base import Model
from inkcap.ops.sample.ref import Limits, allow, penalize, sample
from inkcap.ops.values import GroupView, Packing

Spans = tuple[tuple[int, int, int, int], ...]  # as in Packing
Planes = Sequence[Mapping[str, tuple[Tensor, ...]]]  # as in Batch

TOKENS = (640, 1024, 2048, 8192)  # of steps beyond what is captured
LONG = 16384  # tokens of a row that are more than any bias or window reaches


def batch_of(
    model: Model,
    spans: Spans,
    sampled: int,
    device: torch.device,
    tables: Mapping[str, Tensor] | None = None,
    planes: Planes | None = None,
) -> Batch:
    """A step whose tokens have no blocks, so that it stores nothing, of which `sampled` tokens are to be drawn.

    `tables` of blocks, by group, and `planes` of the state are new ones unless they are given; kernels are compiled for
    their strides.
    """
    edges, first = [*(start for start, *_ in spans), spans[-1][1]], [first for *_, first in spans]
    starts = torch.tensor(edges, dtype=torch.int32, device=device)
    firsts = torch.tensor(first, dtype=torch.int32, device=device)
    rows = torch.arange(len(spans), dtype=torch.int32, device=device)
    row_of = rows.repeat_interleave(starts.diff().long(), output_size=edges[-1])  # [T]
    positions = torch.arange(edges[-1], device=device) + (firsts - starts[:-1])[row_of.long()]  # [T]
    packing = Packing(starts, rows, firsts, row_of, positions, spans)
    groups, reach = groups_of(model.states), max(first + stop - start for start, stop, _, first in spans)
    views = {
        group.name: GroupView(
            group.block,
            torch.zeros(len(spans), -(-reach // group.block), dtype=torch.int32, device=device)
            if tables is None
            else tables[group.name],
            torch.full_like(positions, -1),
        )
        for group in groups
    }
    if planes is None:
        planes = Arena(model.states, layout_of(groups, 0).size_bytes, device).planes  # of block 0
    return Batch(torch.zeros_like(positions), packing, torch.arange(sampled, device=device), views, planes)


def spans_of_kinds(rows: int, step_tokens: int, longest: int) -> Iterator[Spans]:
    """Steps of all kinds for up to `rows` sequences of up to `longest` tokens: one prompt, a prompt beside a row that
    decodes, many prompts; at the start of rows, which only steps of few tokens tell apart, and behind much."""
    for number, tokens in enumerate(sorted({min(step_tokens, count) for count in TOKENS})):
        if tokens <= longest:
            yield ((0, tokens, 0, 0),)
        tokens = tokens - 1 or 1  # a number that 16 does not divide compiles other kernels
        some = min(rows, tokens)
        even = [tokens * n // some for n in range(some + 1)]
        for edges in [0, tokens], [0, tokens - 1, tokens], even:
            if len(edges) - 1 > some or max(b - a for a, b in pairwise(edges)) > longest:
                continue
            for reach in (0, min(LONG, longest)) if number == 0 else (min(LONG, longest),):
                yield tuple((a, b, row, max(0, reach - b + a)) for row, (a, b) in enumerate(pairwise(edges)))


def try_draws(vocabulary: int, device: torch.device) -> None:
    """Draw as rows can ask for it that are not drawn by a captured step."""
    for rows in (1, 3):
        logits = torch.zeros(rows, vocabulary, device=device)
        seeds, ones = torch.zeros(rows, dtype=torch.int64, device=device), torch.ones(rows, device=device)
        masks = torch.full((rows, WORDS), -1, dtype=torch.int32, device=device)
        for limits in (None, Limits(seeds.int(), ones, ones)):
            for allowed in (None, masks):
                sample(logits, ones, limits, seeds, seeds, allowed)
        allow(logits, masks)
        penalize(logits[0], seeds.new_zeros(vocabulary).int(), ones.new_zeros(vocabulary).bool(), 1.0, 0.0, 0.0)
