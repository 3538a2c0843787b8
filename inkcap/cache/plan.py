"""From what the layers keep and a budget in bytes to blocks per group. Made once, at start, and printed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from inkcap.base.errors import NotEnoughMemory, SetupError
from inkcap.cache.group import CacheGroup
from inkcap.cache.prefix import GRAIN
from inkcap.cache.state import LayerState

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1, "int8": 1}
# Of what live rows leave over, the part for window and sconv blocks of kept boundaries. Small, because blocks planned
# for rows that are not live hold boundaries too.
KEPT_SHARE = 0.125
STEPS_AHEAD = 2  # a step may be planned while another runs, so blocks of two steps are out at once


def groups_of(states: Iterable[LayerState]) -> list[CacheGroup]:
    """The cache groups that the declared states form, in the order they first appear.

    Raises SetupError if states of one group disagree on window, block or reads_own_step, or a block does not divide
    the grain.
    """
    groups: dict[str, CacheGroup] = {}
    for state in states:
        block_bytes = sum(state.block * prod(plane.shape) * ITEM_BYTES[plane.dtype] for plane in state.planes)
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


def live_blocks(group: CacheGroup, load: Load) -> int:
    """Blocks of a windowed group with which `rows` rows never wait for one another."""
    assert group.window is not None, f"group {group.name} is not windowed"
    reach = group.window - 1 + 2 * load.lag + STEPS_AHEAD * (1 + load.drafts)
    row = touched(reach + (GRAIN if load.prefix and group.reads_own_step else 0), group.block)
    boundary = boundary_blocks(group, load.lag)
    if group.reads_own_step:
        step = -(-load.step_tokens // group.block)
    else:
        row += boundary * (2 if load.prefix else 1)  # a prompt's end, and the last boundary behind the row
        step = load.step_tokens // load.keep_every * boundary
    return max(load.rows * row + STEPS_AHEAD * step, least_blocks(group, load))


@dataclass(frozen=True)
class GroupShare:
    """One group's part of the budget. `live` and `kept` are blocks; block 0 comes on top of both."""

    group: CacheGroup
    live: int  # for running rows
    kept: int  # for boundaries that later requests resume from

    @property
    def blocks(self) -> int:
        """First dimension of the group's arena."""
        return self.live + self.kept + 1

    @property
    def size_bytes(self) -> int:
        """Bytes on one rank."""
        return self.blocks * self.group.block_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """How a budget becomes blocks. `str()` of it is the table that `inkcap plan` prints."""

    shares: tuple[GroupShare, ...]
    budget_bytes: int
    rows: int
    max_length: int  # as asked for; `longest` says what fits

    @property
    def blocks(self) -> dict[str, int]:
        """Blocks per group, block 0 included."""
        return {share.group.name: share.blocks for share in self.shares}

    @property
    def size_bytes(self) -> int:
        """Bytes of all groups on one rank."""
        return sum(share.size_bytes for share in self.shares)

    @property
    def context_tokens(self) -> int | None:
        """Tokens of full context over all sequences; None if no layer reads all of them."""
        return min((s.live * s.group.block for s in self.shares if s.group.window is None), default=None)

    @property
    def longest(self) -> int:
        """The longest single sequence that fits, at most `max_length`: lower the latter to it, or refuse."""
        tokens = self.context_tokens
        return self.max_length if tokens is None else min(self.max_length, tokens)

    def __str__(self) -> str:
        lines = [f"{'group':<10} {'window':>8} {'block':>6} {'blocks':>9} {'tokens':>11} {'kept':>9} {'MiB':>10}"]
        for share in self.shares:
            group = share.group
            window = "all" if group.window is None else str(group.window)
            lines.append(
                f"{group.name:<10} {window:>8} {group.block:>6} {share.blocks:>9} {share.blocks * group.block:>11} "
                f"{share.kept:>9} {share.size_bytes / 2**20:>10.1f}"
            )
        lines.append(f"{self.size_bytes / 2**20:.1f} MiB of {self.budget_bytes / 2**20:.1f} MiB per rank are used")
        if self.context_tokens is not None:
            lines.append(
                f"{self.context_tokens} tokens of full context fit, over at most {self.rows} sequences at once"
            )
        short = "" if self.longest == self.max_length else f" ({self.max_length} do not fit)"
        lines.append(f"the longest single sequence has {self.longest} tokens{short}")
        return "\n".join(lines)


def plan_memory(
    groups: Sequence[CacheGroup], budget_bytes: int, load: Load, *, max_length: int, prefix: bool = True
) -> MemoryPlan:
    """Divide the budget: what live rows need in windowed groups, then full context, then a share for boundaries.

    Raises NotEnoughMemory if the live rows and one block of full context each do not fit. A `max_length` that does not
    fit is no error here: see MemoryPlan.longest.
    """
    full = [g for g in groups if g.window is None]
    windowed = [g for g in groups if g.window is not None]
    load = replace(load, prefix=prefix)
    live = {g.name: live_blocks(g, load) for g in windowed}
    live_bytes = sum(g.block_bytes * (live[g.name] + 1) for g in windowed)
    need = live_bytes + sum(g.block_bytes * (load.rows + 1) for g in full)
    if need > budget_bytes:
        raise NotEnoughMemory(
            f"the cache needs at least {need / 2**20:.1f} MiB for sched.rows = {load.rows} and sched.step_tokens = "
            f"{load.step_tokens}; the budget is {budget_bytes / 2**20:.1f} MiB. "
            f"Lower sched.rows or sched.step_tokens, or raise cache.memory_bytes."
        )
    rest = budget_bytes - live_bytes - sum(g.block_bytes for g in full)
    token_bytes = sum(g.block_bytes / g.block for g in full)
    boundary_bytes = sum(g.block_bytes * boundary_blocks(g, load.lag) for g in windowed)
    tokens = 0
    if full:
        share = rest * (1 - KEPT_SHARE) if prefix and boundary_bytes else rest
        # never less than a block a row: the share for boundaries gives way first
        tokens = max(int(share / token_bytes), load.rows * max(g.block for g in full))
        if not prefix:
            tokens = min(tokens, load.rows * max_length)
    contexts = {g.name: max(tokens // g.block, load.rows) for g in full}
    rest -= sum(g.block_bytes * contexts[g.name] for g in full)
    kept = max(0, rest) // boundary_bytes if prefix and boundary_bytes else 0
    shares = [
        GroupShare(g, contexts[g.name], 0)
        if g.window is None
        else GroupShare(g, live[g.name], kept * boundary_blocks(g, load.lag))
        for g in groups
    ]
    return MemoryPlan(tuple(shares), budget_bytes, load.rows, max_length)
