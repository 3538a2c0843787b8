"""The scheduler and the cache drive a simulated device on random traces; every read is compared with an oracle.

The device keeps, for each block slot, what a layer would have computed there: a hash of all tokens the value depends
on. It carries out plans late, one step behind, as the engine does. What must be where is worked out here from windows
alone, without the cache's own formula. The mutations at the end show that the comparison sees what it should.
"""

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from itertools import chain
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inkcap.base.config import SchedConfig
from inkcap.base.request import Finish, GenerateRequest, Logprobs, SamplingParams, TokenDelta
from inkcap.base.step import Chunk, Continue, RowResult, RowSetup, StepPlan, StepResult
from inkcap.cache.group import CacheGroup
from inkcap.cache.manager import CacheManager, Holding
from inkcap.cache.plan import Layout, Load, least_blocks, live_blocks
from inkcap.cache.pool import Pool
from inkcap.cache.prefix import Chain
from inkcap.sched.scheduler import Scheduler

GRAIN = 16
VOCABULARY = 40
STOP = 0
# sizes at which being off by one changes which blocks are needed
GROUPS = (
    CacheGroup("full", 16, 16 * 3),
    CacheGroup("window", 8, 8 * 5, 10),
    CacheGroup("sconv", 4, 4 * 2, 4, False),
)


TARGET, DRAFT, GUESS, NEXT = range(4)


def digest(kind: int, tokens: list[int], more: float = 0) -> int:
    """What a value depends on, as a number, the same in every run."""
    return hash((kind, more, *tokens))


def oracle_next(tokens: list[int], seed: int) -> int:
    """The token that follows `tokens`: a function of history and seed, as sampling with keyed noise is."""
    return digest(NEXT, tokens, seed) % VOCABULARY


@dataclass
class Request:
    """One request of a trace, and when it comes."""

    at: int
    tokens: list[int]
    max_tokens: int
    priority: int = 0
    salt: str = ""
    seed: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    prompt_logprobs: bool = False
    abort_at: int | None = None

    def answer(self) -> list[int]:
        """What the engine must say, whatever happens beside it."""
        tokens = list(self.tokens)
        for n in range(1, self.max_tokens + 1):
            tokens.append(oracle_next(tokens, self.seed))
            if tokens[-1] == STOP and n > self.min_tokens and not self.ignore_eos:
                break
        return tokens[len(self.tokens) :]


@dataclass
class Trace:
    """A whole run: limits, pool sizes, requests."""

    requests: list[Request]
    rows: int = 3
    step_tokens: int = 40
    chunk: int = 24
    keep_every: int = 32
    spare: tuple[int, int, int] = (20, 20, 20)  # blocks above what one sequence alone needs
    shared: tuple[int, int] | None = None  # groups share a memory: largest blocks in a slab, slabs above that need
    drafts: int = 0
    lag: int = 0
    lookahead: int = 0
    depth: int = 1
    prefix: bool = True
    luck: int = 0  # seed of the drafter's luck


@dataclass
class Row:
    """One row of the device's table."""

    tokens: list[int]
    prompt_length: int
    request: Request
    tables: dict[str, dict[int, int]]
    floor: int | None = None  # first position this stay computed
    refused: int = 0


