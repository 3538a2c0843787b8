"""Stories about the scheduler: who runs, how much, and what each is told."""

from collections import deque

import pytest

from inkcap.base.config import CacheConfig, SchedConfig
from inkcap.base.errors import BadRequest, ConfigInvalid, ContextTooLong, NotEnoughMemory, QueueFull
from inkcap.base.request import STEP_BOUNDS, Finish, GenerateRequest, Logprobs, SamplingParams, TokenDelta
from inkcap.base.step import Chunk, Continue, RowResult, StepPlan, StepResult
from inkcap.cache.group import CacheGroup
from inkcap.cache.pool import Pool
from inkcap.sched.scheduler import Scheduler, build_scheduler

GROUPS = [CacheGroup("full", 64, 1), CacheGroup("window", 64, 1, 128), CacheGroup("sconv", 4, 1, 4, False)]
STOP = 999


class Story:
    """A scheduler and a device that draws 1, 2, 3, ... or what it is told to."""

    def __init__(
        self,
        *,
        full: int = 200,
        window: int = 200,
        rows: int = 8,
        step_tokens: int = 256,
        chunk: int = 128,
        waiting: int = 100,
        prefix: bool = True,
        depth: int = 1,
        drafts: int = 0,
        max_length: int = 4096,
    ) -> None:
        self.scheduler: Scheduler = build_scheduler(
            CacheConfig(prefix=prefix, keep_every=256),
            SchedConfig(rows=rows, step_tokens=step_tokens, chunk=chunk, waiting=waiting),
            GROUPS,
            [Pool.alone(blocks) for blocks in (full, window, 400)],
            stop_ids=(STOP,),
            max_length=max_length,
            drafts=drafts,
        )
        self.depth = depth
        self.flights: deque[StepPlan] = deque()
        self.plans: list[StepPlan] = []
        self.deltas: list[TokenDelta] = []
        self.owner: dict[int, str] = {}
        self.script: dict[str, list[list[int]]] = {}
        self._names: dict[int, str] = {}

    def add(self, name: str, prompt: int | list[int], max_tokens: int = 10, *, priority: int = 0, **params) -> None:
        tokens = prompt if isinstance(prompt, list) else [hash(name) % 1000 + 1000] * prompt
        seed = len(self._names)
        self._names[seed] = name
        self.scheduler.add(
            GenerateRequest(
                request_id=name,
                token_ids=tokens,
                params=SamplingParams(**params),
                seed=seed,
                max_tokens=max_tokens,
                priority=priority,
                arrival=float(seed),
            )
        )

    def step(self) -> StepPlan | None:
        """One turn of the engine's loop."""
        plan = self.scheduler.plan()
        if plan is not None:
            self.plans.append(plan)
            self.flights.append(plan)
        if self.flights and (len(self.flights) > self.depth or plan is None):
            self.land()
        return plan

    def land(self) -> None:
        """The oldest plan's result arrives."""
        plan = self.flights.popleft()
        for setup in plan.opened:
            self.owner[setup.row] = self._names[setup.seed]
        rows = []
        for entry in plan.work:
            draws = isinstance(entry, Continue) or entry.samples
            script = self.script.get(self.owner[entry.row])
            tokens = (script.pop(0) if script else [7]) if draws else []
            rows.append(RowResult(entry.row, tokens))
        self.deltas += self.scheduler.apply(StepResult(step=plan.step, rows=rows, seconds=0.5))

    def finish(self) -> None:
        for _ in range(3000):
            if not (self.scheduler.unfinished or self.flights):
                return
            self.step()
        raise AssertionError("the story does not end")

    def told(self, name: str) -> list[int]:
        return [t for d in self.deltas if d.request_id == name for t in d.tokens]

    def last(self, name: str) -> TokenDelta:
        return [d for d in self.deltas if d.request_id == name][-1]

    def share(self, plan: StepPlan, row: int) -> int:
        """Tokens a row has in a plan."""
        return sum(tokens(e) for e in plan.work if e.row == row)


def tokens(entry: Chunk | Continue) -> int:
    return entry.stop - entry.start if isinstance(entry, Chunk) else 1 + entry.drafts


