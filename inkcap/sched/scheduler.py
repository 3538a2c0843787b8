"""Decides what the next step runs, and what a step's results mean. Plain data in, plain data out.

Each running row catches up with its own length; there is no prefill or decode phase. Who gets how much of a step:

1. Rows that continue (one token and its drafts each), oldest first. While a row has history to catch up or one waits
   for a free row, a quarter of the step is left for that. If not all rows fit, those served longest ago go first.
2. Rows with history to catch up, those served longest ago first, at most a chunk each.
3. Waiting sequences, in the queue's order, as long as a row is free and all their known tokens fit the cache. One whose
   tokens are being computed for another right now (as with n > 1) is passed over until it can be given that state.

So neither a long prompt stalls decoding nor decoding a long prompt, and nobody waits for ever. "Oldest" means the
smallest (priority, arrival). If the cache refuses a row, the youngest running one gives up its blocks and waits again.
"""

import time
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable
from itertools import chain
from operator import attrgetter

from inkcap.base.config import CacheConfig, SchedConfig
from inkcap.base.errors import BadRequest, ConfigInvalid, ContextTooLong, QueueFull
from inkcap.base.request import STEP_BOUNDS, EngineStats, Finish, GenerateRequest, TokenDelta
from inkcap.base.step import Chunk, Continue, RowResult, RowSetup, StepPlan, StepResult
from inkcap.cache.group import CacheGroup
from inkcap.cache.manager import CacheManager, Holding
from inkcap.cache.plan import Load
from inkcap.cache.pool import Pool
from inkcap.sched.queue import WaitingQueue
from inkcap.sched.sequence import Sequence, Status

WORTH_WAITING = 256  # tokens that must be on their way for another before a sequence waits for them
HISTORY_SHARE = 4  # one part in this many of a step is kept for history while there is some to catch up
_by_order = attrgetter("order")
_by_served = attrgetter("served")


# step number, and in the order of the plan's work: entry, sequence, the stay it was planned in
Flight = tuple[int, list[Chunk | Continue], list[Sequence], list[Holding | None]]


def build_scheduler(
    cache: CacheConfig,
    sched: SchedConfig,
    groups: Iterable[CacheGroup],
    pools: Iterable[Pool],
    *,
    stop_ids: tuple[int, ...],
    max_length: int,
    drafts: int = 0,
    lag: int = 0,
    lookahead: int = 0,
) -> "Scheduler":
    """A scheduler with its cache. One pool a group; see plan.Layout.pools.

    Raises NotEnoughMemory if one row alone could not run, ConfigInvalid for values that fit no step.
    """
    manager = CacheManager(
        tuple(groups), tuple(pools), keep_every=cache.keep_every, prefix=cache.prefix, lag=lag, lookahead=lookahead
    )
    manager.require(
        Load(
            rows=sched.rows,
            step_tokens=sched.step_tokens,
            chunk=sched.chunk,
            keep_every=cache.keep_every,
            drafts=drafts,
            lag=lag,
            prefix=cache.prefix,
        )
    )
    return Scheduler(sched, manager, stop_ids=stop_ids, max_length=max_length, drafts=drafts)


