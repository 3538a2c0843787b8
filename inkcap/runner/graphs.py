"""Decode steps as CUDA graphs: at most two a step, captured once, replayed with nothing but row numbers that change.

A step made only of continues runs, for R rows and T tokens, T the next size of `SIZES`:

    forward   newest tokens, positions and slots of `rows` -> model -> logits
    sampling  banned ids, draw, append to the rows' tokens, tell the host

in one graph, or in two where a row has limits, rules, penalties or wants log-probabilities: rules' masks are filled
while the forward runs, and what has no graph is queued behind it.

Graphs are keyed by T and, for the forward, by a bound on the rows' lengths: kernels choose their launch by it. Entries
beyond R name the table's spare row, which has one token and no blocks, so they store nothing and nobody reads them.
"""

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from inkcap.base.step import Chunk, StepPlan
from inkcap.layers.batch import Batch
from inkcap.models.base import Model
from inkcap.ops.dispatch import OPS, Op
from inkcap.ops.rows.ref import newest
from inkcap.ops.sample.ref import allow, draw_next
from inkcap.ops.values import GroupView, Packing
from inkcap.runner.guides import Guides
from inkcap.runner.table import RowTable, limits_of
from inkcap.runner.transfer import Board, Posted, upload
from inkcap.sampling.sampler import Sampled, Sampler

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # tokens of a captured step
BOUNDS = (2048, 8192, 32768, 262144)  # tokens; and the longest
# References of these read numbers on the host, which a graph cannot.
HOST_BOUND = (
    "attention",
    "attn_prep",
    "attn_prep_clip",
    "experts_down",
    "experts_settle",
    "experts_up",
    "routed_down",
    "routed_settle",
    "routed_up",
    "sconv",
    "settle",
)


class Replays(Protocol):
    """Captured work, to be queued again."""

    def replay(self) -> None: ...


class Recorder(Protocol):
    """Takes work, one piece after another; `earlier`: what it made of the same piece before, if it did."""

    def capture(self, work: Callable[[], None], earlier: Replays | None) -> Replays: ...


class DeviceRecorder:
    """Captures work, which does not run. All graphs share a pool of memory, so they must run one after another.

    Work that called kernels which were not ready is captured again when it comes again.
    """

    def __init__(self, device: torch.device, missed: Sized) -> None:
        """`missed` gets longer with each call of a kernel that is not ready."""
        self.device, self.missed = device, missed
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.free_bytes = torch.cuda.mem_get_info(device)[0]
        self.lacking: set[Replays] = set()
        with torch.cuda.stream(self.stream):  # a library allocates for each stream when it is used first
            self.one = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
            torch.mm(self.one, self.one)

    def capture(self, work: Callable[[], None], earlier: Replays | None) -> Replays:
        """Capture `work`, unless `earlier` lacks nothing."""
        if earlier is not None and earlier not in self.lacking:
            return earlier
        graph, missed = torch.cuda.CUDAGraph(), len(self.missed)
        with torch.cuda.stream(self.stream):  # torch.cuda.graph would give the allocator's memory back each time
            graph.capture_begin(self.pool, capture_error_mode="thread_local")
            try:
                work()
                if len(self.missed) > missed:  # perhaps all that it has, and torch warns of an empty graph
                    self.one.fill_(1)
            finally:
                graph.capture_end()
        if len(self.missed) > missed:
            self.lacking.add(graph)
        return graph

    @property
    def taken_bytes(self) -> int:
        """Memory of the device that went since the recorder was made."""
        return self.free_bytes - torch.cuda.mem_get_info(self.device)[0]