def test_a_prompt_is_read_in_chunks_and_only_the_last_one_draws() -> None:
    story = Story(chunk=100, step_tokens=100)
    story.add("a", 250)
    plans = [story.step() for _ in range(4)]
    work = [plan.work for plan in plans if plan]
    # the second chunk is planned while the first is in flight, since its tokens are known
    assert work[:3] == [[Chunk(0, 0, 100, False)], [Chunk(0, 100, 200, False)], [Chunk(0, 200, 250, True)]]
    assert work[3] == [Continue(0)]


def test_a_row_is_set_up_once_with_all_it_needs() -> None:
    story = Story()
    story.add("a", [5, 6, 7], max_tokens=2, temperature=0.5)
    plan = story.step()
    assert plan is not None
    (setup,) = plan.opened
    assert (setup.row, setup.tokens, setup.prompt_length, setup.params.temperature) == (0, [5, 6, 7], 3, 0.5)
    assert {name: len(entries) for name, entries in plan.blocks.items()} == {"full": 1, "window": 1, "sconv": 1}
    story.finish()
    assert sum(len(plan.opened) for plan in story.plans) == 1


def test_no_step_is_run_beyond_the_last_token() -> None:
    story = Story()
    story.add("a", 10, max_tokens=3)
    story.finish()
    # the prompt gives the first token, two steps give the others; nothing is in flight when the third arrives
    assert [len(plan.work) for plan in story.plans] == [1, 1, 1]
    assert story.told("a") == [7, 7, 7]
    assert story.last("a").finish is Finish.LENGTH


def test_one_wasted_step_follows_a_stop_token() -> None:
    story = Story()
    story.script["a"] = [[1], [2], [STOP], [3]]
    story.add("a", 10, max_tokens=50)
    story.finish()
    assert story.told("a") == [1, 2, STOP]
    assert story.last("a").finish is Finish.STOP
    assert story.last("a").stop_token == STOP
    assert len(story.plans) == 4  # the fourth was in flight and its 3 is dropped
    assert story.scheduler.stats().finished == {"stop": 1}


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({}, [1, STOP]),
        ({"min_tokens": 2}, [1, STOP, 5, STOP]),
        ({"ignore_eos": True}, [1, STOP, 5, STOP, 6, 7]),
        ({"ignore_eos": True, "stop_token_ids": [5]}, [1, STOP, 5]),
        ({"stop_token_ids": [1]}, [1]),
    ],
)
def test_stop_tokens_follow_the_parameters(params: dict, told: list[int]) -> None:
    story = Story()
    story.script["a"] = [[1], [STOP], [5], [STOP], [6]]
    story.add("a", 10, max_tokens=6, **params)
    story.finish()
    assert story.told("a") == told


def test_a_long_prompt_does_not_stall_those_who_decode() -> None:
    story = Story(step_tokens=128, chunk=128)
    for name in "abcd":
        story.add(name, 4, max_tokens=100)
    for _ in range(3):
        story.step()
    story.add("long", 3000)
    for _ in range(20):
        plan = story.step()
        assert plan is not None
        assert sum(isinstance(e, Continue) for e in plan.work) == 4  # every step has a token for each of them
        assert story.share(plan, 4) == 124  # and all the rest is for the prompt


def test_those_who_decode_do_not_stall_a_long_prompt() -> None:
    # 16 rows want 16 tokens a step, and that is all a step has
    story = Story(rows=17, step_tokens=16)
    for i in range(16):
        story.add(f"r{i}", 4, max_tokens=1000)
    for _ in range(20):
        story.step()
    story.add("long", 100)
    plans = [story.step() for _ in range(30)]
    shares = [story.share(plan, 16) for plan in plans if plan]
    assert shares[:3] == [4, 4, 4]  # a quarter, from its first step
    assert story.told("long")


def test_when_not_all_fit_those_served_longest_ago_go_first() -> None:
    story = Story(rows=8, step_tokens=4)
    for i in range(8):
        story.add(f"r{i}", 2, max_tokens=500)
    for _ in range(40):
        story.step()
    before = {f"r{i}": len(story.told(f"r{i}")) for i in range(8)}
    for _ in range(40):
        story.step()
    gained = [len(story.told(name)) - n for name, n in before.items()]
    assert min(gained) >= 19
    assert max(gained) <= 21