@dataclass
class Device:
    """Carries out plans and checks everything they read."""

    trace: Trace
    manager: CacheManager
    by_prompt: dict[str, Request]
    rows: dict[int, Row] = field(default_factory=dict)
    slots: dict[tuple[str, int, int], tuple[int, int]] = field(default_factory=dict)
    bytes: dict[int, tuple[str, int, int]] = field(
        default_factory=dict
    )  # of a shared memory: what they were written as
    reads: int = 0
    accepted: int = 0
    unstored: int = 0

    def __post_init__(self) -> None:
        self.luck = Random(self.trace.luck)

    def final(self, row: Row, position: int) -> int:
        """The value of a draft layer at `position` when all it depends on is known."""
        known = row.tokens[: position + 1 + self.trace.lookahead]
        assert len(known) == position + 1 + self.trace.lookahead, f"position {position} cannot be final yet"
        return digest(DRAFT, known)

    def run(self, plan: StepPlan, free: list[tuple[str, int]]) -> StepResult:
        """Carry out a plan; blocks that were free when it was made lose their content first."""
        for group, block in free:
            for offset in range(GRAIN):
                self.slots.pop((group, block, offset), None)
        for closed in plan.closed:
            del self.rows[closed]
        for setup in plan.opened:
            self.open(setup)
        for group, entries in plan.blocks.items():
            for entry in entries:
                assert entry.block > 0, "block 0 was handed out"
                self.rows[entry.row].tables[group][entry.index] = entry.block
        for move in plan.moves:
            size = next(g.block for g in GROUPS if g.name == move.group)
            for offset in range(size):
                value = self.slots.get((move.group, move.source, offset))
                if value is not None:
                    self.slots[move.group, move.target, offset] = value
        assert len({entry.row for entry in plan.work}) == len(plan.work), "two entries for one row"
        cost = sum(e.stop - e.start if isinstance(e, Chunk) else 1 + e.drafts for e in plan.work)
        assert cost <= self.trace.step_tokens, "the step is over its budget"
        return StepResult(step=plan.step, rows=[self.work(entry) for entry in plan.work])

    def open(self, setup: RowSetup) -> None:
        assert setup.row not in self.rows, f"row {setup.row} is opened twice"
        tables: dict[str, dict[int, int]] = {g.name: {} for g in GROUPS}
        self.rows[setup.row] = Row(
            list(setup.tokens), setup.prompt_length, self.by_prompt[setup.params.bad_words[0]], tables
        )

    def work(self, entry: Chunk | Continue) -> RowResult:
        row = self.rows[entry.row]
        if isinstance(entry, Chunk):
            assert entry.stop <= len(row.tokens), "a chunk of unknown tokens"
            start, run, samples = entry.start, row.tokens[: entry.stop], entry.samples
        else:
            start, samples = len(row.tokens) - 1, True
            run = row.tokens + self.drafted(row, entry.drafts)
        assert len(run) <= row.prompt_length + row.request.max_tokens, "a step runs past the longest answer"
        if row.floor is None:
            row.floor = start
        self.target_layers(row, start, run)
        known = len(row.tokens)
        if samples:
            # sample each position as if there were no drafts; keep drafts while they agree
            while True:
                token = oracle_next(row.tokens, row.request.seed)
                row.tokens.append(token)
                drafted = run[len(row.tokens) - 1 : len(row.tokens)]
                if drafted != [token]:
                    break
                self.accepted += 1
        self.draft_layers(row, start, len(run))
        prompt = None
        if row.request.prompt_logprobs and isinstance(entry, Chunk):
            last = min(entry.stop, row.prompt_length - 1)
            prompt = [Logprobs([row.tokens[p]], [0.0], 1) for p in range(entry.start + 1, last + 1)]
        return RowResult(entry.row, row.tokens[known:] if samples else [], None, prompt)

    def drafted(self, row: Row, count: int) -> list[int]:
        """Guesses, right more often than not."""
        tokens = list(row.tokens)
        for _ in range(count):
            token = oracle_next(tokens, row.request.seed)
            tokens.append(token if self.luck.random() < 0.7 else (token + 1) % VOCABULARY)
        return tokens[len(row.tokens) :]

    def target_layers(self, row: Row, start: int, run: list[int]) -> None:
        """Positions [start, len(run)) of layers that read tokens up to their own position."""
        values = {p: digest(TARGET, run[: p + 1]) for p in range(start, len(run))}
        for group in GROUPS:
            for p, value in values.items():
                self.store(row, group, p, target=value)
            oldest = 0 if group.window is None else max(0, start - group.window + 1)
            newest = len(run) if group.name != "sconv" else start
            for p in range(oldest, newest):
                want = values[p] if p >= start else digest(TARGET, run[: p + 1])
                assert self.load(row, group, p)[0] == want, f"{group.name}: stale state at {p}, step at {start}"

    def draft_layers(self, row: Row, start: int, stop: int) -> None:
        """The same for a drafter's layers, which depend on `lookahead` more tokens and go back over the last `lag`."""
        assert row.floor is not None, "draft layers before target layers"
        first = max(row.floor, start - self.trace.lag)
        known = len(row.tokens)
        values = {
            p: self.final(row, p)
            if p + self.trace.lookahead < known
            else digest(GUESS, row.tokens[: p + 1], self.luck.random())
            for p in range(first, stop)
        }
        for group in GROUPS:
            for p, value in values.items():
                self.store(row, group, p, draft=value)
            oldest = 0 if group.window is None else max(0, first - group.window + 1)
            newest = stop if group.name != "sconv" else first
            for p in range(oldest, newest):
                want = values[p] if p >= first else self.final(row, p)
                assert self.load(row, group, p)[1] == want, f"{group.name}: draft state at {p}, step at {start}"

    def load(self, row: Row, group: CacheGroup, position: int) -> tuple[int, int]:
        self.reads += 1
        block = row.tables[group.name].get(position // group.block)
        assert block is not None, f"{group.name}: position {position} has no block"
        value = self.slots.get((group.name, block, position % group.block))
        assert value is not None, f"{group.name}: position {position} was never written"
        return value

    def store(
        self, row: Row, group: CacheGroup, position: int, target: int | None = None, draft: int | None = None
    ) -> None:
        block = row.tables[group.name].get(position // group.block)
        if block is None:
            self.unstored += 1
            return
        pool = self.manager.pools[GROUPS.index(group)]
        assert block not in pool.keys, f"{group.name}: block {block} is published and written at {position}"
        slot = (group.name, block, position % group.block)
        if self.trace.shared:
            size = group.block_bytes // group.block
            begin = block * group.block_bytes + slot[2] * size
            for byte in range(begin, begin + size):
                if (other := self.bytes.get(byte)) not in (None, slot):
                    self.slots.pop(other, None)
                self.bytes[byte] = slot
        old = self.slots.get(slot, (0, 0))
        self.slots[slot] = (old[0] if target is None else target, old[1] if draft is None else draft)


@dataclass
class Outcome:
    """What a run did, for tests that want it to have done something."""

    scheduler: Scheduler
    device: Device
    steps: int


def audit(manager: CacheManager, holdings: list[Holding]) -> None:
    """Every block is free, idle or held by exactly those who say so; nobody is about to write a shared one."""
    for i, pool in enumerate(manager.pools):
        held = Counter(block for h in holdings for block in h.tables[i].values())
        assert pool.holders == held, "holders are miscounted"
        assert {key: block for block, key in pool.keys.items()} == pool.found, "keys and blocks disagree"
        at_hand: set[int] = set()  # blocks that nobody holds, of slabs of which somebody holds another
        for slab, count in pool._held.items():
            assert pool.slabs.owners[slab] is pool, "a slab has two owners"
            blocks = {*pool.cuts[slab]}
            assert count == len(blocks & {*held}), "held blocks of a slab are miscounted"
            assert (slab in pool.slabs.spare) == (count == 0), "a slab is spare while a block of it is held, or not"
            at_hand |= blocks - {*held} if count else set()
        ours = {block for slab in pool._held for block in pool.cuts[slab]}
        assert 0 not in ours, "block 0 is in use"
        assert {*held, *pool.keys} <= ours, "a block of somebody else is held or found"
        assert {*pool._idle} == at_hand & {*pool.keys}, "idle blocks are those that can be found"
        assert {*pool._free} == at_hand - {*pool.keys}, "a block is lost"


def check_writes(scheduler: Scheduler, plan: StepPlan) -> None:
    """Blocks that the step may write belong to one row and cannot be found by others."""
    manager = scheduler.manager
    _, work, sequences, holdings = scheduler._flights[-1]
    for entry, sequence, holding in zip(work, sequences, holdings, strict=True):
        if holding is None:
            continue
        if isinstance(entry, Chunk):
            low, high = entry.start, entry.stop
        else:
            low, high = sequence.low - 1, sequence.high
        for i, group in enumerate(manager.groups):
            for position in range(max(holding.start, low - manager._lag), high):
                block = holding.tables[i].get(position // group.block)
                if block is not None:
                    assert manager.pools[i].holders[block] == 1, f"{group.name}: shared block {block} is written"
                    assert block not in manager.pools[i].keys, f"{group.name}: published block {block} is written"


def simulate(trace: Trace) -> Outcome:
    """Run a trace to its end, checking all the way."""
    longest = max(len(r.tokens) + r.max_tokens for r in trace.requests)
    config = SchedConfig(rows=trace.rows, step_tokens=trace.step_tokens, chunk=trace.chunk, waiting=10_000)
    load = Load(
        rows=trace.rows,
        step_tokens=trace.step_tokens,
        chunk=trace.chunk,
        keep_every=trace.keep_every,
        drafts=trace.drafts,
        lag=trace.lag,
    )
    alone = [-(-longest // g.block) if g.window is None else least_blocks(g, load) for g in GROUPS]
    if trace.shared is None:
        pools = [Pool.alone(1 + spare + least) for spare, least in zip(trace.spare, alone, strict=True)]
    else:
        wide, spare = trace.shared
        layout = Layout(GROUPS, wide * 48, 1)
        need = sum(layout.slabs_for(g, blocks) for g, blocks in zip(GROUPS, alone, strict=True))
        pools = replace(layout, slabs=need + spare).pools()
    manager = CacheManager(
        GROUPS,
        pools,
        keep_every=trace.keep_every,
        prefix=trace.prefix,
        lag=trace.lag,
        lookahead=trace.lookahead,
        grain=GRAIN,
    )
    manager.require(load)
    scheduler = Scheduler(config, manager, stop_ids=(STOP,), max_length=longest, drafts=trace.drafts)
    requests = {str(i): r for i, r in enumerate(trace.requests)}
    device = Device(trace, manager, requests)
    said: dict[str, list[TokenDelta]] = {name: [] for name in requests}
    flights: deque[tuple[StepPlan, list[tuple[str, int]]]] = deque()
    turn = 0
    while scheduler.unfinished or flights or any(r.at >= turn for r in requests.values()):
        for name, r in requests.items():
            if r.at == turn:
                params = SamplingParams(
                    min_tokens=r.min_tokens,
                    ignore_eos=r.ignore_eos,
                    prompt_logprobs=0 if r.prompt_logprobs else None,
                    bad_words=[name],  # carried to the device untouched: tells it whose row it is
                )
                scheduler.add(
                    GenerateRequest(
                        request_id=name,
                        token_ids=r.tokens,
                        params=params,
                        seed=r.seed,
                        max_tokens=r.max_tokens,
                        priority=r.priority,
                        salt=r.salt,
                    )
                )
            if r.abort_at == turn and (delta := scheduler.abort(name)):
                said[name].append(delta)
        plan = scheduler.plan()
        if plan is not None:
            check_writes(scheduler, plan)
            free = [
                (g.name, block)
                for g, pool in zip(GROUPS, manager.pools, strict=True)
                for block in chain(*pool.cuts)
                if block not in pool.holders and block not in pool.keys
            ]
            flights.append((plan, free))
        assert plan or flights or not scheduler.unfinished, "sequences are open but none can run"
        if flights and (len(flights) > trace.depth or plan is None):
            for delta in scheduler.apply(device.run(*flights.popleft())):
                said[delta.request_id].append(delta)
        audit(manager, [s.holding for s in scheduler._sequences.values() if s.holding is not None])
        turn += 1
        assert turn < 20_000, "the run does not end"
    for name, r in requests.items():
        check_answer(r, said[name])
    for pool in manager.pools:
        assert pool.held == 0, "blocks are held after everything has ended"
    assert sorted(scheduler._free_rows) == list(range(trace.rows)), "a row is lost"
    return Outcome(scheduler, device, turn)


def check_answer(request: Request, deltas: list[TokenDelta]) -> None:
    """The deltas of one request, put together, are what the oracle says."""
    tokens = [t for d in deltas for t in d.tokens]
    answer = request.answer()
    *before, last = deltas
    assert all(d.finish is None for d in before), "a delta came after the end"
    if last.finish is Finish.ABORT:
        assert request.abort_at is not None, "aborted without being asked to"
        assert tokens == answer[: len(tokens)], "wrong tokens before the abort"
        return
    assert tokens == answer, "wrong tokens"
    stopped = bool(answer) and answer[-1] == STOP and not request.ignore_eos and len(answer) > request.min_tokens
    assert last.finish is (Finish.STOP if stopped else Finish.LENGTH)
    assert last.stop_token == (STOP if stopped else None)
    assert all((d.cached_tokens is not None) == (d is deltas[0]) for d in deltas), "cached_tokens belongs to the first"
    if request.prompt_logprobs:
        got = deltas[0].prompt_logprobs
        assert got is not None, "the log-probabilities of the prompt are missing"
        assert [None if x is None else x.token_ids[0] for x in got] == [None, *request.tokens[1:]]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Prompts that share prefixes, little memory, aborts, priorities, drafts."""
    lag = draw(st.sampled_from([0, 0, 1, 3]))
    drafts = draw(st.sampled_from([0, 1, 7])) if lag == 0 else lag + 1
    rng = Random(draw(st.integers(0, 2**32)))
    stems = [[rng.randrange(1, VOCABULARY) for _ in range(draw(st.sampled_from([16, 32, 50, 64])))] for _ in range(2)]
    requests = []
    for _ in range(draw(st.integers(2, 9))):
        stem = rng.choice(stems)
        tokens = stem[: rng.choice([len(stem), len(stem), 16, 33])]
        tokens = tokens + [rng.randrange(1, VOCABULARY) for _ in range(rng.choice([0, 0, 1, 7, 30]))]
        requests.append(
            Request(
                at=rng.randrange(12),
                tokens=tokens,
                max_tokens=rng.choice([0, 1, 2, 9, 30]),
                priority=rng.choice([0, 0, 1]),
                salt=rng.choice(["", "", "tenant"]),
                seed=rng.randrange(3),
                min_tokens=rng.choice([0, 0, 4]),
                ignore_eos=rng.random() < 0.5,
                prompt_logprobs=rng.random() < 0.15,
                abort_at=rng.randrange(40) if rng.random() < 0.2 else None,
            )
        )
    for request in requests:
        if request.abort_at is not None:
            request.abort_at += request.at
    return Trace(
        requests,
        rows=draw(st.integers(1, 4)),
        step_tokens=draw(st.sampled_from([2, 9, 40, 100])),
        chunk=draw(st.sampled_from([1, 5, 24, 64])),
        keep_every=draw(st.sampled_from([16, 32])),
        spare=(draw(st.integers(0, 6)), draw(st.integers(0, 12)), draw(st.integers(0, 20))),
        shared=draw(st.none() | st.tuples(st.integers(2, 4), st.integers(0, 6))),
        drafts=drafts,
        lag=lag,
        lookahead=lag + 1 if lag else draw(st.sampled_from([0, 0, 1])),
        depth=draw(st.sampled_from([0, 1, 1, 2])),
        prefix=draw(st.sampled_from([True, True, True, False])),
        luck=rng.randrange(1000),
    )


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(traces())
def test_every_read_finds_what_the_oracle_says(trace: Trace) -> None:
    simulate(trace)


def crowded(lag: int = 3, drafts: int = 4, *, seed: int = 1) -> Trace:
    """A fixed trace that has everything: hits at kept boundaries, preemption, refusals, long chunks."""
    rng = Random(seed)
    stem = [rng.randrange(1, VOCABULARY) for _ in range(64)]
    requests = [
        Request(
            at=3 * i,
            tokens=stem[: rng.choice([32, 48, 64])] + rng.choices(range(1, VOCABULARY), k=rng.choice([0, 18, 21])),
            max_tokens=rng.choice([20, 40]),
            seed=i % 2,
            ignore_eos=True,
        )
        for i in range(14)
    ]
    return Trace(
        requests, keep_every=16, spare=(1, 8, 12), drafts=drafts, lag=lag, lookahead=lag + 1 if lag else 0, luck=seed
    )


@pytest.mark.parametrize(("lag", "drafts"), [(0, 0), (0, 7), (1, 2), (3, 4)])
def test_the_fixed_trace_does_what_the_random_ones_are_meant_to(lag: int, drafts: int) -> None:
    outcome = simulate(crowded(lag, drafts))
    stats = outcome.scheduler.stats()
    assert stats.prefix_hits > 0
    assert stats.preemptions > 0
    assert outcome.device.unstored > 0  # convolution inputs that no one will read are not kept
    assert (outcome.device.accepted > 0) == (drafts > 0)


def test_a_preempted_row_waits_for_all_its_steps_in_flight() -> None:
    # let in sooner, it would draw a token again that is still on its way
    for seed in range(1, 7):
        outcome = simulate(replace(crowded(0, 0, seed=seed), depth=3))
        assert outcome.scheduler.stats().preemptions > 0


# -- mutations: each is an error somebody could make; the simulation must see it


def fails(lag: int = 3, drafts: int = 4, **limits: int) -> bool:
    """Whether one of a few fixed traces fails."""
    for seed in (1, 2, 3):
        try:
            simulate(replace(crowded(lag, drafts, seed=seed), **limits))
        except (AssertionError, KeyError):
            return True
    return False


SPARSE = {"chunk": 64, "step_tokens": 80, "keep_every": 64}


@pytest.mark.parametrize(
    ("lag", "drafts", "limits"),
    [(0, 0, {}), (0, 7, {}), (3, 4, {}), (0, 0, SPARSE)],
    ids=["0-0", "0-7", "3-4", "sparse"],
)
def test_the_traces_used_below_pass_without_a_mutation(lag: int, drafts: int, limits: dict[str, int]) -> None:
    assert not fails(lag, drafts, **limits)


def test_a_window_that_is_one_short_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_short(self: CacheGroup, position: int) -> int:
        return 0 if self.window is None else max(0, position - self.window + 2)

    monkeypatch.setattr(CacheGroup, "first_needed", one_short)
    assert fails(lag=0, drafts=0)


def test_ignored_refusals_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = CacheManager.reserve

    def all_accepted(self: CacheManager, holding: Holding, start: int, stop: int, earliest_next: int) -> bool:
        return plain(self, holding, start, stop, stop)

    monkeypatch.setattr(CacheManager, "reserve", all_accepted)
    assert fails(lag=0, drafts=7)


def test_an_ignored_lag_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = CacheManager.__init__

    def without_lag(self: CacheManager, *args, **kwargs) -> None:
        plain(self, *args, **{**kwargs, "lag": 0})

    monkeypatch.setattr(CacheManager, "__init__", without_lag)
    assert fails()


def test_an_ignored_lookahead_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = CacheManager.__init__

    def without_lookahead(self: CacheManager, *args, **kwargs) -> None:
        plain(self, *args, **{**kwargs, "lookahead": 0})

    monkeypatch.setattr(CacheManager, "__init__", without_lookahead)
    assert fails()


def test_keys_without_the_ordinal_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Chain.key
    monkeypatch.setattr(Chain, "key", lambda self, group, index: (plain(self, group, index)[0], 0))
    assert fails(lag=0, drafts=0)


def test_keys_without_the_past_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # the same grain after two different beginnings
    tail = [1 + i % 30 for i in range(32)]
    requests = [Request(at=40 * i, tokens=[i + 1] * 16 + tail, max_tokens=2) for i in range(2)]
    simulate(Trace(requests))

    def loose(self: Chain, tokens: list[int]) -> None:
        for i in range(len(self.links), len(tokens) // GRAIN):
            self.links.append(repr(tokens[i * GRAIN : (i + 1) * GRAIN] if i else 0).encode())

    monkeypatch.setattr(Chain, "extend", loose)
    with pytest.raises(AssertionError):
        simulate(Trace(requests))


def test_own_step_reads_that_are_not_stored_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = CacheGroup.step_spans

    def tail_only(self: CacheGroup, start: int, stop: int, earliest_next: int, lag: int, keep_every: int):
        tail = CacheGroup(self.name, self.block, self.block_bytes, self.window, False)
        return plain(tail, start, stop, earliest_next, lag, keep_every)

    monkeypatch.setattr(CacheGroup, "step_spans", tail_only)
    assert fails(lag=0, drafts=0, **SPARSE)


def test_a_shared_block_that_is_not_copied_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request(at=40 * i, tokens=[1 + i for i in range(32)], max_tokens=4) for i in range(2)]
    assert simulate(Trace(requests)).scheduler.stats().prefix_hits == 31
    plain = CacheManager._take_over

    def uncopied(self: CacheManager, tokens: list[int], chain: Chain, start: int) -> Holding | None:
        holding = plain(self, tokens, chain, start)
        if holding is not None:
            for group, (other, move) in zip(self.groups, self._moves, strict=False):
                if other is holding:
                    table = holding.tables[self.groups.index(group)]
                    table[start // group.block] = move.source
            self._moves.clear()
        return holding

    monkeypatch.setattr(CacheManager, "_take_over", uncopied)
    with pytest.raises((AssertionError, KeyError)):
        simulate(Trace(requests))


def test_live_rows_never_wait_for_windowed_blocks() -> None:
    # with the planned number of window and sconv blocks and room enough in full, nobody is ever preempted
    for lag, drafts in [(0, 0), (0, 7), (3, 4)]:
        trace = crowded(lag, drafts)
        load = Load(
            rows=trace.rows,
            step_tokens=trace.step_tokens,
            chunk=trace.chunk,
            keep_every=trace.keep_every,
            drafts=drafts,
            lag=lag,
        )
        spare = [0 if g.window is None else live_blocks(g, load) - least_blocks(g, load) for g in GROUPS]
        trace.spare = (100, spare[1], spare[2])
        assert simulate(trace).scheduler.stats().preemptions == 0
