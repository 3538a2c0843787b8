"""From what the layers keep and a budget in bytes to the slabs that groups share. Made once, at start, and printed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from inkcap.base.errors import NotEnoughMemory, SetupError
from inkcap.cache.group import CacheGroup
from inkcap.cache.pool import Pool, Slabs
from inkcap.cache.prefix import GRAIN
from inkcap.cache.state import LayerState, plane_bytes

# About as many slabs is a memory cut into. Many, because a slab is one group's until the last of its blocks is let go:
# with 256, rows of 30 to 120K tokens left 29 % of 60 GiB idle, with 1024 less than 11 % (bench/sched.py stranded).
SLABS = 1024
STEPS_AHEAD = 2  # a step may be planned while another runs, so blocks of two steps are out at once


def groups_of(states: Iterable[LayerState]) -> list[CacheGroup]:
    """The cache groups that the declared states form, in the order they first appear.

    Raises SetupError if states of one group disagree on window, block or reads_own_step, or a block does not divide
    the grain.
    """
    groups: dict[str, CacheGroup] = {}
    for state in states:
        block_bytes = sum(plane_bytes(plane, state.block) for plane in state.planes)
        mine = CacheGroup(state.group, state.block, block_bytes, state.window, state.reads_own_step)
        known = groups.get(state.group)
        if known is None:
            if GRAIN % state.block:
                raise SetupError(f"cache group {state.group}: a block of {state.block} tokens does not divide {GRAIN}")
            groups[state.group] = mine
            continue
        if replace(known, block_bytes=0) != replace(mine, block_bytes=0):
            raise SetupError(
                f"visit {state.visit} declares cache group {state.group} as window {mine.window}, block {mine.block}, "
                f"reads_own_step {mine.reads_own_step}; earlier visits as window {known.window}, block {known.block}, "
                f"reads_own_step {known.reads_own_step}. States of one group must agree: give one another group name."
            )
        groups[state.group] = replace(known, block_bytes=known.block_bytes + block_bytes)
    return list(groups.values())


@dataclass(frozen=True, kw_only=True)
class Load:
    """What rows and steps may ask of the cache. Tokens, but for `rows`."""

    rows: int  # sequences that run at once
    step_tokens: int  # of one step over all sequences
    chunk: int  # of one sequence in one step
    keep_every: int  # between boundaries worth resuming from
    drafts: int = 0  # a row's drafted tokens in one step
    lag: int = 0  # trailing positions that will be computed again
    prefix: bool = True  # each row also holds, where there is room, the last boundary it could be resumed from


def touched(tokens: int, block: int) -> int:
    """Blocks that `tokens` positions in a row may touch, wherever they start."""
    return -(-(tokens - 1) // block) + 1 if tokens > 0 else 0


def boundary_blocks(group: CacheGroup, lag: int) -> int:
    """Blocks of a windowed group that one boundary needs. Boundaries are multiples of the block."""
    assert group.window is not None, f"group {group.name} is not windowed"
    return -(-(group.window - 1 + lag) // group.block)


def least_blocks(group: CacheGroup, load: Load) -> int:
    """Blocks of a windowed group without which one row alone could not run one chunk."""
    assert group.window is not None, f"group {group.name} is not windowed"
    reach = group.window - 1 + 2 * load.lag
    width = max(1 + load.drafts, min(load.chunk, load.step_tokens))
    if group.reads_own_step:
        return touched(reach + width, group.block)
    edges = width // load.keep_every + 3  # the regular ones, the prompt's end, where it parts from another prompt
    tail = touched(reach + 1 + load.drafts, group.block)
    return touched(reach, group.block) + tail + edges * boundary_blocks(group, load.lag)


def row_blocks(group: CacheGroup, load: Load) -> int:
    """Blocks of a windowed group that a decoding row may hold."""
    assert group.window is not None, f"group {group.name} is not windowed"
    reach = group.window - 1 + 2 * load.lag + STEPS_AHEAD * (1 + load.drafts)
    if group.reads_own_step:
        return touched(reach + (GRAIN if load.prefix else 0), group.block)
    # besides, a prompt's end, and the last boundary behind the row
    return touched(reach, group.block) + boundary_blocks(group, load.lag) * (2 if load.prefix else 1)


def step_blocks(group: CacheGroup, load: Load, filling: int) -> int:
    """Blocks of a windowed group that history of `filling` rows takes until the steps which run it are done."""
    tokens = min(load.step_tokens, filling * load.chunk)
    if group.reads_own_step:
        return STEPS_AHEAD * -(-tokens // group.block)
    return STEPS_AHEAD * (tokens // load.keep_every * boundary_blocks(group, load.lag))


def live_blocks(group: CacheGroup, load: Load) -> int:
    """Blocks of a windowed group with which `rows` rows never wait for one another."""
    return max(load.rows * row_blocks(group, load) + step_blocks(group, load, load.rows), least_blocks(group, load))


@dataclass(frozen=True)
class Layout:
    """How one memory is cut. Every group sees all of it as an array of its own blocks; a slab is one group's at a time.

    memory   | block 0 of every group | slab 0 | slab 1 | ...
    """

    groups: tuple[CacheGroup, ...]
    slab_bytes: int
    slabs: int

    @property
    def first(self) -> int:
        """Bytes before slab 0."""
        return max((group.block_bytes for group in self.groups), default=0)

    @property
    def size_bytes(self) -> int:
        """Bytes of all of it."""
        return self.first + self.slabs * self.slab_bytes

    def cuts(self, group: CacheGroup) -> list[range]:
        """The blocks of a group that lie whole in each slab."""
        size = group.block_bytes
        edges = [self.first + n * self.slab_bytes for n in range(self.slabs + 1)]
        return [range(-(-low // size), high // size) for low, high in pairwise(edges)]

    def most(self, group: CacheGroup) -> int:
        """Blocks that a group would have if the whole memory were its own."""
        return sum(map(len, self.cuts(group)))

    def least(self, group: CacheGroup) -> int:
        """Blocks of a group that a slab has at least."""
        return min(map(len, self.cuts(group)), default=0)

    def slabs_for(self, group: CacheGroup, blocks: int) -> int:
        """Slabs that hold that many blocks of a group."""
        return -(-blocks // self.least(group)) if self.slabs else blocks

    def pools(self) -> list[Pool]:
        """The pools of the groups, nothing held."""
        slabs = Slabs(self.slabs)
        return [Pool(slabs, self.cuts(group)) for group in self.groups]


def layout_of(groups: Sequence[CacheGroup], size_bytes: int) -> Layout:
    """Cut a memory of that size, or a little less, so that the largest blocks fit without a rest."""
    largest = max((group.block_bytes for group in groups), default=1)
    narrow = (
        1 if len(groups) == 1 else 2
    )  # a stretch twice as long as a block has a whole one in it, wherever it begins
    slab = max(narrow, size_bytes // (SLABS * largest)) * largest
    return Layout(tuple(groups), slab, max(0, size_bytes - largest) // slab)


@dataclass(frozen=True)
class MemoryPlan:
    """How a budget is laid out. `str()` of it is the table that `inkcap plan` prints."""

    layout: Layout
    budget_bytes: int
    load: Load
    max_length: int  # as asked for; `longest` says what fits

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The groups that share it."""
        return self.layout.groups

    @property
    def size_bytes(self) -> int:
        """Bytes on one rank."""
        return self.layout.size_bytes

    @property
    def blocks(self) -> dict[str, int]:
        """Blocks that each group would have if the whole memory were its own."""
        return {group.name: self.layout.most(group) for group in self.groups}

    def context_tokens(self, rows: int) -> int | None:
        """Tokens of full context over all of `rows` running sequences; None if no layer reads all of them."""
        slabs = self.layout.slabs
        for group in self.groups:
            if group.window is not None:
                load = replace(self.load, rows=rows)
                blocks = least_blocks(group, load) if rows == 1 else live_blocks(group, load)
                slabs -= self.layout.slabs_for(group, blocks)
        full = [self.layout.least(group) * group.block for group in self.groups if group.window is None]
        if not full:
            return None
        # each group but the first may leave most of its last slab empty
        return max(0, int((slabs - len(full) + 1) / sum(1 / tokens for tokens in full if tokens)))

    @property
    def longest(self) -> int:
        """The longest single sequence that fits, at most `max_length`: lower the latter to it, or refuse."""
        tokens = self.context_tokens(1)
        return self.max_length if tokens is None else min(self.max_length, tokens)

    def __str__(self) -> str:
        row = f"{self.load.rows} rows, MiB"
        lines = [f"{'group':<10} {'window':>8} {'block':>6} {'block, KiB':>11} {'most blocks':>12} {row:>14}"]
        for group, most in zip(self.groups, self.blocks.values(), strict=True):
            window = "all" if group.window is None else str(group.window)
            live = "" if group.window is None else f"{live_blocks(group, self.load) * group.block_bytes / 2**20:.1f}"
            lines.append(
                f"{group.name:<10} {window:>8} {group.block:>6} {group.block_bytes / 2**10:>11.1f} {most:>12} "
                f"{live:>14}"
            )
        layout = self.layout
        lines.append(
            f"{self.size_bytes / 2**20:.1f} MiB of {self.budget_bytes / 2**20:.1f} MiB per rank are used: "
            f"{layout.slabs} slabs of {layout.slab_bytes / 2**20:.2f} MiB, which the groups share"
        )
        fits = {n: self.context_tokens(n) for n in sorted({1, self.load.rows})}
        lines += [f"with {n} running, {tokens} tokens of full context fit" for n, tokens in fits.items() if tokens]
        short = "" if self.longest == self.max_length else f" ({self.max_length} do not fit)"
        lines.append(f"the longest single sequence has {self.longest} tokens{short}")
        return "\n".join(lines)