def test_long_prompts_take_turns_when_a_step_has_room_for_one() -> None:
    story = Story(rows=4, step_tokens=64, chunk=8)
    for name in "abc":
        story.add(name, 2000)
    story.step()  # eight tokens of each
    story.scheduler.config = SchedConfig(rows=4, step_tokens=64, chunk=64)
    turns = [[e.row for e in plan.work] for plan in [story.step() for _ in range(6)] if plan]
    assert turns == [[0], [1], [2], [0], [1], [2]]


def test_priority_decides_who_gets_in() -> None:
    story = Story(rows=1)
    story.add("running", 4, max_tokens=3)
    story.step()
    story.add("late but urgent", 4, max_tokens=1, priority=1)
    story.add("more urgent", 4, max_tokens=1, priority=0)
    story.finish()
    ends = [d.request_id for d in story.deltas if d.finish]
    assert ends == ["running", "more urgent", "late but urgent"]


def test_the_youngest_is_preempted_and_comes_back_with_its_tokens() -> None:
    # nine blocks: two sequences of 256 + 200 tokens need eight each
    story = Story(full=10, prefix=False)
    story.add("old", 256, max_tokens=200, ignore_eos=True)
    story.add("young", 256, max_tokens=200, ignore_eos=True)
    story.script["young"] = [[i] for i in range(200)]
    story.finish()
    assert story.scheduler.stats().preemptions == 1
    again = [setup for plan in story.plans for setup in plan.opened][-1]
    assert story._names[again.seed] == "young"
    assert again.prompt_length == 256
    known = len(again.tokens) - 256
    assert 0 < known < 200
    assert again.tokens[256:] == list(range(known))
    assert story.told("young") == list(range(200))  # no token twice, none lost
    assert len(story.told("old")) == 200
    ends = [d.request_id for d in story.deltas if d.finish]
    assert ends == ["old", "young"]
    told = [d.preemptions for d in story.deltas if d.request_id == "young"]
    assert sum(told) == max(told) == 1
    assert not any(d.preemptions for d in story.deltas if d.request_id == "old")


def test_lower_priority_is_preempted_before_younger() -> None:
    story = Story(full=10, prefix=False)
    story.add("background", 256, max_tokens=200, priority=1)
    story.step()
    story.add("urgent", 256, max_tokens=200, priority=0)
    story.finish()
    ends = [d.request_id for d in story.deltas if d.finish]
    assert story.scheduler.stats().preemptions == 1
    assert ends == ["urgent", "background"]


def one_is_about_to_be_preempted(rows: int = 8) -> Story:
    """Eight blocks are held; the old one needs a ninth soon, while the young one has a step in flight."""
    story = Story(full=9, prefix=False, rows=rows)
    story.add("old", 256, max_tokens=250)
    story.add("young", 200, max_tokens=250)
    story.script["young"] = [[i] for i in range(250)]
    return story


def test_what_is_in_flight_when_a_row_is_preempted_still_counts() -> None:
    story = one_is_about_to_be_preempted()
    before: list[int] = []
    while not story.scheduler.stats().preemptions:
        before = story.told("young")
        story.step()
    # its last token was on its way while its blocks were taken
    assert story.told("young") == [*before, len(before)]
    story.finish()
    assert story.told("young") == list(range(250))


def test_log_probabilities_of_the_prompt_survive_a_preemption() -> None:
    story = Story()
    story.add("a", [5, 6, 7, 8], max_tokens=2, prompt_logprobs=0)
    found = [Logprobs([t], [0.0], 1) for t in (6, 7, 8)]
    first = story.scheduler.plan()
    assert first is not None
    story.scheduler._preempt(story.scheduler._sequences["a"])
    # the first token was on its way, but the log-probabilities that belong to it are lost with the row
    rows = [RowResult(0, [7], None, found)]
    assert story.scheduler.apply(StepResult(step=first.step, rows=rows)) == []
    again = story.scheduler.plan()
    assert again is not None
    assert again.work == [Chunk(0, 0, 4, True)]
    (delta,) = story.scheduler.apply(StepResult(step=again.step, rows=rows))
    assert delta.prompt_logprobs == [None, *found]