class Graphs:
    """Captured decode steps of one worker."""

    def __init__(
        self,
        model: Model,
        table: RowTable,
        planes: Sequence[Mapping[str, tuple[Tensor, ...]]],
        sampler: Sampler,
        guides: Guides,
        longest: int,
    ) -> None:
        """For rows up to `longest` tokens. The table has a spare row, and its tensors stay where they are."""
        self.model, self.table, self.planes, self.sampler, self.guides = model, table, planes, sampler, guides
        self.spare = table.rows
        self.sizes = [size for size in SIZES if size < table.rows] + [min(table.rows, SIZES[-1])]
        self.bounds = bounds_up_to(longest)
        self.listed: tuple[list[int], int] = ([], -1)  # rows that the device has listed, and the table's serial then
        most, device = self.sizes[-1], table.device
        self.rows = torch.full((most,), self.spare, dtype=torch.int32, device=device)
        self.columns = {name: column.new_zeros(most) for name, column in table.columns.items()}
        self.logits = torch.zeros(most, model.vocab_size, dtype=torch.float32, device=device)
        self.starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.every = torch.arange(most, device=device)
        self.board = Board(most, device)
        # by size, and whether top-k, top-p and min-p are heeded
        self.drawn: dict[tuple[int, bool], Tensor] = {}  # where the graph leaves its tokens
        self.draws: dict[tuple[int, bool], Replays] = {}
        # by size and bound
        self.forwards: dict[tuple[int, int], Replays] = {}
        self.wholes: dict[tuple[int, int], Replays] = {}
        self.whole_drawn: dict[tuple[int, int], Tensor] = {}

    def host_bound(self) -> list[str]:
        """Names of the ops that the model calls by references that read numbers on the host; these prevent capture."""
        with torch.inference_mode():
            return called_by_reference(partial(self._forward, 1, self.bounds[0]))

    def capture(self, recorder: Recorder) -> None:
        """Capture all sizes up to the table's rows, and all bounds; takes seconds. Again: what was not ready before."""
        with torch.inference_mode():
            # the largest first, so that the others find their memory in the pool
            for size in reversed(self.sizes):
                for limited in (False, True):
                    kind = (size, limited)
                    self.draws[kind] = recorder.capture(partial(self._draw, *kind), self.draws.get(kind))
                for bound in reversed(self.bounds):
                    key = (size, bound)
                    self.forwards[key] = recorder.capture(partial(self._show, *key), self.forwards.get(key))
                    self.wholes[key] = recorder.capture(partial(self._whole, *key), self.wholes.get(key))

    def __len__(self) -> int:
        """Graphs captured."""
        return len(self.draws) + len(self.forwards) + len(self.wholes)

    def fit(self, plan: StepPlan) -> bool:
        """Whether the step is made of continues only, and of no more than were captured."""
        work = plan.work
        return 0 < len(work) <= self.sizes[-1] and not any(isinstance(entry, Chunk) for entry in work)

    def run(self, plan: StepPlan) -> tuple[Sampled, Posted | None]:
        """Queue the whole step, which fits; what it draws is in the rows once it has run, and if a graph drew it, on
        the board."""
        table = self.table
        rows = [entry.row for entry in plan.work]
        count = len(rows)
        size = next(size for size in self.sizes if size >= count)
        longest = max(table.host_lengths[row] for row in rows)
        bound = next(bound for bound in self.bounds if bound >= longest)
        self.list_rows(rows)
        rich = self.rich(rows)
        limited = not table.limited.isdisjoint(rows)
        if not (rich or limited or self.guides.follow(rows)):
            posted = self.board.post(self.wholes[size, bound].replay, slice(count))
            drawn = self.whole_drawn[size, bound][:count]
            table.note(rows, drawn)
            return Sampled(drawn, [], None), posted
        self.forwards[size, bound].replay()
        masks = self.guides.masks(rows)  # filled while the forward runs
        if rich:
            # these need more than the graph has; nothing waits, so it is queued while the forward runs
            sampled = self.sampler.draw(self.logits[:count], replace(table.draws(rows), masks=masks))
            table.append(rows, sampled.tokens)
            return sampled, None
        if masks is not None:
            allow(self.logits[:count], masks)
        posted = self.board.post(self.draws[size, limited].replay, slice(count))
        drawn = self.drawn[size, limited][:count]
        table.note(rows, drawn)
        return Sampled(drawn, [], None), posted

    def rich(self, rows: list[int]) -> bool:
        """Whether a row wants more than a draw with limits."""
        table = self.table
        return any(row in table.extras or table.setup(row).params.logprobs is not None for row in rows)

    def list_rows(self, rows: list[int]) -> None:
        """Tell the device whose tokens are drawn, unless it knows."""
        now = (rows, self.table.serial)
        if now == self.listed:
            return
        index = upload(rows + [self.spare] * (len(self.rows) - len(rows)), torch.int32, self.table.device)
        self.rows.copy_(index)
        for name, column in self.columns.items():
            torch.index_select(self.table.columns[name], 0, index, out=column)
        self.listed = now

    def _forward(self, size: int, bound: int) -> Tensor:
        """Logits of the newest tokens of the first `size` rows listed."""
        table, rows = self.table, self.rows[:size]
        groups = [*table.groups]
        ids, positions, first, slots = newest(
            rows, table.tokens, table.lengths, [table.tables[g] for g in groups], [table.groups[g] for g in groups]
        )
        packing = Packing(
            starts=self.starts[: size + 1],
            rows=rows,
            first=first,
            row_of=rows,
            positions=positions,
            spans=tuple((n, n + 1, self.spare, bound - 1) for n in range(size)),
        )
        views = {g: GroupView(table.groups[g], table.tables[g], own) for g, own in zip(groups, slots, strict=True)}
        hidden = self.model.forward(Batch(ids, packing, self.every[:size], views, self.planes))
        return self.model.head(hidden)

    def _show(self, size: int, bound: int) -> None:
        """The forward alone, its logits where whatever draws looks for them."""
        self.logits[:size] = self._forward(size, bound)

    def _whole(self, size: int, bound: int) -> None:
        """A step whose rows want nothing but a draw from all words."""
        self.whole_drawn[size, bound] = self._add(size, self._forward(size, bound), limited=False)

    def _draw(self, size: int, limited: bool) -> None:
        self.drawn[size, limited] = self._add(size, self.logits[:size], limited)

    def _add(self, size: int, logits: Tensor, limited: bool) -> Tensor:
        """Tokens [size] of the first rows listed, which are added to the rows and told to the host."""
        table, board = self.table, self.board
        columns = {name: column[:size] for name, column in self.columns.items()}
        return draw_next(
            logits,
            self.sampler.banned,
            columns["temperature"],
            limits_of(columns) if limited else None,
            columns["seed"],
            self.rows[:size],
            table.tokens,
            table.lengths,
            self.spare,
            board.words,
            board.turn,
        )


def bounds_up_to(longest: int) -> list[int]:
    """Bounds on a row's length, the last one `longest`."""
    return [*(bound for bound in BOUNDS if bound < longest), longest]


def called_by_reference(work: Callable[[], object]) -> list[str]:
    """Names of those ops of HOST_BOUND that `work` calls and that have no kernel here."""
    found: set[str] = set()

    def noted(each: Op[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            found.add(each.name)
            return each.reference(*args, **kwargs)

        return call

    watched = [OPS[name] for name in HOST_BOUND if OPS[name].chosen == "ref"]
    for each in watched:
        each.function = noted(each)
    try:
        work()
    finally:
        for each in watched:
            each.function = each.reference
    return sorted(found)
