"""The chain of hashes: what makes two keys equal, and what must not."""

from inkcap.cache.group import CacheGroup
from inkcap.cache.pool import Pool
from inkcap.cache.prefix import GRAIN, Chain, known_grains, resumable

FULL = CacheGroup("full", 64, 1)
SCONV = CacheGroup("sconv", 4, 1, 4, False)


def chain(tokens: list[int], salt: str = "", lookahead: int = 0) -> Chain:
    made = Chain(salt, GRAIN, lookahead)
    made.extend(tokens)
    return made


def test_links_cover_whole_grains_only() -> None:
    assert len(chain(list(range(63))).links) == 0
    assert len(chain(list(range(64))).links) == 1
    assert len(chain(list(range(200))).links) == 3


def test_growing_step_by_step_gives_the_same_links() -> None:
    tokens = list(range(300))
    grown = Chain("")
    for n in range(0, 301, 7):
        grown.extend(tokens[:n])
    assert grown.links == chain(tokens[:294]).links


def test_a_link_depends_on_everything_before_it() -> None:
    a, b = list(range(128)), list(range(128))
    b[0] = 99
    assert chain(a).links[1] != chain(b).links[1]


def test_a_salt_separates() -> None:
    tokens = list(range(64))
    assert chain(tokens, "a").links != chain(tokens, "b").links


def test_with_lookahead_a_link_depends_on_the_tokens_after_it() -> None:
    a, b = [*range(64), 1, 2, 3], [*range(64), 1, 2, 4]
    assert len(chain(a, lookahead=4).links) == 0  # not known yet
    assert chain(a, lookahead=2).links == chain(b, lookahead=2).links
    assert chain(a, lookahead=3).links != chain(b, lookahead=3).links


def test_lookahead_hashes_each_token_once() -> None:
    tokens = list(range(200))
    for changed in (0, 63, 64, 66, 67, 130):
        other = list(tokens)
        other[changed] = 999
        first = next(i for i in range(2) if chain(tokens, lookahead=3).links[i] != chain(other, lookahead=3).links[i])
        assert first == max(0, -(-(changed - 66) // 64))


def test_blocks_of_one_grain_have_different_keys() -> None:
    links = chain(list(range(128)))
    assert len({links.key(SCONV, i) for i in range(32)}) == 32
    assert links.key(SCONV, 17) == (links.links[1], 1)


def test_known_grains_stop_at_the_first_gap() -> None:
    links, pool = chain(list(range(256))), Pool.alone(5)
    for i in (0, 1, 3):
        pool.publish(pool.take(), links.key(FULL, i))
    assert known_grains(links, FULL, pool, GRAIN) == 2


def test_a_convolution_resumes_from_one_block() -> None:
    links, pool = chain(list(range(128))), Pool.alone(5)
    pool.publish(pool.take(), links.key(SCONV, 15))
    assert resumable(links, SCONV, pool, 64, lag=0)
    assert resumable(links, SCONV, pool, 63, lag=0)
    assert not resumable(links, SCONV, pool, 64, lag=2)  # reaches into the block before
    assert not resumable(links, SCONV, pool, 128, lag=0)
