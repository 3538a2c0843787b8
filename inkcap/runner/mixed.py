"""Small steps with chunks in them as CUDA graphs: a tool's result, or the rest of a prompt, beside rows that decode.

An eager step costs the host about 20 ms for 24 layers (an H200 machine, 2026-11-29), more than the device needs for a
few hundred tokens. A captured one has room for S sequences, one more that takes what is left of its T tokens, and a
bound on all lengths. Places that a step leaves free become one-token sequences of the table's spare row. What differs
between steps is uploaded in one copy; tokens are drawn by the graphs of decode steps.
"""

from dataclasses import replace
from functools import partial

import torch

from inkcap.base.step import Chunk, Continue, StepPlan
from inkcap.layers.batch import Batch
from inkcap.ops.rows.ref import slots_of
from inkcap.ops.values import GroupView, Packing
from inkcap.runner.build import range_of
from inkcap.runner.graphs import Graphs, Recorder, Replays
from inkcap.runner.transfer import Posted, upload
from inkcap.sampling.sampler import Sampled

TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512)  # padding costs what tokens do
SEQUENCES = (4, 16, 64)  # and as many as there are rows

Key = tuple[int, int, int]  # sequences, tokens, bound


class MixedGraphs:
    """Captured mixed steps of one worker, beside its captured decode steps."""

    def __init__(self, graphs: Graphs) -> None:
        self.graphs, self.table, self.spare = graphs, graphs.table, graphs.spare
        self.sequences = [n for n in graphs.sizes if n in SEQUENCES or n == graphs.sizes[-1]]
        bounds = graphs.bounds
        self.bounds = sorted({bounds[min(2, len(bounds) - 1)], bounds[-1]})
        self.tokens = [count for count in TOKENS if count < self.bounds[0]]
        # starts, table row and first position of each sequence, last token of all but one; row and position of tokens
        most = self.sequences[-1]
        room = 4 * most + 4 + 2 * TOKENS[-1]
        self.packed = torch.zeros(room, dtype=torch.int32, device=self.table.device)
        self.forwards: dict[Key, Replays] = {}

    def capture(self, recorder: Recorder) -> None:
        """Capture every kind of step; takes seconds. Again: what was not ready before."""
        with torch.inference_mode():
            for tokens in reversed(self.tokens):
                for sequences in reversed(self.sequences):
                    if tokens <= sequences:
                        continue
                    for bound in reversed(self.bounds):
                        key = (sequences, tokens, bound)
                        self.forwards[key] = recorder.capture(partial(self._forward, *key), self.forwards.get(key))

    def __len__(self) -> int:
        """Graphs captured."""
        return len(self.forwards)

    def fit(self, plan: StepPlan) -> Key | None:
        """The smallest captured step that has room for this one."""
        table, work = self.table, plan.work
        if not work or len(work) > self.sequences[-1]:
            return None
        total = longest = 0
        for entry in work:
            first, stop = range_of(entry, table)
            total += stop - first
            longest = max(longest, stop)
            if isinstance(entry, Chunk) and table.setup(entry.row).params.prompt_logprobs is not None:
                return None  # these need the hidden states of all tokens
        sequences = next(n for n in self.sequences if n >= len(work))
        needed = total + sequences - len(work) + 1
        for tokens in self.tokens:
            if tokens >= needed:
                bound = next(bound for bound in self.bounds if bound >= longest)
                key = (sequences, tokens, bound)
                return key if key in self.forwards else None
        return None

    def run(self, plan: StepPlan, key: Key) -> tuple[list[int], Sampled | None, Posted | None]:
        """Queue the whole step. Returns entries of the work that sample, in order, what they draw, and if a graph drew
        it, where the host finds it."""
        graphs, table, work = self.graphs, self.table, plan.work
        self._pack([(entry.row, *range_of(entry, table)) for entry in work], *key[:2])
        sampling = [place for place, entry in enumerate(work) if isinstance(entry, Continue) or entry.samples]
        rows = [work[place].row for place in sampling]
        self.forwards[key].replay()
        if not rows:
            return [], None, None
        masks = graphs.guides.masks(rows)
        if masks is not None or graphs.rich(rows):
            logits = graphs.logits.index_select(0, upload(sampling, torch.int64, table.device))
            sampled = graphs.sampler.draw(logits, replace(table.draws(rows), masks=masks))
            table.append(rows, sampled.tokens)
            return sampling, sampled, None
        drawing = set(sampling)
        graphs.list_rows([entry.row if place in drawing else self.spare for place, entry in enumerate(work)])
        draw = key[0], not table.limited.isdisjoint(rows)
        posted = graphs.board.post(graphs.draws[draw].replay, sampling)
        drawn = graphs.drawn[draw][: len(work)]
        if len(rows) < len(work):
            drawn = drawn.index_select(0, upload(sampling, torch.int64, table.device))
        table.note(rows, drawn)
        return sampling, Sampled(drawn, [], None), posted

    def _pack(self, spans: list[tuple[int, int, int]], sequences: int, tokens: int) -> None:
        """Upload what the step is made of. spans: row, first position and the one behind the last, of each sequence."""
        spans = spans + [(self.spare, 0, 1)] * (sequences - len(spans))
        spans.append((self.spare, 0, tokens - sum(stop - first for _, first, stop in spans)))
        starts, row_of, positions = [0], [], []
        for row, first, stop in spans:
            starts.append(starts[-1] + stop - first)
            row_of += [row] * (stop - first)
            positions += range(first, stop)
        rows, firsts = [row for row, _, _ in spans], [first for _, first, _ in spans]
        lasts = [start - 1 for start in starts[1:-1]]
        packed = [*starts, *rows, *firsts, *lasts, *row_of, *positions]
        host = torch.tensor(packed, dtype=torch.int32, pin_memory=self.packed.is_cuda)
        self.packed[: len(packed)].copy_(host, non_blocking=True)

    def _forward(self, sequences: int, tokens: int, bound: int) -> None:
        """Logits of the last tokens of all sequences but the one of what is left."""
        table, graphs, own = self.table, self.graphs, sequences + 1
        widths = [own + 1, own, own, sequences, tokens, tokens]
        starts, rows, first, lasts, row_of, places = self.packed[: sum(widths)].split(widths)
        row, positions = row_of.long(), places.long()
        packing = Packing(
            starts=starts,
            rows=rows,
            first=first,
            row_of=row_of,
            positions=positions,
            spans=((0, tokens, self.spare, bound - tokens),),
        )
        tables, blocks = [*table.tables.values()], [*table.groups.values()]
        slots = slots_of(row, positions, tables, blocks)
        views = {
            group: GroupView(block, entries, own)
            for group, block, entries, own in zip(table.groups, blocks, tables, slots, strict=True)
        }
        batch = Batch(table.tokens[row, positions].long(), packing, lasts.long(), views, graphs.planes)
        hidden = graphs.model.forward(batch)
        graphs.logits[:sequences] = graphs.model.head(hidden[batch.sampled])
