"""A budget in bytes becomes blocks: what is promised fits, and what does not fit is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inkcap.base.errors import NotEnoughMemory, SetupError
from inkcap.cache.group import CacheGroup
from inkcap.cache.plan import Load, groups_of, least_blocks, live_blocks, plan_memory, touched
from inkcap.cache.state import LayerState, Plane

FULL = CacheGroup("full", 64, 64 * 1024)
WINDOW = CacheGroup("window", 64, 64 * 2048, 512)
SCONV = CacheGroup("sconv", 4, 4 * 4096, 4, False)
LOAD = Load(rows=8, step_tokens=512, chunk=256, keep_every=256)


def state(group: str, visit: int, window: int | None, block: int = 64, own: bool = True, dtype: str = "bfloat16"):
    return LayerState(group, visit, (Plane("k", (2, 8), dtype), Plane("v", (2, 8), dtype)), window, block, own)


def test_layers_form_groups_with_the_bytes_of_all_of_them() -> None:
    states = [state("window", 0, 512), state("full", 1, None), state("window", 2, 512, dtype="float32")]
    window, full = groups_of([*states, state("sconv", 0, 4, 4, False)])[:2]
    assert (window.name, window.window, window.block) == ("window", 512, 64)
    assert window.block_bytes == 64 * 2 * 16 * (2 + 4)
    assert full.block_bytes == 64 * 2 * 16 * 2
    assert full.window is None


def test_layers_of_one_group_that_disagree_are_refused() -> None:
    with pytest.raises(SetupError, match=r"visit 1 declares cache group window as window 1024.*window 512"):
        groups_of([state("window", 0, 512), state("window", 1, 1024)])


def test_a_block_that_does_not_divide_the_grain_is_refused() -> None:
    with pytest.raises(SetupError, match="48"):
        groups_of([state("full", 0, None, 48)])


def test_the_plan_stays_within_its_budget_and_reserves_block_zero() -> None:
    plan = plan_memory([FULL, WINDOW, SCONV], 64 << 20, LOAD, max_length=4096)
    assert plan.size_bytes <= 64 << 20
    assert plan.size_bytes > 0.97 * (64 << 20)  # and uses it
    for share in plan.shares:
        assert share.blocks == share.live + share.kept + 1
    assert plan.blocks["window"] > live_blocks(WINDOW, LOAD)
    assert plan.longest == 4096


def test_without_prefixes_nothing_is_kept_for_later() -> None:
    plan = plan_memory([FULL, WINDOW, SCONV], 64 << 20, LOAD, max_length=4096, prefix=False)
    assert all(share.kept == 0 for share in plan.shares)
    assert plan.context_tokens == 8 * 4096  # more could never be used


def test_a_length_that_does_not_fit_is_shown_not_hidden() -> None:
    plan = plan_memory([FULL, WINDOW, SCONV], 64 << 20, LOAD, max_length=1 << 20)
    assert plan.longest == plan.context_tokens
    assert plan.longest < 1 << 20
    assert "1048576 do not fit" in str(plan)


def test_too_little_memory_names_need_budget_and_way_out() -> None:
    with pytest.raises(NotEnoughMemory) as caught:
        plan_memory([FULL, WINDOW, SCONV], 4 << 20, LOAD, max_length=4096)
    for words in ("MiB", "4.0 MiB", "sched.rows = 8", "cache.memory_bytes"):
        assert words in str(caught.value)


def test_the_table_has_a_line_for_each_group() -> None:
    plan = plan_memory([FULL, WINDOW, SCONV], 64 << 20, LOAD, max_length=4096)
    lines = str(plan).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["full", "window", "sconv"]
    assert str(plan.context_tokens) in str(plan)


def test_a_model_without_full_attention_holds_any_length() -> None:
    plan = plan_memory([WINDOW, SCONV], 64 << 20, LOAD, max_length=4096)
    assert plan.context_tokens is None
    assert plan.longest == 4096


@given(
    budget=st.integers(1 << 20, 1 << 32),
    rows=st.integers(1, 64),
    step_tokens=st.integers(1, 4096),
    drafts=st.integers(0, 8),
    max_length=st.integers(64, 1 << 20),
    prefix=st.booleans(),
)
def test_any_plan_fits_or_says_why(
    budget: int, rows: int, step_tokens: int, drafts: int, max_length: int, prefix: bool
) -> None:
    lag = max(0, drafts - 1)
    load = Load(rows=rows, step_tokens=step_tokens, chunk=1024, keep_every=1024, drafts=drafts, lag=lag, prefix=prefix)
    try:
        plan = plan_memory([FULL, WINDOW, SCONV], budget, load, max_length=max_length, prefix=prefix)
    except NotEnoughMemory:
        return
    assert plan.size_bytes <= budget
    assert plan.blocks["full"] > rows
    for group in (WINDOW, SCONV):
        assert plan.blocks[group.name] - 1 >= max(live_blocks(group, load), least_blocks(group, load))


@given(start=st.integers(0, 500), tokens=st.integers(1, 300), block=st.sampled_from([1, 4, 64]))
def test_touched_is_the_most_blocks_a_span_can_touch(start: int, tokens: int, block: int) -> None:
    group = CacheGroup("g", block, 1)
    assert len(group.blocks([(start, start + tokens)])) <= touched(tokens, block)
    assert len(group.blocks([(block - 1, block - 1 + tokens)])) == touched(tokens, block)
