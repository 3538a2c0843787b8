"""The five verbs, one at a time, on sizes that fit on a page."""

from dataclasses import replace

import pytest

from inkcap.base.errors import NotEnoughMemory, SetupError
from inkcap.base.step import BlockEntry, BlockMove
from inkcap.cache.group import CacheGroup
from inkcap.cache.manager import CacheManager, Holding
from inkcap.cache.plan import Load, layout_of, live_blocks
from inkcap.cache.pool import Pool

GROUPS = (CacheGroup("full", 64, 1), CacheGroup("window", 64, 1, 128), CacheGroup("sconv", 4, 1, 4, False))


def manager(full: int = 32, window: int = 32, sconv: int = 64, **more) -> CacheManager:
    pools = [Pool.alone(blocks) for blocks in (full, window, sconv)]
    return CacheManager(GROUPS, pools, **{"keep_every": 256, **more})


def run(cache: CacheManager, tokens: list[int], salt: str = "", prompt: int | None = None) -> Holding:
    """A sequence of known tokens, computed in one step, still held."""
    holding = cache.match(tokens, cache.chain(salt), len(tokens) if prompt is None else prompt)
    holding.row = 0
    assert cache.reserve(holding, holding.start, len(tokens), len(tokens))
    cache.drain()
    cache.advance(holding, len(tokens))
    return holding


def held(holding: Holding) -> dict[str, list[int]]:
    return {g.name: sorted(t) for g, t in zip(GROUPS, holding.tables, strict=True)}


def test_a_long_step_stores_only_the_convolution_inputs_somebody_will_read() -> None:
    cache = manager()
    holding = cache.match(list(range(600)), None, 600)
    assert cache.reserve(holding, 0, 600, 600)
    assert held(holding)["full"] == list(range(10))
    assert held(holding)["window"] == list(range(10))
    # before 256 and 512, which are worth keeping, and the tail
    assert held(holding)["sconv"] == [63, 127, 149]


def test_reserve_takes_from_all_groups_or_from_none() -> None:
    cache = manager(window=4)
    holding = cache.match(list(range(600)), None, 600)
    assert not cache.reserve(holding, 0, 600, 600)
    assert [pool.held for pool in cache.pools] == [0, 0, 0]
    assert cache.reserve(holding, 0, 192, 192)


def test_most_decode_steps_need_no_blocks() -> None:
    cache = manager()
    tokens = list(range(100))
    holding = run(cache, tokens)
    asked = []
    for position in range(100, 164):
        asked.append(position + 1 > holding.room)
        assert cache.reserve(holding, position, position + 1, position + 1)
        tokens.append(7)
        cache.advance(holding, position + 1)
    assert sum(asked) == 16  # one block of four convolution inputs at a time


def test_windows_let_go_of_what_they_cannot_reach() -> None:
    cache = manager()
    holding = run(cache, list(range(600)))
    assert held(holding)["window"] == [7, 8, 9]  # 600 - 127 = 473 is in block 7
    assert held(holding)["full"] == list(range(10))


def test_a_prompt_is_resumed_from_its_end() -> None:
    cache = manager()
    cache.release(run(cache, list(range(150))))
    again = cache.match([*range(150), 7, 8], cache.chain(""), 152)
    assert again.start == 128
    assert held(again) == {"full": [0, 1], "window": [0, 1], "sconv": [31]}


def test_kept_boundaries_are_where_the_configuration_says() -> None:
    cache = manager()
    cache.release(run(cache, list(range(600))))
    for shared, start in [(600, 576), (575, 512), (520, 512), (511, 256), (256, 256), (255, 0)]:
        tokens = [*range(shared), *range(1000, 1100)]
        found = cache.match(tokens, cache.chain(""), len(tokens))
        assert found.start == start, shared
        cache.release(found)


def test_where_two_prompts_part_becomes_a_boundary() -> None:
    cache = manager()
    cache.release(run(cache, list(range(250))))
    second = run(cache, [*range(130), *range(1000, 1100)])
    assert second.start == 0  # nothing was kept at 128
    cache.release(second)
    third = cache.match([*range(130), *range(2000, 2100)], cache.chain(""), 230)
    assert third.start == 128