def test_nobody_is_let_in_while_a_running_row_lacks_blocks() -> None:
    story = one_is_about_to_be_preempted(rows=2)
    story.step()
    story.add("urgent", 10, priority=-1)  # waits for a row
    while not story.scheduler.stats().preemptions:
        plan = story.step()
    assert plan is not None
    assert plan.opened == []
    plan = story.step()
    assert plan is not None
    assert [story._names[setup.seed] for setup in plan.opened] == ["urgent"]


def test_a_row_alone_never_takes_from_itself() -> None:
    # the window group holds just what one chunk needs, so two chunks are never out at once
    story = Story(window=6, chunk=128, step_tokens=128)
    story.add("a", 1000, max_tokens=300)
    story.finish()
    assert story.scheduler.stats().preemptions == 0
    assert len(story.told("a")) == 300


def test_a_sequence_may_end_while_it_waits_again() -> None:
    story = one_is_about_to_be_preempted()
    while not story.scheduler.stats().preemptions:
        plan = story.scheduler.plan()
        assert plan is not None
        story.flights.append(plan)
        if story.scheduler.stats().preemptions:
            story.script["young"] = [[STOP]]
        if len(story.flights) > 1:
            story.land()
    assert story.last("young").finish is Finish.STOP
    assert story.scheduler.stats().waiting == 0
    story.finish()
    assert len(story.told("old")) == 250


def test_a_sequence_enters_only_when_all_it_knows_fits() -> None:
    story = Story(full=10, prefix=False)
    story.add("a", 400, max_tokens=20)
    story.step()
    story.add("b", 200, max_tokens=20)
    plan = story.step()
    assert plan is not None
    assert plan.opened == []  # four blocks for b, two left beside what a has yet to read
    story.finish()
    assert story.scheduler.stats().preemptions == 0


def test_a_known_prefix_is_not_computed_again_and_the_first_delta_says_so() -> None:
    story = Story()
    shared = list(range(200))
    story.add("a", shared, max_tokens=2)
    story.finish()
    story.add("b", [*shared, 1, 2, 3], max_tokens=3)
    plan = story.step()
    assert plan is not None
    assert plan.work == [Chunk(0, 192, 203, True)]
    story.finish()
    said = [d.cached_tokens for d in story.deltas if d.request_id == "b"]
    assert said == [192, None, None]
    stats = story.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (403, 192)
    assert (stats.prompt_tokens, stats.cached_prompt_tokens) == (403, 192)


def test_a_fully_known_prompt_still_computes_its_last_token_in_a_copy() -> None:
    story = Story()
    story.add("a", list(range(128)), max_tokens=1)
    story.finish()
    story.add("b", list(range(128)), max_tokens=1)
    plan = story.step()
    assert plan is not None
    assert plan.work == [Chunk(0, 127, 128, True)]
    assert {move.group for move in plan.moves} == {"full", "window", "sconv"}


def test_equal_prompts_that_come_together_are_computed_once() -> None:
    story = Story()
    prompt = [5] * 300 + list(range(1000, 1020))
    for i in range(4):
        story.add(f"r-{i}", prompt)
    story.add("other", 60)
    first = story.step()
    assert [setup.seed for setup in first.opened] == [0, 4]  # nobody else waits for it
    story.finish()
    cached = [next(d.cached_tokens for d in story.deltas if d.request_id == f"r-{i}") for i in range(4)]
    assert cached == [0, 319, 319, 319]
    assert all(len(story.told(f"r-{i}")) == 10 for i in range(4))
    assert story.scheduler.stats().step_tokens < 320 + 60 + 4 * 20 + 20


def test_who_waited_for_an_equal_prompt_goes_on_alone_when_that_one_ends() -> None:
    story = Story()
    for i in range(2):
        story.add(f"r-{i}", [5] * 300)
    story.step()
    assert story.scheduler.stats().running == 1
    story.scheduler.abort("r-0")
    story.finish()
    assert len(story.told("r-1")) == 10
    assert not story.scheduler._leaders


