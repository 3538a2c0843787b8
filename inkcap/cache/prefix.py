"""What makes state findable: a chain of hashes over the tokens, and the search for a place to go on from."""

from array import array
from collections.abc import Sequence
from hashlib import sha256

from inkcap.cache.group import CacheGroup
from inkcap.cache.pool import Key, Pool

GRAIN = 64  # tokens in one link of the chain; a multiple of every group's block


class Chain:
    """SHA-256 over grains of one sequence, each including all before it, rooted in a salt.

    With `lookahead` L a position's state depends on L tokens after it, so link i covers tokens
    [0, (i + 1) * grain + L): whoever finds a block by it agrees on every token the block has read.
    """

    __slots__ = ("_grain", "_lookahead", "_root", "links")

    def __init__(self, salt: str, grain: int = GRAIN, lookahead: int = 0) -> None:
        self._root = sha256(salt.encode()).digest()
        self._grain = grain
        self._lookahead = lookahead
        self.links: list[bytes] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the links that `tokens`, which only ever grow, have completed."""
        links = self.links
        for i in range(len(links), (len(tokens) - self._lookahead) // self._grain):
            start = i * self._grain + self._lookahead if i else 0
            stop = (i + 1) * self._grain + self._lookahead
            grain = array("I", tokens[start:stop]).tobytes()
            links.append(sha256((links[-1] if links else self._root) + grain).digest())

    def key(self, group: CacheGroup, index: int) -> Key:
        """The key of a sequence's block `index` (position // group.block)."""
        grain, ordinal = divmod(index, self._grain // group.block)
        return self.links[grain], ordinal


def known_grains(chain: Chain, group: CacheGroup, pool: Pool, grain: int) -> int:
    """How many of the first grains are present as a whole in a group that needs all of them."""
    per_grain = grain // group.block
    found = pool.found
    for i, link in enumerate(chain.links):
        for ordinal in range(per_grain):
            if (link, ordinal) not in found:
                return i
    return len(chain.links)


def resumable(chain: Chain, group: CacheGroup, pool: Pool, resume: int, lag: int) -> bool:
    """Whether everything a windowed group reads to go on from `resume` is present. Looks at the newest block first."""
    found = pool.found
    return all(chain.key(group, i) in found for i in reversed(group.blocks(group.resume_spans(resume, lag))))