def plan_memory(groups: Sequence[CacheGroup], budget_bytes: int, load: Load, *, max_length: int) -> MemoryPlan:
    """Lay out the budget, or as much of it as could ever be used if prefixes are not kept.

    Raises NotEnoughMemory if one row alone could not run. Whether all `load.rows` can run at once depends on their
    lengths. A `max_length` that does not fit is no error here: see MemoryPlan.longest.
    """
    layout = layout_of(groups, budget_bytes)
    if not load.prefix:
        most = {
            group: load.rows * -(-max_length // group.block) if group.window is None else live_blocks(group, load)
            for group in groups
        }
        # a slab of less than three blocks may hold only one, where it begins inside another
        layout = layout_of(groups, min(budget_bytes, 3 * sum(g.block_bytes * (n + 2) for g, n in most.items())))
        if layout.slabs:
            slabs = sum(layout.slabs_for(group, blocks) for group, blocks in most.items())
            layout = replace(layout, slabs=min(layout.slabs, slabs))
    plan = MemoryPlan(layout, budget_bytes, load, max_length)
    need = sum(
        layout.slabs_for(group, 1 if group.window is None else least_blocks(group, load)) if layout.least(group) else 1
        for group in groups
    )
    if need > layout.slabs:
        raise NotEnoughMemory(
            f"the cache needs at least {(layout.first + need * layout.slab_bytes) / 2**20:.1f} MiB for one sequence in "
            f"steps of {min(load.chunk, load.step_tokens)} tokens; the budget is {budget_bytes / 2**20:.1f} MiB. "
            f"Lower sched.chunk or sched.step_tokens, or raise cache.memory_bytes."
        )
    return plan
