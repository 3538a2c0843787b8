"""The blocks of one cache group: which are free, who holds them, which a key finds, in what order they are reused.

All groups cut their blocks from one memory, slab by slab, so what one does not need another can have.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

Key = tuple[bytes, int]  # hash of a grain and everything before it, ordinal of the block in the grain


class Slabs:
    """Equal stretches of one memory. A slab belongs to the group that holds a block of it, which cuts it its own way.

    A slab of which nobody holds a block is spare: any group may adopt it. Those with nothing to be found in them go
    first, then the one let go longest ago.
    """

    __slots__ = ("count", "eager", "owners", "promised", "spare", "tick")

    def __init__(self, count: int) -> None:
        self.count = count
        self.spare: OrderedDict[int, int] = OrderedDict.fromkeys(range(count), 0)  # slab -> tick it was let go at
        self.owners: dict[int, Pool] = {}  # the last group that cut a slab
        self.tick = 0
        self.promised = 0  # spare slabs that the reservation under way must still find
        self.eager = True  # adopt a spare slab rather than forget something younger than what is in it

    def oldest(self) -> int | None:
        """The tick of the next spare slab, if one is there beyond those promised."""
        return next(iter(self.spare.values())) if len(self.spare) > self.promised else None


class Pool:
    """A group's blocks. Block 0 belongs to nobody and is never handed out.

    A block is free (no holder, no key), held (one holder or more) or idle (no holder, but found by its key). Free
    blocks are handed out first, then the idle one that was let go longest ago. `cuts` are the blocks in each slab.
    """

    __slots__ = ("_free", "_held", "_idle", "_resting", "_slab", "cuts", "found", "holders", "keys", "least", "slabs")

    def __init__(self, slabs: Slabs, cuts: Sequence[range]) -> None:
        self.slabs = slabs
        self.cuts = cuts
        self.least = min(map(len, cuts), default=0)  # blocks that a slab has at least
        self.holders: dict[int, int] = {}
        self.keys: dict[int, Key] = {}
        self.found: dict[Key, int] = {}
        # of slabs that are this group's and not spare
        self._free: dict[int, None] = {}
        self._idle: OrderedDict[int, int] = OrderedDict()  # block -> tick it was let go at
        self._slab: dict[int, int] = {}  # block -> slab, of all slabs that are this group's
        self._held: dict[int, int] = {}  # slab -> blocks of it that are held
        # of slabs that are this group's and spare: idle blocks with the ticks they were let go at
        self._resting: dict[int, list[tuple[int, int]]] = {}

    @classmethod
    def alone(cls, blocks: int) -> "Pool":
        """A group with a memory of its own, block 0 included."""
        return cls(Slabs(1), [range(1, blocks)])

    @property
    def most(self) -> int:
        """Blocks this group would have if the whole memory were its own."""
        return sum(map(len, self.cuts))

    @property
    def held(self) -> int:
        """Blocks somebody holds."""
        return len(self.holders)

    def needed(self, blocks: int) -> int:
        """Spare slabs without which `take` could not hand out that many."""
        missing = blocks - len(self._free) - len(self._idle)
        return -(-missing // max(1, self.least)) if missing > 0 else 0

    def take(self) -> int:
        """A block without content, held once. The caller has looked at `needed`."""
        if not self._free and self._wants_slab():
            self._adopt()
        if self._free:
            block = self._free.popitem()[0]
        else:
            block = self._idle.popitem(last=False)[0]
            del self.found[self.keys.pop(block)]
        self.holders[block] = 1
        self._held[self._slab[block]] += 1
        return block

    def hold(self, block: int) -> None:
        """One more holder of a block that was found."""
        holders = self.holders.get(block, 0)
        self.holders[block] = holders + 1
        if not holders:
            slab = self._slab[block]
            if not self._held[slab]:
                self._join(slab)
            del self._idle[block]
            self._held[slab] += 1

    def drop(self, block: int) -> None:
        """One holder fewer; a block with a key stays findable until it is reused."""
        holders = self.holders.pop(block, 0)
        assert holders, f"block {block} is dropped more often than it was held"
        if holders > 1:
            self.holders[block] = holders - 1
            return
        if block in self.keys:
            self.slabs.tick += 1
            self._idle[block] = self.slabs.tick
        else:
            self._free[block] = None
        slab = self._slab[block]
        self._held[slab] -= 1
        if not self._held[slab]:
            self._part(slab)

    def publish(self, block: int, key: Key) -> None:
        """Make a held block findable, unless it is already or another one has the same content."""
        if block not in self.keys and key not in self.found:
            self.keys[block] = key
            self.found[key] = block

    def forget(self, blocks: Iterable[int]) -> None:
        """Make blocks unfindable."""
        for block in blocks:
            if (key := self.keys.pop(block, None)) is not None:
                del self.found[key]
                if self._idle.pop(block, None) is not None:
                    self._free[block] = None

    def _wants_slab(self) -> bool:
        """Whether to adopt a slab, no block being free: none is idle either, or what is in the slab is older."""
        slabs = self.slabs
        if not self._idle:
            slabs.promised -= slabs.promised > 0
            return True
        oldest = slabs.oldest() if slabs.eager else None
        return oldest is not None and oldest < next(iter(self._idle.values()))

    def _part(self, slab: int) -> None:
        """The last of its blocks was let go: anybody may have the slab."""
        kept = sorted((self._idle.pop(b), b) for b in self.cuts[slab] if self._free.pop(b, self) is self)
        self._resting[slab] = kept
        self.slabs.spare[slab] = kept[-1][0] if kept else 0
        if not kept:
            self.slabs.spare.move_to_end(slab, last=False)

    def _join(self, slab: int) -> None:
        """A block of a spare slab of ours is wanted: its others are ours again, next to be reused."""
        del self.slabs.spare[slab]
        for tick, block in reversed(self._resting.pop(slab)):
            if block in self.keys:
                self._idle[block] = tick
                self._idle.move_to_end(block, last=False)
        self._free.update((block, None) for block in reversed(self.cuts[slab]) if block not in self.keys)

    def _adopt(self) -> None:
        """Make the next spare slab ours."""
        slabs = self.slabs
        slab = next(iter(slabs.spare))
        owner = slabs.owners.get(slab)
        if owner is not self:
            if owner is not None:
                owner.forget(owner.cuts[slab])
                del owner._held[slab], owner._resting[slab]
                for block in owner.cuts[slab]:
                    del owner._slab[block]
            slabs.owners[slab] = self
            self._held[slab], self._resting[slab] = 0, []
            self._slab.update(dict.fromkeys(self.cuts[slab], slab))
        self._join(slab)