@pytest.mark.parametrize("more", [{"prompt": 300, "prefix": False}, {"prompt": 100}, {"prompt": 300, "scored": True}])
def test_where_waiting_gives_nothing_nobody_waits(more) -> None:
    story = Story(prefix=more.get("prefix", True))
    params = {"prompt_logprobs": 0} if more.get("scored") else {}
    for i in range(2):
        story.add(f"r-{i}", [5] * more["prompt"], **params)
    assert len(story.step().opened) == 2


def test_log_probabilities_of_the_prompt_are_collected_over_chunks() -> None:
    story = Story(chunk=4)
    story.add("warm", list(range(100, 110)), max_tokens=1)
    story.finish()
    story.add("a", list(range(100, 110)), max_tokens=2, prompt_logprobs=0)
    plans = []
    while (plan := story.scheduler.plan()) is not None:
        rows = []
        for entry in plan.work:
            row = RowResult(entry.row, [7])
            if isinstance(entry, Chunk):
                last = min(entry.stop, 9)
                prompt = [Logprobs([100 + p], [-1.0], 1) for p in range(entry.start + 1, last + 1)]
                row = RowResult(entry.row, [7] if entry.samples else [], None, prompt)
            rows.append(row)
        plans.append(plan)
        story.deltas += story.scheduler.apply(StepResult(step=plan.step, rows=rows))
    assert plans[0].work == [Chunk(0, 0, 4, False)]  # no prefix is taken: it has no log-probabilities
    first, second = [d for d in story.deltas if d.request_id == "a"]
    assert first.prompt_logprobs is not None
    assert [x and x.token_ids[0] for x in first.prompt_logprobs] == [None, *range(101, 110)]
    assert second.prompt_logprobs is None


def test_a_prompt_can_be_scored_without_drawing() -> None:
    story = Story()
    story.add("a", 10, max_tokens=0)
    plan = story.step()
    assert plan is not None
    assert plan.work == [Chunk(0, 0, 10, False)]
    story.finish()
    assert story.told("a") == []
    assert story.last("a").finish is Finish.LENGTH
    assert len(story.plans) == 1


def test_several_accepted_drafts_arrive_together_and_end_exactly() -> None:
    story = Story(drafts=3)
    story.script["a"] = [[1], [2, 3], [4], [5, 6, 7, 8]]
    story.add("a", 10, max_tokens=7)
    story.finish()
    assert story.told("a") == [1, 2, 3, 4, 5, 6, 7]
    # never more drafts than tokens that are still wanted
    drafts = [e.drafts for plan in story.plans for e in plan.work if isinstance(e, Continue)]
    assert drafts[0] == 3
    assert story.last("a").finish is Finish.LENGTH


def test_drafts_after_a_stop_token_are_cut_off() -> None:
    story = Story(drafts=3)
    story.script["a"] = [[1], [2, STOP, 4]]
    story.add("a", 10, max_tokens=50)
    story.finish()
    assert story.told("a") == [1, 2, STOP]


def test_an_abort_ends_a_sequence_wherever_it_is() -> None:
    story = Story(rows=1)
    story.add("running", 300, max_tokens=100)
    story.add("waiting", 10)
    story.step()
    assert story.scheduler.abort("waiting") == TokenDelta("waiting", [], finish=Finish.ABORT)
    assert story.scheduler.abort("running") == TokenDelta("running", [], finish=Finish.ABORT)  # in flight
    assert story.scheduler.abort("running") is None
    assert story.scheduler.abort("nobody") is None
    story.finish()
    assert story.deltas == []  # what was in flight is dropped
    stats = story.scheduler.stats()
    assert stats.finished == {"abort": 2}
    assert stats.group_usage == {"full": 0.0, "window": 0.0, "sconv": 0.0}


def test_a_preempted_sequence_can_be_aborted() -> None:
    story = Story(full=10, prefix=False)
    story.add("old", 256, max_tokens=200)
    story.add("young", 256, max_tokens=200)
    while not story.scheduler.stats().preemptions:
        story.step()
    assert story.scheduler.abort("young") is not None
    story.finish()
    assert len(story.told("old")) == 200
    assert story.scheduler.stats().cache_usage == 0.0


