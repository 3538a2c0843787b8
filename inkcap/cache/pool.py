"""The blocks of one cache group: which are free, who holds them, which a key finds, in what order they are reused."""

from collections import OrderedDict

Key = tuple[bytes, int]  # hash of a grain and everything before it, ordinal of the block in the grain


class Pool:
    """Blocks 1 .. blocks - 1; block 0 belongs to nobody and is never handed out.

    A block is free (no holder, no key), held (one holder or more) or idle (no holder, but found by its key). Free
    blocks are handed out first, then the idle one that was let go longest ago.
    """

    __slots__ = ("_free", "_idle", "blocks", "found", "holders", "keys")

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.holders = [0] * blocks
        self.keys: list[Key | None] = [None] * blocks
        self.found: dict[Key, int] = {}
        self._free = list(range(blocks - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that `take` can hand out."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        """Blocks somebody holds."""
        return self.blocks - 1 - self.available

    def take(self) -> int:
        """A block without content, held once. The caller has looked at `available`."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            key = self.keys[block]
            assert key is not None, f"idle block {block} has no key"
            del self.found[key]
            self.keys[block] = None
        self.holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more holder of a block that was found."""
        if self.holders[block] == 0:
            del self._idle[block]
        self.holders[block] += 1

    def drop(self, block: int) -> None:
        """One holder fewer; a block with a key stays findable until it is reused."""
        holders = self.holders[block] - 1
        assert holders >= 0, f"block {block} is dropped more often than it was held"
        self.holders[block] = holders
        if holders == 0:
            if self.keys[block] is None:
                self._free.append(block)
            else:
                self._idle[block] = None

    def publish(self, block: int, key: Key) -> None:
        """Make a held block findable, unless it is already or another one has the same content."""
        if self.keys[block] is None and key not in self.found:
            self.keys[block] = key
            self.found[key] = block