class Scheduler:
    """Single-threaded. `plan` may be called while earlier plans are in flight; `apply` takes results in order."""

    def __init__(
        self,
        config: SchedConfig,
        manager: CacheManager,
        *,
        stop_ids: tuple[int, ...],
        max_length: int,
        drafts: int = 0,
    ) -> None:
        for name in ("rows", "step_tokens", "chunk", "waiting"):
            if getattr(config, name) < 1:
                raise ConfigInvalid(f"sched.{name} is {getattr(config, name)}; it must be at least 1")
        if config.rows > 1 and config.step_tokens < 2:
            raise ConfigInvalid(f"sched.step_tokens is 1; with sched.rows = {config.rows} it must be at least 2")
        self.config = config
        self.manager = manager
        self._stops = frozenset(stop_ids)
        self._max_length = max_length
        self._drafts = drafts
        self._sequences: dict[str, Sequence] = {}
        self._waiting = WaitingQueue()
        self._filling: list[Sequence] = []  # running, with history to catch up; both lists oldest first
        self._decoding: list[Sequence] = []  # running, all known tokens planned
        self._free_rows = list(range(config.rows - 1, -1, -1))
        self._closed: list[int] = []  # rows to close in the next plan
        self._leaders: dict[bytes, Sequence] = {}  # who computes the tokens of this hash
        self._flights: deque[Flight] = deque()
        self._serial = 0
        self._step = 0
        # of the plan being made
        self._work: list[Chunk | Continue] = []
        self._workers: list[Sequence] = []
        self._pressed = False  # a running row was refused blocks: nobody else is let in
        # counters since start
        self._count: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._seconds = 0.0
        self._step_sizes = [0] * (len(STEP_BOUNDS) + 1)

    # -- requests

    def check(self, request: GenerateRequest) -> None:
        """Raise BadRequest or ContextTooLong if the request could never run here."""
        prompt, total = len(request.token_ids), len(request.token_ids) + request.max_tokens
        if prompt < 1:
            raise BadRequest("the prompt has no tokens; give at least one", param="prompt")
        if total > self._max_length:
            raise ContextTooLong(
                f"prompt has {prompt} tokens and {request.max_tokens} more are asked for, {total} in all; this server "
                f"accepts {self._max_length} (model.max_length). Shorten it by {total - self._max_length} tokens."
            )
        capacity = self.manager.capacity
        # the last token is never run, so it needs no place
        if capacity is not None and max(prompt, total - 1) > capacity:
            raise ContextTooLong(
                f"prompt has {prompt} tokens and {request.max_tokens} more are asked for; the cache holds {capacity} "
                f"tokens of one sequence. Shorten it by {max(prompt, total - 1) - capacity} tokens, or raise "
                f"cache.memory_bytes."
            )

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises what `check` raises, and QueueFull."""
        self.check(request)
        if request.request_id in self._sequences:
            raise BadRequest(f"request id {request.request_id!r} is in use; choose another", param="request_id")
        if len(self._waiting) >= self.config.waiting:
            raise QueueFull(
                f"{len(self._waiting)} sequences wait; the limit is {self.config.waiting} (sched.waiting). Try later."
            )
        own = request.params.stop_token_ids
        stops = frozenset() if request.params.ignore_eos else self._stops
        self._serial += 1
        sequence = Sequence(request, stops.union(own) if own else stops, self.manager.chain(request.salt), self._serial)
        self._sequences[request.request_id] = sequence
        self._waiting.push(sequence)

    def abort(self, request_id: str) -> TokenDelta | None:
        """End a sequence wherever it is. Returns its last delta, or None if there is no such sequence (any more)."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        self._end(sequence, Finish.ABORT)
        return TokenDelta(request_id, [], finish=Finish.ABORT)

    def abort_all(self) -> list[TokenDelta]:
        """End every sequence."""
        return [delta for name in list(self._sequences) if (delta := self.abort(name)) is not None]

    @property
    def unfinished(self) -> int:
        """Sequences that wait or run."""
        return len(self._sequences)

    def stats(self) -> EngineStats:
        """Counters since start and gauges of now."""
        usage = self.manager.usage
        count = self._count
        return EngineStats(
            running=len(self._filling) + len(self._decoding),
            waiting=len(self._waiting),
            cache_usage=sum(usage.values()),
            group_usage=usage,
            prompt_tokens=count["prompt_tokens"],
            cached_prompt_tokens=count["cached_prompt_tokens"],
            generated_tokens=count["generated_tokens"],
            preemptions=count["preemptions"],
            prefix_queries=count["prefix_queries"],
            prefix_hits=count["prefix_hits"],
            steps=count["steps"],
            step_tokens=count["step_tokens"],
            step_sizes=self._step_sizes.copy(),
            step_seconds=self._seconds,
            finished=dict(self._finished),
        )

    # -- plan

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to run (before the steps in flight have their results)."""
        step = self._step + 1
        self._pressed = False
        opened: list[RowSetup] = []
        budget = self.config.step_tokens
        left = budget
        if self._decoding:
            history = self._filling or (len(self._waiting) and self._free_rows)
            kept = max(1, budget // HISTORY_SHARE) if history else 0
            left = self._plan_decoding(budget - kept, step) + kept
        if self._filling and left:
            left = self._plan_filling(left, step)
        if left and self._free_rows and len(self._waiting) and not self._pressed:
            left = self._admit(left, step, opened)
        if not self._work:
            return None
        self._step = step
        size = sum(map(_tokens, self._work)) if self._pressed else budget - left
        self._count["step_tokens"] += size
        self._step_sizes[bisect_left(STEP_BOUNDS, size)] += 1
        blocks, moves = self.manager.drain()
        closed, self._closed = self._closed, []
        work, workers = self._work, self._workers
        self._work, self._workers = [], []
        self._flights.append((step, work, workers, [seq.holding for seq in workers]))
        return StepPlan(step=step, closed=closed, opened=opened, blocks=blocks, moves=moves, work=work)

    def _plan_decoding(self, budget: int, step: int) -> int:
        """Give each row its newest token and drafts; returns what is left of the budget."""
        rows = self._decoding.copy()
        width = self._drafts
        short = len(rows) * (1 + width) > budget
        if short:
            rows.sort(key=_by_served)
        work, workers = self._work, self._workers
        for seq in rows:
            if budget <= 0:
                break
            holding = seq.holding
            if seq.high >= seq.limit - 1 or holding is None:  # all it may draw is in flight; preempted just now
                continue
            drafts = 0
            if width:
                drafts = min(width, budget - 1, seq.limit - 2 - seq.high)
                if seq.again.drafts != drafts:
                    seq.again = Continue(seq.row, drafts)
            low = seq.low
            stop = seq.high + 1 + drafts
            if stop > holding.room and not self._reserve(seq, holding, low, stop, low + 1):
                continue
            seq.low = low + 1
            seq.high = stop
            seq.in_flight += 1
            budget -= 1 + drafts
            work.append(seq.again)
            workers.append(seq)
            if short:
                seq.served = step
        return max(0, budget)

    def _plan_filling(self, budget: int, step: int) -> int:
        """Give rows a chunk of their history; returns what is left of the budget."""
        for seq in sorted(self._filling, key=_by_served):
            if budget <= 0:
                break
            if seq.holding is None:
                continue
            stop = min(len(seq.tokens), seq.high + min(budget, self.config.chunk))
            if self._reserve(seq, seq.holding, seq.high, stop, stop):
                budget -= stop - seq.high
                self._work_chunk(seq, stop, step)
        return budget

    def _work_chunk(self, seq: Sequence, stop: int, step: int) -> None:
        """Plan [high, stop) of a row; at the end of what is known a token is drawn, if any may be."""
        last = stop == len(seq.tokens)
        samples = last and stop < seq.limit
        self._work.append(Chunk(seq.row, seq.high, stop, samples))
        self._workers.append(seq)
        seq.low = seq.high = stop
        seq.in_flight += 1
        seq.served = step
        if last:
            self._filling.remove(seq)
            insort(self._decoding, seq, key=_by_order)

    def _admit(self, budget: int, step: int, opened: list[RowSetup]) -> int:
        """Let waiting sequences in, in order, as long as they fit; returns what is left of the budget."""
        passed: list[Sequence] = []
        while budget > 0 and self._free_rows and len(self._waiting):
            seq = self._waiting.first()
            if seq.in_flight:  # preempted a moment ago: its last tokens are still to come
                break
            tokens = seq.tokens
            wants_all = seq.prompt_logprobs is not None
            if not wants_all and self._follows(seq):
                self._waiting.remove(seq)
                passed.append(seq)
                continue
            holding = self.manager.match(tokens, seq.chain, seq.prompt_length, reuse=not wants_all)
            start = holding.start
            stop = min(len(tokens), start + min(budget, self.config.chunk))
            others: Iterable[Holding] = (s.holding for s in self._filling if s.holding is not None)
            if not (self.manager.admissible(holding, others) and self.manager.reserve(holding, start, stop, stop)):
                self.manager.release(holding)
                if self._filling or self._decoding or self.manager.packed:
                    break
                self.manager.clear()
                continue
            self._waiting.remove(seq)
            row = self._free_rows.pop()
            seq.start(row, holding)
            request = seq.request
            opened.append(
                RowSetup(
                    row=row,
                    tokens=tokens.copy(),
                    prompt_length=seq.prompt_length,
                    params=request.params,
                    seed=request.seed,
                    bad_words_ids=request.bad_words_ids,
                    rules=request.rules,
                )
            )
            if seq.served == 0:
                seq.cached_tokens = start
                seq.queue_seconds = max(0.0, time.time() - request.arrival) if request.arrival else None
                if not wants_all:
                    self._count["prefix_queries"] += seq.prompt_length
                    self._count["prefix_hits"] += start
                self._count["prompt_tokens"] += seq.prompt_length
                self._count["cached_prompt_tokens"] += start
            if seq.chain is not None and len(tokens) - start >= WORTH_WAITING:
                self._leaders[seq.chain.links[-1]] = seq
            insort(self._filling, seq, key=_by_order)
            self._work_chunk(seq, stop, step)
            budget -= stop - start
        for seq in passed:
            self._waiting.push(seq, front=seq.served > 0)
        return budget

    def _follows(self, seq: Sequence) -> bool:
        """Whether another sequence computes just now what this one begins with, up to its last whole grain."""
        if seq.chain is None:
            return False
        seq.chain.extend(seq.tokens)
        leader = self._leaders.get(seq.chain.links[-1]) if seq.chain.links else None
        return leader is not None and leader.holding is not None and leader.holding.computed < leader.prompt_length

    def _reserve(self, seq: Sequence, holding: Holding, start: int, stop: int, earliest_next: int) -> bool:
        """Blocks for one row's part of the step, taken from the youngest rows if need be.

        A row with a step in flight takes from nobody: that step's result may free what it needs, and if not, it has
        none in flight next time.
        """
        reserve = self.manager.reserve
        while not reserve(holding, start, stop, earliest_next):
            self._pressed = True
            if seq.in_flight:
                return False
            victim = max(chain(self._filling[-1:], self._decoding[-1:]), key=_by_order)
            self._preempt(victim)
            if victim is seq:
                if not (self._filling or self._decoding):
                    self.manager.clear()
                    self._pressed = False  # it comes back in this very plan
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Take a row's blocks; what it had in this plan is withdrawn, what is in flight still counts."""
        if seq in self._workers:
            i = self._workers.index(seq)
            del self._workers[i], self._work[i]
            seq.in_flight -= 1
        self._vacate(seq)
        seq.preempt()
        self._waiting.push(seq, front=True)
        self._count["preemptions"] += 1

    def _vacate(self, seq: Sequence, *, ended: bool = False) -> None:
        """Give back row and blocks of a running sequence, which has `ended` or will go on later."""
        (self._decoding if seq in self._decoding else self._filling).remove(seq)
        assert seq.holding is not None, f"{seq.name} runs without blocks"
        self._leaders = {link: leader for link, leader in self._leaders.items() if leader is not seq}
        self.manager.release(seq.holding, ended=ended)
        self._closed.append(seq.row)
        self._free_rows.append(seq.row)

    def _end(self, seq: Sequence, finish: Finish) -> None:
        """Finish a sequence that waits or runs."""
        if seq.status is Status.RUNNING:
            self._vacate(seq, ended=True)
        else:
            self._waiting.remove(seq)
        seq.end(finish)
        del self._sequences[seq.name]
        self._finished[finish.value] += 1

    # -- apply

    def apply(self, result: StepResult) -> list[TokenDelta]:
        """Take the result of the oldest plan in flight; returns what each sequence gained, in the plan's order."""
        step, work, workers, stays = self._flights.popleft()
        assert step == result.step, f"result of step {result.step} came, step {step} was next"
        deltas: list[TokenDelta] = []
        generated = 0
        for entry, seq, stay, row in zip(work, workers, stays, result.rows, strict=True):
            seq.in_flight -= 1
            stays_on = seq.holding is stay
            # ended meanwhile: a wasted step. Preempted meanwhile: what it drew counts, unless log-probabilities of the
            # prompt are to be collected again first
            if not stays_on and (seq.status is Status.FINISHED or seq.prompt_logprobs is not None):
                continue
            tokens = seq.tokens
            before = len(tokens)
            finish = None
            for token in row.tokens:
                tokens.append(token)
                if token in seq.stops and len(tokens) - seq.prompt_length > seq.request.params.min_tokens:
                    finish = Finish.STOP
                    break
                if len(tokens) == seq.limit:
                    finish = Finish.LENGTH
                    break
            gained = len(tokens) - before
            generated += gained
            if stays_on and stay is not None:
                if isinstance(entry, Chunk):
                    computed = entry.stop
                    if row.prompt_logprobs is not None and seq.prompt_logprobs is not None:
                        missing = seq.prompt_length - len(seq.prompt_logprobs)
                        seq.prompt_logprobs += row.prompt_logprobs[:missing]
                    if computed == before == seq.limit:  # nothing was to be drawn
                        finish = Finish.LENGTH
                else:
                    computed = stay.computed + gained
                    if entry.drafts:
                        seq.low += gained - 1
                        seq.high -= entry.drafts + 1 - gained
                if computed < stay.turn:
                    stay.computed = computed
                else:
                    self.manager.advance(stay, computed)
            if row.error is not None:
                finish = Finish.ERROR
            if finish is not None:
                deltas.append(self._full_delta(seq, row, gained, finish))
                self._end(seq, finish)
            elif gained:
                plain = row.logprobs is None and seq.cached_tokens is None and not seq.preemptions
                deltas.append(TokenDelta(seq.name, row.tokens) if plain else self._full_delta(seq, row, gained, None))
        self._count["generated_tokens"] += generated
        self._count["steps"] += 1
        self._seconds += result.seconds
        return deltas

    @staticmethod
    def _full_delta(seq: Sequence, row: RowResult, gained: int, finish: Finish | None) -> TokenDelta:
        """A delta with everything that most deltas lack; what is told once is told now."""
        delta = TokenDelta(
            seq.name,
            row.tokens[:gained],
            logprobs=None if row.logprobs is None else row.logprobs[:gained],
            finish=finish,
            stop_token=seq.tokens[-1] if finish is Finish.STOP else None,
            cached_tokens=seq.cached_tokens,
            prompt_logprobs=seq.prompt_logprobs,
            error=row.error,
            queue_seconds=seq.queue_seconds,
            preemptions=seq.preemptions,
        )
        seq.cached_tokens = seq.queue_seconds = None
        seq.preemptions = 0
        seq.prompt_logprobs = None
        return delta


def _tokens(entry: Chunk | Continue) -> int:
    return entry.stop - entry.start if isinstance(entry, Chunk) else 1 + entry.drafts
