"""Blocks of one group, and groups that share a memory: never block 0, free ones first, then what was let go first."""

import pytest

from inkcap.cache.group import CacheGroup
from inkcap.cache.plan import Layout
from inkcap.cache.pool import Pool


def shared(slabs: int) -> tuple[Pool, Pool]:
    """Two groups, a slab of which is four blocks of the first or two of the second."""
    large, small = Layout((CacheGroup("small", 4, 10), CacheGroup("large", 4, 20)), 40, slabs).pools()
    return large, small


def keep(pool: Pool, name: bytes) -> int:
    """A block that can be found and that nobody holds."""
    block = pool.take()
    pool.publish(block, (name, 0))
    pool.drop(block)
    return block


def test_block_zero_is_never_handed_out() -> None:
    pool = Pool.alone(4)
    assert pool.needed(3) == 1
    assert pool.needed(4) == 2  # slabs, of which there is one
    assert sorted(pool.take() for _ in range(3)) == [1, 2, 3]
    assert pool.needed(1) == 1
    assert not pool.slabs.spare
    assert pool.held == 3


def test_a_published_block_stays_findable_until_it_is_reused() -> None:
    pool = Pool.alone(3)
    block = keep(pool, b"a")
    assert pool.found[b"a", 0] == block
    assert pool.take() != block  # a free block goes first
    assert pool.take() == block
    assert pool.found == {}
    assert block not in pool.keys


def test_idle_blocks_are_reused_in_the_order_they_were_let_go() -> None:
    pool = Pool.alone(4)
    blocks = [pool.take() for _ in range(3)]
    for i, block in enumerate(blocks):
        pool.publish(block, (b"x", i))
    for block in blocks:
        pool.drop(block)
    pool.hold(blocks[0])  # used again, so it is now the youngest
    pool.drop(blocks[0])
    assert [pool.take() for _ in range(3)] == [blocks[1], blocks[2], blocks[0]]


def test_a_block_with_two_holders_is_free_after_the_second() -> None:
    pool = Pool.alone(2)
    block = pool.take()
    pool.hold(block)
    pool.drop(block)
    assert pool.held == 1
    pool.drop(block)
    assert pool.held == 0
    assert pool.take() == block


def test_the_first_block_under_a_key_keeps_it() -> None:
    pool = Pool.alone(3)
    first, second = pool.take(), pool.take()
    pool.publish(first, (b"a", 0))
    pool.publish(second, (b"a", 0))
    assert pool.found[b"a", 0] == first
    pool.drop(second)
    assert pool.take() == second  # nothing points at it: it was simply free


def test_dropping_more_often_than_holding_is_a_bug_that_shows() -> None:
    pool = Pool.alone(2)
    block = pool.take()
    pool.drop(block)
    with pytest.raises(AssertionError, match="dropped more often"):
        pool.drop(block)


def test_what_one_group_lets_go_another_can_have() -> None:
    small, large = shared(2)
    taken = [small.take() for _ in range(8)]
    assert sorted(taken) == list(range(2, 10))  # 20 bytes lie before the first slab
    assert large.needed(1) == 1
    assert not large.slabs.spare
    for block in sorted(taken)[:3]:
        small.drop(block)
    assert not large.slabs.spare  # the fourth of that slab is held
    small.drop(5)
    assert large.slabs.spare
    assert [large.take(), large.take()] == [1, 2]
    assert small.needed(1) == 1


def test_a_slab_that_another_group_adopts_loses_what_was_to_be_found_in_it() -> None:
    small, large = shared(1)
    block = keep(small, b"a")
    small.hold(block)  # still there, and its slab is no longer spare
    assert not small.slabs.spare
    small.drop(block)
    assert small.found
    large.take()
    assert not small.found
    assert not small.keys


def test_an_empty_slab_goes_before_one_with_something_in_it_and_that_before_younger_blocks() -> None:
    small, large = shared(3)
    keep(large, b"old")  # in a slab of its own, spare
    small.take()
    keep(small, b"young")
    for _ in range(2):
        small.take()  # the free ones of its slab
    small.take()  # not in place of "young": an empty slab is there
    assert (b"young", 0) in small.found
    assert (b"old", 0) in large.found
    for _ in range(3):
        small.take()
    small.take()  # "old" was let go before "young"
    assert (b"young", 0) in small.found
    assert (b"old", 0) not in large.found


def test_a_promised_slab_is_not_adopted_to_spare_an_idle_block() -> None:
    small, large = shared(2)
    small.take()
    keep(small, b"a")
    for _ in range(2):
        small.take()
    small.slabs.promised = large.needed(1)
    small.take()
    assert not small.found
    assert len(small.slabs.spare) == 1
    large.take()
    assert small.slabs.promised == 0


def test_packed_pools_reuse_their_own_blocks_first() -> None:
    small, _ = shared(2)
    small.slabs.eager = False
    small.take()
    block = keep(small, b"a")
    for _ in range(2):
        small.take()
    assert small.take() == block
