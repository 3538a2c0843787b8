"""Blocks of one group: never block 0, free ones first, then the one let go longest ago."""

import pytest

from inkcap.cache.pool import Pool


def test_block_zero_is_never_handed_out() -> None:
    pool = Pool(4)
    assert sorted(pool.take() for _ in range(pool.available)) == [1, 2, 3]
    assert pool.available == 0
    assert pool.held == 3


def test_a_published_block_stays_findable_until_it_is_reused() -> None:
    pool = Pool(3)
    block = pool.take()
    pool.publish(block, (b"a", 0))
    pool.drop(block)
    assert pool.found[b"a", 0] == block
    assert pool.take() != block  # a free block goes first
    assert pool.take() == block
    assert pool.found == {}
    assert pool.keys[block] is None


def test_idle_blocks_are_reused_in_the_order_they_were_let_go() -> None:
    pool = Pool(4)
    blocks = [pool.take() for _ in range(3)]
    for i, block in enumerate(blocks):
        pool.publish(block, (b"x", i))
    for block in blocks:
        pool.drop(block)
    pool.hold(blocks[0])  # used again, so it is now the youngest
    pool.drop(blocks[0])
    assert [pool.take() for _ in range(3)] == [blocks[1], blocks[2], blocks[0]]


def test_a_block_with_two_holders_is_free_after_the_second() -> None:
    pool = Pool(2)
    block = pool.take()
    pool.hold(block)
    pool.drop(block)
    assert pool.available == 0
    pool.drop(block)
    assert pool.available == 1


def test_the_first_block_under_a_key_keeps_it() -> None:
    pool = Pool(3)
    first, second = pool.take(), pool.take()
    pool.publish(first, (b"a", 0))
    pool.publish(second, (b"a", 0))
    assert pool.found[b"a", 0] == first
    pool.drop(second)
    assert pool.take() == second  # nothing points at it: it was simply free


def test_dropping_more_often_than_holding_is_a_bug_that_shows() -> None:
    pool = Pool(2)
    block = pool.take()
    pool.drop(block)
    with pytest.raises(AssertionError, match="dropped more often"):
        pool.drop(block)