def test_a_closed_row_is_opened_by_the_next_in_the_same_plan() -> None:
    story = Story(rows=1)
    story.add("a", 10, max_tokens=1)
    story.add("b", 10, max_tokens=1)
    story.finish()
    first, second = story.plans
    assert (first.closed, [s.row for s in first.opened]) == ([], [0])
    assert (second.closed, [s.row for s in second.opened]) == ([0], [0])


def test_abort_all_empties_everything() -> None:
    story = Story(rows=2)
    for i in range(5):
        story.add(f"r{i}", 50)
    story.step()
    assert {d.request_id for d in story.scheduler.abort_all()} == {f"r{i}" for i in range(5)}
    assert story.scheduler.unfinished == 0
    story.finish()
    assert story.scheduler.plan() is None


def test_a_full_queue_says_how_full_it_is() -> None:
    story = Story(waiting=2)
    story.add("a", 10)
    story.add("b", 10)
    with pytest.raises(QueueFull, match=r"2 sequences wait; the limit is 2 \(sched.waiting\)"):
        story.add("c", 10)
    story.step()
    story.add("c", 10)


def test_requests_that_can_never_run_are_refused() -> None:
    story = Story(full=10, max_length=4096)
    with pytest.raises(ContextTooLong, match=r"4000 tokens and 97 more.*accepts 4096.*by 1 tokens"):
        story.add("a", 4000, max_tokens=97)
    with pytest.raises(ContextTooLong, match=r"the cache holds 576 tokens of one sequence. Shorten it by 33 tokens"):
        story.add("a", 600, max_tokens=10)
    with pytest.raises(BadRequest, match="no tokens"):
        story.add("a", [])
    story.add("a", 567, max_tokens=10)
    story.finish()
    assert len(story.told("a")) == 10


def test_a_request_id_is_used_once_at_a_time() -> None:
    story = Story()
    story.add("a", 10, max_tokens=1)
    with pytest.raises(BadRequest, match="'a' is in use"):
        story.add("a", 10)
    story.finish()
    story.add("a", 10, max_tokens=1)
    story.finish()
    assert story.told("a") == [7, 7]


def test_limits_that_fit_no_step_are_refused() -> None:
    with pytest.raises(ConfigInvalid, match=r"sched.step_tokens is 1; with sched.rows = 8"):
        Story(step_tokens=1)
    with pytest.raises(ConfigInvalid, match=r"sched.chunk is 0"):
        Story(chunk=0)
    with pytest.raises(NotEnoughMemory, match="2 of window"):
        Story(window=3)
    story = Story(rows=1, step_tokens=1, chunk=1)
    story.add("a", 5, max_tokens=3)
    story.finish()
    assert story.told("a") == [7, 7, 7]


def test_the_time_in_the_queue_is_told_once(monkeypatch) -> None:
    monkeypatch.setattr("time.time", lambda: 100.0)
    story = Story(rows=1)
    story.add("a", 20, max_tokens=4)
    story.add("b", 20, max_tokens=4)  # arrived at 1.0, as Story counts
    story.step()
    monkeypatch.setattr("time.time", lambda: 107.0)
    story.finish()
    told = {name: [d.queue_seconds for d in story.deltas if d.request_id == name] for name in "ab"}
    assert told["b"] == [106.0, None, None, None]
    assert told["a"] == [None] * 4  # no time of arrival is known


def test_counters_add_up() -> None:
    story = Story()
    story.add("a", 20, max_tokens=4)
    story.add("b", 30, max_tokens=2)
    story.step()
    stats = story.scheduler.stats()
    assert (stats.running, stats.waiting) == (2, 0)
    assert stats.cache_usage == sum(stats.group_usage.values()) > 0
    story.finish()
    stats = story.scheduler.stats()
    assert (stats.running, stats.waiting, stats.cache_usage) == (0, 0, 0.0)
    assert stats.generated_tokens == 6
    assert stats.steps == len(story.plans)
    assert stats.step_tokens == 50 + 3 + 1
    assert stats.step_seconds == 0.5 * stats.steps
    assert len(stats.step_sizes) == len(STEP_BOUNDS) + 1
    assert stats.step_sizes[STEP_BOUNDS.index(64)] == 1  # the first, of 50 tokens
    assert stats.step_sizes[0] + stats.step_sizes[1] == stats.steps - 1  # those of one token, or of two
    assert stats.finished == {"length": 2}