def test_the_last_token_of_a_known_prompt_is_computed_in_a_copy() -> None:
    cache = manager()
    first = run(cache, list(range(128)))
    second = cache.match(list(range(128)), cache.chain(""), 128)
    assert second.start == 127
    second.row = 5
    entries, moves = cache.drain()
    assert [move.group for move in moves] == ["full", "window", "sconv"]
    for move, table, shared in zip(moves, second.tables, first.tables, strict=True):
        assert move == BlockMove(move.group, max(shared.items())[1], max(table.items())[1])
        assert move.source != move.target
    assert entries["full"] == [BlockEntry(5, 0, first.tables[0][0]), BlockEntry(5, 1, moves[0].target)]
    assert all(pool.holders[move.source] == 1 for pool, move in zip(cache.pools, moves, strict=True))


def test_without_a_block_for_the_copy_an_earlier_boundary_is_taken() -> None:
    cache = manager(full=3)  # two blocks, both of the first sequence
    cache.release(run(cache, list(range(128))))
    second = cache.match(list(range(128)), cache.chain(""), 128)
    assert second.start == 0
    assert cache.reserve(second, 0, 128, 128)


def test_salts_and_switched_off_prefixes_find_nothing() -> None:
    cache = manager()
    cache.release(run(cache, list(range(150))))
    assert cache.match(list(range(150)), cache.chain("tenant"), 150).start == 0
    assert cache.match(list(range(150)), cache.chain(""), 150, reuse=False).start == 0
    off = manager(prefix=False)
    assert off.chain("") is None
    off.release(run(off, list(range(150))))
    assert off.match(list(range(150)), None, 150).start == 0


def test_generated_tokens_can_be_found_too() -> None:
    cache = manager()
    cache.release(run(cache, list(range(300)), prompt=100))
    assert cache.match([*range(300), 1], cache.chain(""), 301).start == 256


def answer(cache: CacheManager, prompt: int, length: int) -> Holding:
    """A prompt in one step, then token after token."""
    tokens = list(range(prompt))
    holding = run(cache, tokens)
    for position in range(prompt, length):
        assert cache.reserve(holding, position, position + 1, position + 1)
        tokens.append(position)
        cache.advance(holding, position + 1)
    return holding


@pytest.mark.parametrize("length", [128, 129, 131, 132, 190, 191, 192, 255])
def test_an_answer_is_resumed_from_its_last_whole_grain(length: int) -> None:
    cache = manager()
    holding = answer(cache, 70, length)
    assert max(map(len, held(holding).values())) <= 5, "one boundary behind the row, no more"
    cache.release(holding, ended=True)
    again = cache.match([*range(length), 7], cache.chain(""), length + 1)
    assert again.start == length // 64 * 64
    cache.release(again)
    assert cache.usage == {"full": 0.0, "window": 0.0, "sconv": 0.0}


def test_a_row_that_only_makes_room_leaves_no_boundary() -> None:
    cache = manager()
    cache.release(answer(cache, 70, 190))
    assert cache.match([*range(190), 7], cache.chain(""), 191).start == 64


def test_where_blocks_are_short_the_boundary_behind_a_row_gives_way() -> None:
    cache = manager(sconv=3)  # two, which a row needs where it crosses from one to the next
    cache.release(answer(cache, 4, 190), ended=True)
    assert cache.match([*range(190), 7], cache.chain(""), 191).start == 0


def test_with_a_lag_the_last_positions_are_not_published_yet() -> None:
    cache = manager(lag=3, lookahead=4)
    tokens = list(range(257))
    holding = cache.match(tokens, cache.chain(""), 257)
    assert cache.reserve(holding, 0, 258, 256)
    cache.advance(holding, 256)
    assert len(cache.pools[0].found) == 3
    tokens += [1, 2, 3]
    cache.advance(holding, 259)
    assert len(cache.pools[0].found) == 4


