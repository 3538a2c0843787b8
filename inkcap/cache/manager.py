"""The scheduler's only door to the cache: match, reserve, advance, resume_set, release. Nothing else decides on blocks.

Plans run in the order they were made. So a block may go to another row as soon as the row that had it lets go, even
while a step that still writes to it is in flight: the new owner's writes come later. What is published is settled: no
step made before or after writes to it again.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from inkcap.base.errors import NotEnoughMemory, SetupError
from inkcap.base.step import BlockEntry, BlockMove
from inkcap.cache.group import CacheGroup
from inkcap.cache.plan import Load, least_blocks, row_blocks, step_blocks
from inkcap.cache.pool import Pool
from inkcap.cache.prefix import GRAIN, Chain, known_grains, resumable


class Holding:
    """The blocks of one sequence for one stay in a row.

    `room` and `turn` are the two integers that most decode steps are compared with: a step that stops at or before
    `room` needs no `reserve`, and `computed` below `turn` needs no `advance`.
    """

    __slots__ = (
        "chain", "computed", "edges", "kept", "room", "rooms", "row", "settled", "start", "tables", "tokens", "turn",
    )  # fmt: skip

    def __init__(self, tokens: list[int], chain: Chain | None, start: int, groups: int) -> None:
        self.tokens = tokens  # the sequence's own list, which grows
        self.chain = chain  # None: nothing of this sequence is published
        self.start = start  # the first position that this stay computes; no earlier one is ever written
        self.computed = start  # positions whose state is there and whose tokens are final
        self.settled = start  # positions up to which everything worth it has been published
        self.turn = start  # `advance` has something to do from here on
        self.room = 0  # the least of `rooms`
        self.rooms = [0] * groups  # per group, up to where the blocks suffice
        self.tables: list[dict[int, int]] = [{} for _ in range(groups)]  # per group: position // block -> block
        self.edges: set[int] = set()  # boundaries worth keeping besides every `keep_every`
        self.kept = [range(0)] * groups  # per group, indices that the last settled boundary reads
        self.row = -1  # set by the scheduler; -1 before and after


class CacheManager:
    """Pools of all groups, in the groups' order, and who holds what. Single-threaded.

    `lag`: trailing positions whose state a drafter computes again. `lookahead`: tokens after a
    position that its state depends on; a chain of K depths has lag K - 1 and lookahead K, no drafter has 0 and 0.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        pools: Sequence[Pool],
        *,
        keep_every: int,
        prefix: bool = True,
        lag: int = 0,
        lookahead: int = 0,
        grain: int = GRAIN,
    ) -> None:
        if keep_every % grain:
            raise SetupError(f"cache.keep_every is {keep_every}; it must be a multiple of {grain}")
        for g in groups:
            if grain % g.block:
                raise SetupError(f"cache group {g.name}: a block of {g.block} tokens does not divide {grain}")
        self.groups = tuple(groups)
        self.pools = tuple(pools)
        self._memories = tuple({id(pool.slabs): pool.slabs for pool in pools}.values())
        self._shared = [sum(other.slabs is pool.slabs for other in pools) > 1 for pool in pools]
        self.packed = False  # blocks lie as tightly as they can: `clear` was called
        self._live = 0  # holdings that are not released
        self._load: Load | None = None  # set by `require`
        self._keep_every = keep_every
        self._prefix = prefix
        self._lag = lag
        self._lookahead = lookahead
        self._grain = grain
        self._full = [i for i, g in enumerate(groups) if g.window is None]
        # the group with the fewest published blocks first: it says no soonest
        self._windowed = sorted(
            (i for i, g in enumerate(groups) if g.window is not None), key=lambda i: groups[i].window or 0
        )
        # per group, how far below a position its oldest token that is read may lie; None: down to the first
        self._reach = [None if g.window is None else g.window - 1 for g in groups]
        self._sizes = [g.block for g in groups]
        self._entries: list[list[tuple[Holding, int, int]]] = [[] for _ in groups]
        self._moves: list[tuple[Holding, BlockMove]] = []

    # -- limits and gauges

    @property
    def capacity(self) -> int | None:
        """Tokens of the longest sequence that fits when it is alone; None if no group needs all of them."""
        least = []
        for memory in self._memories:
            mine = [i for i, pool in enumerate(self.pools) if pool.slabs is memory]
            slabs = memory.count
            if self._load is not None:
                slabs -= sum(-(-self._least(i) // self.pools[i].least) for i in mine if self.groups[i].window)
            # tokens of a slab in each full group; each but the first may leave most of its last slab empty
            tokens = [self.pools[i].least * self.groups[i].block for i in mine if self.groups[i].window is None]
            if len(tokens) == 1:
                least.append(slabs * tokens[0])
            elif tokens:
                least.append(int((slabs - len(tokens) + 1) / sum(1 / t for t in tokens)))
        return min(least, default=None)

    @property
    def usage(self) -> dict[str, float]:
        """Part of the memory that each group's held blocks are; findable blocks that nobody holds do not count."""
        return {g.name: p.held / max(1, p.most) for g, p in zip(self.groups, self.pools, strict=True)}

    def require(self, load: Load) -> None:
        """What rows and steps may ask for. Raises NotEnoughMemory if one row alone could not run one chunk."""
        self._load = replace(load, prefix=False)  # the boundary that a row keeps behind it gives way to other rows
        slabs: Counter[int] = Counter()
        for i, pool in enumerate(self.pools):
            slabs[id(pool.slabs)] += -(-self._least(i) // pool.least) if pool.least else 1
        if any(slabs[id(memory)] > memory.count for memory in self._memories):
            most = ", ".join(
                f"{pool.most} of {group.name}" for group, pool in zip(self.groups, self.pools, strict=True)
            )
            need = ", ".join(f"{self._least(i)} of {group.name}" for i, group in enumerate(self.groups))
            raise NotEnoughMemory(
                f"the cache holds at most these blocks: {most}; one sequence needs together {need} for a chunk of "
                f"{min(load.chunk, load.step_tokens)} tokens. Lower sched.chunk or raise cache.memory_bytes."
            )

    def admissible(self, holding: Holding, others: Iterable[Holding]) -> bool:
        """Whether all known tokens of a sequence fit now, beside what `others` will take for theirs and live windows.

        `others` are the running rows with history to catch up. Every live holding gets what its windows may need.
        """
        held = [holding, *others]
        wanted = []
        for i, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            if group.window is None:
                wanted.append((i, sum(-(-len(h.tokens) // group.block) - len(h.tables[i]) for h in held)))
            elif self._shared[i] and self._load is not None:
                many = self._live * row_blocks(group, self._load) + step_blocks(group, self._load, len(held))
                wanted.append((i, (many if self._live > 1 else self._least(i)) - pool.held))
        return self._claim(wanted)

    # -- the five verbs

    def chain(self, salt: str) -> Chain | None:
        """The hashes of a sequence, to be kept as long as the sequence lives; None if prefixes are not reused."""
        return Chain(salt, self._grain, self._lookahead) if self._prefix else None

    def match(self, tokens: list[int], chain: Chain | None, prompt: int, *, reuse: bool = True) -> Holding:
        """Hold the state of the longest known prefix of `tokens`; `Holding.start` is where to go on from.

        At least the last token is left to compute. Where that one stands in a known block, the block is copied first
        (a BlockMove in the next `drain`), since a shared block is never written. `prompt` is the prompt's length: its
        end is a boundary worth keeping. `reuse=False` finds nothing, but what the sequence computes can be found.
        """
        if chain is None:
            self._live += 1
            return Holding(tokens, None, 0, len(self.groups))
        chain.extend(tokens)
        grain = self._grain
        known = len(chain.links)
        for i in self._full:
            known = min(known, known_grains(chain, self.groups[i], self.pools[i], grain))
        holding = None
        if reuse:
            for boundary in range(known * grain, 0, -grain):
                start = min(boundary, len(tokens) - 1)
                if all(resumable(chain, self.groups[i], self.pools[i], start, self._lag) for i in self._windowed):
                    holding = self._take_over(tokens, chain, start)
                    if holding is not None:
                        break
        if holding is None:
            self._live += 1
            holding = Holding(tokens, chain, 0, len(self.groups))
        # the prompt's end, and where it parts from another one that got further than this one could resume
        holding.edges = {(prompt - self._lookahead) // grain * grain, known * grain}
        self._set_turn(holding)
        return holding

    def _take_over(self, tokens: list[int], chain: Chain, start: int) -> Holding | None:
        """Hold what is needed to go on from `start`; None if there is no block left for a copy."""
        holding = Holding(tokens, chain, start, len(self.groups))
        self._live += 1
        copied: list[tuple[int, int]] = []
        for i, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            table = holding.tables[i]
            for index in group.blocks(group.resume_spans(start, self._lag)):
                table[index] = pool.found[chain.key(group, index)]
                pool.hold(table[index])
            if start % group.block:
                copied.append((i, start // group.block))
            holding.rooms[i] = -(-start // group.block) * group.block
        if not self._claim([(i, 1) for i, _ in copied]):
            self.release(holding)
            return None
        for i, index in copied:
            source = holding.tables[i][index]
            target = self.pools[i].take()
            self._moves.append((holding, BlockMove(self.groups[i].name, source, target)))
            self.pools[i].drop(source)  # whoever takes it writes after the copy
            holding.tables[i][index] = target
        holding.room = min(holding.rooms)
        holding.settled = start // self._grain * self._grain
        self._set_kept(holding)
        for entries, table in zip(self._entries, holding.tables, strict=True):
            entries += [(holding, index, block) for index, block in table.items()]
        return holding

    def reserve(self, holding: Holding, start: int, stop: int, earliest_next: int) -> bool:
        """Blocks for a step that starts at `start` or later and stops at `stop` at the latest; all groups or none.

        The step after it starts at `earliest_next` or later. False: nothing was taken.
        """
        if stop <= holding.room:
            return True
        wanted: list[tuple[int, range | list[int]]] = []
        for i, room in enumerate(holding.rooms):
            if stop <= room:
                continue
            block, reach = self._sizes[i], self._reach[i]
            if reach is not None:
                self._drop_unreachable(holding, i)
            # below `room` everything reachable is there already
            if reach is None or earliest_next - self._lag - reach <= room:
                missing = range(room // block, -(-stop // block))
            else:
                group = self.groups[i]
                spans = self._step_spans(holding, group, start, stop, earliest_next)
                missing = group.blocks([(max(lo, room), hi) for lo, hi in spans if hi > room])
            wanted.append((i, missing))
        counts = [(i, len(missing)) for i, missing in wanted]
        if not self._claim(counts):
            for i in self._windowed:
                self._drop_unreachable(holding, i, keep_end=False)
            if not self._claim(counts):
                return False
        for i, missing in wanted:
            take, table, entries = self.pools[i].take, holding.tables[i], self._entries[i]
            for index in missing:
                table[index] = taken = take()
                entries.append((holding, index, taken))
            block = self._sizes[i]
            holding.rooms[i] = -(-stop // block) * block
        holding.room = min(holding.rooms)
        return True

    def advance(self, holding: Holding, computed: int) -> None:
        """Positions below `computed` are there and final: publish what is worth it, drop what no window reaches."""
        assert computed <= len(holding.tokens), f"{computed} positions computed of {len(holding.tokens)} tokens"
        holding.computed = computed
        if computed < holding.turn:
            return
        if holding.chain is not None:
            self._publish(holding, holding.chain)
            self._set_kept(holding)
        for i in self._windowed:
            self._drop_unreachable(holding, i)
        self._set_turn(holding)

    def resume_set(self, holding: Holding) -> tuple[int, dict[str, list[tuple[int, int]]]]:
        """A position to go on from elsewhere, and per group the (index, block) pairs that this takes.

        The last `lag` positions are provisional and are computed again there, from final state: no lag further back.
        """
        position = max(0, min(holding.computed, len(holding.tokens) - 1) - self._lag)
        blocks = {}
        for group, table in zip(self.groups, holding.tables, strict=True):
            indices = group.blocks(group.resume_spans(position, 0))
            blocks[group.name] = [(index, table[index]) for index in indices]
        return position, blocks

    def release(self, holding: Holding, *, ended: bool = False) -> None:
        """Let go of everything. Published blocks stay findable, the newest of a sequence being reused first.

        `ended`: the sequence is over, and whoever continues it can resume from its last whole grain.
        """
        if ended and holding.chain is not None:
            self._publish_end(holding, holding.chain)
        for pool, table in zip(self.pools, holding.tables, strict=True):
            for block in reversed(table.values()):
                pool.drop(block)
            table.clear()
        holding.row = -1
        holding.room = 0
        self._live -= 1
        if ended and not self._live and self.packed:
            self._pack(False)

    def clear(self) -> None:
        """Forget all that nobody holds, and pack blocks tightly until a sequence ends and nothing is held.

        For a sequence that does not fit although it is alone, since blocks that are kept lie scattered over slabs.
        """
        self._pack(True)
        for pool in self.pools:
            pool.forget([block for block in pool.keys if block not in pool.holders])

    def _pack(self, packed: bool) -> None:
        self.packed = packed
        for memory in self._memories:
            memory.eager = not packed

    # -- what ranks must be told

    def drain(self) -> tuple[dict[str, list[BlockEntry]], list[BlockMove]]:
        """New table entries and copies since the last call, of holdings that have a row."""
        entries: dict[str, list[BlockEntry]] = {}
        for group, new in zip(self.groups, self._entries, strict=True):
            if new:
                placed = [BlockEntry(holding.row, index, block) for holding, index, block in new if holding.row >= 0]
                if placed:
                    entries[group.name] = placed
                new.clear()
        moves = [move for holding, move in self._moves if holding.row >= 0]
        self._moves.clear()
        return entries, moves

    # -- inside

    def _claim(self, wanted: Iterable[tuple[int, int]]) -> bool:
        """Whether (group, blocks) can all be taken now. If so the slabs for it are promised to the calls of `take`."""
        pools, fits = self.pools, True
        for memory in self._memories:
            memory.promised = 0
        for i, blocks in wanted:
            pool = pools[i]
            if needed := pool.needed(blocks):
                memory = pool.slabs
                memory.promised += needed
                fits = fits and memory.promised <= len(memory.spare)
        return fits

    def _least(self, i: int) -> int:
        """Blocks without which one row alone could not run one chunk."""
        assert self._load is not None, "nothing is required yet"
        return 1 if self.groups[i].window is None else least_blocks(self.groups[i], self._load)

    def _step_spans(
        self, holding: Holding, group: CacheGroup, start: int, stop: int, earliest_next: int
    ) -> list[tuple[int, int]]:
        spans = group.step_spans(start, stop, earliest_next, self._lag, self._keep_every)
        if not group.reads_own_step:
            for edge in holding.edges:
                if start < edge <= stop:
                    spans += group.resume_spans(edge, self._lag)
        return spans

    def _publish(self, holding: Holding, chain: Chain) -> None:
        """Whole grains of full groups; of windowed ones the blocks that kept boundaries need."""
        grain = self._grain
        chain.extend(holding.tokens)
        end = min((holding.computed - self._lag) // grain, len(chain.links)) * grain
        for boundary in range(holding.settled + grain, end + 1, grain):
            kept = boundary % self._keep_every == 0 or boundary in holding.edges
            for group, pool, table in zip(self.groups, self.pools, holding.tables, strict=True):
                if group.window is None:
                    indices = range((boundary - grain) // group.block, boundary // group.block)
                elif kept:
                    indices = group.blocks(group.resume_spans(boundary, self._lag))
                else:
                    continue
                for index in indices:
                    pool.publish(table[index], chain.key(group, index))
            holding.settled = boundary

    def _publish_end(self, holding: Holding, chain: Chain) -> None:
        """Make the last settled boundary one to resume from, if all of it is still held."""
        parts = []
        for i in self._windowed:
            group, table = self.groups[i], holding.tables[i]
            indices = group.blocks(group.resume_spans(holding.settled, self._lag))
            if any(index not in table for index in indices):
                return
            parts.append((group, self.pools[i], table, indices))
        for group, pool, table, indices in parts:
            for index in indices:
                pool.publish(table[index], chain.key(group, index))

    def _drop_unreachable(self, holding: Holding, i: int, *, keep_end: bool = True) -> None:
        """Drop blocks of a windowed group that neither a later step nor a boundary still to be published reads.

        The last settled boundary is one of these, since the sequence may end before the next; unless blocks are short.
        """
        reach = self._reach[i]
        if reach is None:
            return
        first = (holding.computed - 2 * self._lag - reach) // self._sizes[i]
        table = holding.tables[i]
        kept = holding.kept[i] if keep_end else ()
        unread = []
        for index in table:  # in order
            if index >= first:
                break
            if index not in kept:
                unread.append(index)
        for index in unread:
            self.pools[i].drop(table.pop(index))

    def _set_kept(self, holding: Holding) -> None:
        """What the last settled boundary reads of windowed groups; nothing of it is kept where blocks are packed."""
        for i in () if self.packed else self._windowed:
            group = self.groups[i]
            low = group.first_needed(holding.settled - self._lag) // group.block
            # a whole number: boundaries are multiples of every block
            holding.kept[i] = range(low, holding.settled // group.block)

    def _set_turn(self, holding: Holding) -> None:
        """The next grain that can be published; without a chain, the next one that is computed."""
        if holding.chain is None:
            holding.turn = (holding.computed // self._grain + 1) * self._grain
        else:
            holding.turn = holding.settled + self._grain + self._lag
