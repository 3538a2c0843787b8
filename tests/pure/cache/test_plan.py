"""A budget in bytes becomes blocks: what is promised fits, and what does not fit is named."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inkcap.base.errors import NotEnoughMemory, SetupError
from inkcap.cache.group import CacheGroup
from inkcap.cache.manager import CacheManager
from inkcap.cache.plan import SLABS, Load, groups_of, layout_of, least_blocks, live_blocks, plan_memory, touched
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
    assert 0.97 * (64 << 20) < plan.size_bytes <= 64 << 20
    for group in plan.groups:
        assert min(cut.start for cut in plan.layout.cuts(group)) > 0
        assert plan.blocks[group.name] * group.block_bytes > 0.9 * plan.size_bytes
    assert plan.longest == 4096


def test_rows_take_from_the_context_that_fits() -> None:
    plan = plan_memory([FULL, WINDOW, SCONV], 64 << 20, LOAD, max_length=4096)
    alone, many = plan.context_tokens(1), plan.context_tokens(8)
    assert alone is not None
    assert many is not None
    live = sum(live_blocks(group, LOAD) * group.block_bytes for group in (WINDOW, SCONV))
    assert many * 1024 == pytest.approx((64 << 20) - live, rel=0.1)
    assert many < alone < 64 << 10


@pytest.mark.parametrize("max_length", [100, 1153, 4097, 1 << 20])
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize(("full_bytes", "waste"), [(64 * 1024, 1.2), (64 * 2900, 3.0)])
def test_without_prefixes_all_rows_fit_at_their_longest_and_no_more_is_taken(
    rows: int, max_length: int, full_bytes: int, waste: float
) -> None:
    """Also where a slab, two of the largest blocks, has one whole block of another group only."""
    max_length = min(max_length, (8 << 20) // rows)  # 64 rows of a million tokens say no more, and take long
    load = replace(LOAD, rows=rows, prefix=False)
    groups = [replace(FULL, block_bytes=full_bytes), WINDOW, SCONV]
    plan = plan_memory(groups, 1 << 40, load, max_length=max_length)
    assert plan.longest == max_length
    manager = CacheManager(groups, plan.layout.pools(), keep_every=LOAD.keep_every, prefix=False)
    manager.require(load)
    assert manager.capacity is not None
    assert manager.capacity >= max_length
    held = []
    for _ in range(rows):
        holding = manager.match([1] * max_length, None, max_length)
        assert manager.admissible(holding, held[-1:])
        for start in range(0, max_length, load.chunk):
            stop = min(max_length, start + load.chunk)
            assert manager.reserve(holding, start, stop, stop)
            manager.advance(holding, stop)
        held.append(holding)
    used = rows * -(-max_length // 64) * full_bytes
    used += sum(live_blocks(group, load) * group.block_bytes for group in groups[1:])
    assert plan.size_bytes < waste * used + 4 * plan.layout.slab_bytes


def test_a_length_that_does_not_fit_is_shown_not_hidden() -> None:
    plan = plan_memory([FULL, WINDOW, SCONV], 64 << 20, LOAD, max_length=1 << 20)
    assert plan.longest == plan.context_tokens(1)
    assert plan.longest < 1 << 20
    assert "1048576 do not fit" in str(plan)


def test_too_little_memory_names_need_budget_and_way_out() -> None:
    with pytest.raises(NotEnoughMemory) as caught:
        plan_memory([FULL, WINDOW, SCONV], 1 << 20, LOAD, max_length=4096)
    for words in ("MiB", "1.0 MiB", "steps of 256 tokens", "sched.chunk", "cache.memory_bytes"):
        assert words in str(caught.value)


def test_the_table_has_a_line_for_each_group() -> None:
    plan = plan_memory([FULL, WINDOW, SCONV], 64 << 20, LOAD, max_length=4096)
    lines = str(plan).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["full", "window", "sconv"]
    for rows in (1, 8):
        assert f"with {rows} running, {plan.context_tokens(rows)} tokens of full context fit" in lines


def test_a_model_without_full_attention_holds_any_length() -> None:
    plan = plan_memory([WINDOW, SCONV], 64 << 20, LOAD, max_length=4096)
    assert plan.context_tokens(1) is None
    assert plan.longest == 4096


@given(
    size=st.integers(1 << 10, 1 << 34),
    bytes_of=st.lists(st.integers(1, 1 << 20), min_size=1, max_size=4),
)
def test_every_block_of_a_layout_lies_in_one_slab(size: int, bytes_of: list[int]) -> None:
    groups = [CacheGroup(f"{n}", 4, block_bytes) for n, block_bytes in enumerate(bytes_of)]
    layout = layout_of(groups, size)
    assert layout.size_bytes <= max(size, max(bytes_of))
    assert layout.slabs <= SLABS + SLABS // 2 or layout.slab_bytes <= 2 * max(bytes_of)
    for group in groups:
        for number, cut in enumerate(layout.cuts(group)[:4]):
            begin = layout.first + number * layout.slab_bytes
            assert len(cut) >= 1
            assert begin <= cut.start * group.block_bytes
            assert cut.stop * group.block_bytes <= begin + layout.slab_bytes
    if layout.slabs:
        widest = max(groups, key=lambda group: group.block_bytes)
        assert layout.most(widest) * widest.block_bytes == layout.slabs * layout.slab_bytes  # nothing is lost


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
    groups = [FULL, WINDOW, SCONV]
    try:
        plan = plan_memory(groups, budget, load, max_length=max_length)
    except NotEnoughMemory:
        return
    assert plan.size_bytes <= budget
    # the longest sequence fits beside its own windows, and all rows' windows fit where that is said
    layout = plan.layout
    need = layout.slabs_for(FULL, -(-plan.longest // 64)) + sum(
        layout.slabs_for(group, least_blocks(group, load)) for group in (WINDOW, SCONV)
    )
    assert need <= layout.slabs
    if plan.context_tokens(rows) and rows > 1:
        assert sum(layout.slabs_for(group, live_blocks(group, load)) for group in (WINDOW, SCONV)) < layout.slabs
    if not prefix and budget == 1 << 32:
        assert plan.longest == max_length


@given(start=st.integers(0, 500), tokens=st.integers(1, 300), block=st.sampled_from([1, 4, 64]))
def test_touched_is_the_most_blocks_a_span_can_touch(start: int, tokens: int, block: int) -> None:
    group = CacheGroup("g", block, 1)
    assert len(group.blocks([(start, start + tokens)])) <= touched(tokens, block)
    assert len(group.blocks([(block - 1, block - 1 + tokens)])) == touched(tokens, block)