def test_advancing_past_the_tokens_is_a_bug_that_shows() -> None:
    # a refused draft must never be counted as computed
    cache = manager()
    holding = cache.match(list(range(10)), cache.chain(""), 10)
    cache.reserve(holding, 0, 12, 11)
    with pytest.raises(AssertionError, match="12 positions computed of 10 tokens"):
        cache.advance(holding, 12)


def test_the_resume_set_is_what_the_next_token_reads() -> None:
    cache = manager()
    holding = run(cache, list(range(300)))
    position, blocks = cache.resume_set(holding)
    assert position == 299  # the last token is computed where it goes on
    assert [index for index, _ in blocks["full"]] == [0, 1, 2, 3, 4]
    assert [index for index, _ in blocks["window"]] == [2, 3, 4]
    assert [index for index, _ in blocks["sconv"]] == [74]
    assert blocks["full"][0][1] == holding.tables[0][0]


def test_what_is_dropped_last_was_computed_first() -> None:
    # a chain is useless without its beginning, so its end is reused first
    cache = manager(full=4)
    holding = run(cache, list(range(192)))
    order = [holding.tables[0][i] for i in (2, 1, 0)]
    cache.release(holding)
    assert [cache.pools[0].take() for _ in range(3)] == order


def test_admission_counts_what_others_have_yet_to_take() -> None:
    cache = manager(full=9)  # eight blocks
    first = cache.match(list(range(320)), None, 320)
    cache.reserve(first, 0, 64, 64)
    second = cache.match(list(range(192)), None, 192)
    assert cache.admissible(second, [first])
    third = cache.match(list(range(193)), None, 193)
    assert not cache.admissible(third, [first])
    assert cache.admissible(third, [])


def test_limits_of_the_configuration_are_checked() -> None:
    with pytest.raises(SetupError, match="multiple of 64"):
        manager(keep_every=100)
    load = Load(rows=1, step_tokens=512, chunk=512, keep_every=256)
    manager().require(load)
    with pytest.raises(NotEnoughMemory, match=r"5 of window, .*11 of window"):
        manager(window=6).require(load)
    assert manager(full=11).capacity == 640


def test_usage_counts_held_blocks_only() -> None:
    cache = manager(full=11)
    holding = run(cache, list(range(320)))
    assert cache.usage["full"] == 0.5
    cache.release(holding)
    assert cache.usage["full"] == 0.0


def test_a_cleared_cache_finds_nothing_and_is_packed_until_a_sequence_ends() -> None:
    cache = manager()
    tokens = list(range(256))
    cache.release(run(cache, tokens), ended=True)
    assert any(pool.found for pool in cache.pools)
    cache.clear()
    assert not any(pool.found for pool in cache.pools)
    holding = run(cache, tokens)
    assert holding.start == 0
    assert cache.packed
    assert all(not kept for kept in holding.kept)  # no boundary behind the row takes a block that another group needs
    cache.release(holding, ended=True)
    assert not cache.packed
    assert run(cache, tokens).start == 255


def test_rows_are_let_in_only_beside_the_windows_of_all() -> None:
    groups = (CacheGroup("full", 64, 64), CacheGroup("window", 64, 640, 128), CacheGroup("sconv", 4, 40, 4, False))
    load = Load(rows=8, step_tokens=64, chunk=64, keep_every=256)
    layout = layout_of(groups, 30 * 640)
    cache = CacheManager(groups, layout.pools(), keep_every=256)
    cache.require(load)
    held = []
    while True:
        holding = cache.match([len(held)] * 64, cache.chain(""), 64)
        if not cache.admissible(holding, ()):
            break
        assert cache.reserve(holding, 0, 64, 64)
        held.append(holding)
    assert 1 < len(held) < 8  # full has room for many more
    live = replace(load, rows=len(held), prefix=False)
    for group, pool in zip(groups[1:], cache.pools[1:], strict=True):
        assert pool.most >= live_blocks(group, live)
    # each of them gets the window it may need
    for holding in held:
        for position in range(64, 190):
            assert cache.reserve(holding, position, position + 1, position + 1)
            holding.tokens.append(1)
            cache.advance(holding, position + 1)
