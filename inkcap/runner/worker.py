"""One rank: model, arena and row table; carries out one StepPlan after another. It never decides anything."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inkcap.base.config import EngineConfig
from inkcap.base.errors import EngineFault
from inkcap.base.log import logger
from inkcap.base.matching import Compiler
from inkcap.base.request import EngineInfo, Logprobs
from inkcap.base.sampling import TokenRules, token_rules
from inkcap.base.step import BlockEntry, Chunk, RowResult, StepPlan, StepResult
from inkcap.cache.arena import Arena
from inkcap.models.base import Model
from inkcap.ops.ahead import compiled_ahead
from inkcap.ops.dispatch import bind
from inkcap.parallel.comm import Comm
from inkcap.runner.build import Step, build, laid_out
from inkcap.runner.graphs import DeviceRecorder, Graphs
from inkcap.runner.guides import Guides
from inkcap.runner.memory import budget, measure_step, plan_for
from inkcap.runner.mixed import MixedGraphs
from inkcap.runner.table import RowTable
from inkcap.runner.transfer import Download, Posted
from inkcap.runner.trial import batch_of, spans_of_kinds, try_draws
from inkcap.sampling.logprobs import logprobs
from inkcap.sampling.sampler import Sampled, Sampler

LOGITS_BYTES = 64 << 20  # of prompt log-probabilities at a time: a chunk's logits at once would be gigabytes


class Clock:
    """When the last step was finished, by time.perf_counter()."""

    finished = 0.0


@dataclass(frozen=True)
class Launched:
    """A step that has begun, and how its results come back."""

    plan: StepPlan
    began: float  # time.perf_counter()
    clock: Clock  # of the worker
    sampling: list[int]  # entries of the plan's work that drew a token
    sampled: Sampled | None  # None: nothing was drawn
    back: Download | Posted  # of `sampled.numbers`
    prompts: dict[int, list[Logprobs]]  # by entry of the work
    failed: dict[int, str]  # rows that cannot go on, and why

    def finish(self) -> StepResult:
        """Wait for the step; from any thread. Raises EngineFault, naming the step, when something in it failed."""
        plan = self.plan
        drawn: list[list[int]] = [[] for _ in plan.work]
        found: list[list[Logprobs] | None] = [None] * len(plan.work)
        with fault_of(plan):
            numbers = self.back.wait()
            if self.sampled is not None:
                tokens, chances = self.sampled.collect(numbers)
                for place, token, entry in zip(self.sampling, tokens, chances, strict=True):
                    drawn[place] = [token]
                    if entry is not None:
                        found[place] = [entry]
        rows = [
            RowResult(work.row, drawn[place], found[place], self.prompts.get(place))
            if work.row not in self.failed
            else RowResult(work.row, [], error=self.failed[work.row])
            for place, work in enumerate(plan.work)
        ]
        begin, self.clock.finished = max(self.began, self.clock.finished), time.perf_counter()  # steps overlap
        return StepResult(step=plan.step, rows=rows, seconds=self.clock.finished - begin)


@contextmanager
def fault_of(plan: StepPlan) -> Iterator[None]:
    """Whatever fails inside becomes an EngineFault that names the step."""
    try:
        yield
    except Exception as error:
        raise EngineFault(f"step {plan.step} failed: {type(error).__name__}: {error}") from error


class Worker:
    """A rank that is ready to run. Every rank of a group runs the same plans and gets the same results."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        comm: Comm,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        rules: TokenRules | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        """Take a built model and make room for its state on `device` (None: the CPU).

        `dtype` is reported only. `rules` defaults to those of the model's vocabulary; `compiler` knows its
        tokens' bytes, and without it no row may be held to turn rules. All ranks of `comm` construct at the same time.
        Raises NotEnoughMemory when the cache does not fit.
        """
        self.device = device or torch.device("cpu")
        bind(self.device, config.ops, deterministic=config.model.deterministic)
        self.config, self.model = config, model
        self.dtype = str(dtype).removeprefix("torch.")
        self.rules = token_rules(model.vocab_size) if rules is None else rules
        gpu = self.device.type == "cuda"
        if gpu:
            torch.cuda.set_device(self.device)
            logger.info("preparing steps; kernels that Triton's cache lacks are compiled, which takes a minute once")
        step_bytes = measure_step(config, model, self.device) if gpu else 0
        # groups, blocks and limits
        self.memory = plan_for(config, model, budget(config, comm, self.device, step_bytes))
        self.groups = list(self.memory.groups)
        self.max_length = self.memory.longest  # tokens
        self.arena = Arena(model.states, self.memory.size_bytes, self.device)
        sizes = {group.name: group.block for group in self.groups}
        # what graphs have captured must not move, so on a GPU rows have their full length at once
        room = {"capacity": self.max_length + 1, "spare": 1} if gpu else {}
        self.table = RowTable(config.sched.rows, sizes, model.vocab_size, self.rules, self.device, **room)
        self.sampler = Sampler(self.rules.banned, self.device)
        self.clock = Clock()
        self.guides = Guides(compiler, self.device)
        self.graphs: Graphs | None = None
        self.mixed: MixedGraphs | None = None
        if gpu:
            self._prepare()

    @property
    def info(self) -> EngineInfo:
        """What clients are told; the same on every rank."""
        return EngineInfo(
            max_length=self.max_length,
            vocab_size=self.model.vocab_size,
            rows=self.table.rows,
            step_tokens=self.config.sched.step_tokens,
            dtype=self.dtype,
            cache_dtype=self.dtype if self.config.cache.dtype == "auto" else self.config.cache.dtype,
            device=str(self.device),
            family=self.model.family,
            cache_groups=self.memory.blocks,
        )

    def run(self, plan: StepPlan) -> StepResult:
        """Carry out one step and wait for it. Raises EngineFault as `launch` and `finish` do."""
        return self.launch(plan).finish()

    def launch(self, plan: StepPlan) -> "Launched":
        """Begin one step, behind those begun before. A GPU may still work on it on return; a CPU is done.

        Raises EngineFault, naming the step, when that fails; the rank is then done.
        """
        began = time.perf_counter()
        with fault_of(plan):
            return self._launch(plan, began)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, began: float) -> "Launched":
        table = self.table
        table.close(plan.closed)
        table.open(plan.opened)
        self.guides.close(plan.closed)
        self.guides.open(plan.opened)
        table.place(plan.blocks)
        self.arena.copy(plan.moves)
        if not plan.work:
            return Launched(plan, began, self.clock, [], None, Download([]), {}, {})
        if self.graphs is not None and self.graphs.fit(plan):
            sampled, posted = self.graphs.run(plan)
            self.guides.drawn([work.row for work in plan.work], sampled.tokens)
            every, back = [*range(len(plan.work))], posted or Download(sampled.numbers)
            return Launched(plan, began, self.clock, every, sampled, back, {}, {**self.guides.failed})
        if self.mixed is not None and (key := self.mixed.fit(plan)) is not None:
            sampling, sampled, posted = self.mixed.run(plan, key)
            if sampled is not None:
                self.guides.drawn([plan.work[place].row for place in sampling], sampled.tokens)
            back = posted or Download(sampled.numbers if sampled is not None else [])
            return Launched(plan, began, self.clock, sampling, sampled, back, {}, {**self.guides.failed})
        step = build(plan, table, self.arena.planes)
        hidden = self.model.forward(step.batch)  # [T, D]
        prompts = self._prompt_logprobs(plan, step, hidden)
        sampled = self._sample(plan, step, hidden) if step.sampling else None
        back = Download(sampled.numbers if sampled is not None else [])
        return Launched(plan, began, self.clock, step.sampling, sampled, back, prompts, {**self.guides.failed})

    def _prepare(self) -> None:
        """Compile what steps need and capture small ones; not, which is logged, where an op has no kernel."""
        began = time.perf_counter()
        graphs = Graphs(self.model, self.table, self.arena.planes, self.sampler, self.guides, self.max_length)
        mixed = MixedGraphs(graphs)
        wanted = self.config.model
        kinds = [each for each, on in ((graphs, wanted.graphs), (mixed, wanted.graphs and wanted.mixed_graphs)) if on]
        with compiled_ahead(self.device):
            if kinds and (missing := graphs.host_bound()):
                logger.warning("steps are not captured: no kernel here for %s", ", ".join(missing))
                kinds = []
            self._try_kinds()
        torch.cuda.synchronize(self.device)
        tried = time.perf_counter()
        with compiled_ahead(self.device, launch=True) as missed:
            recorder = DeviceRecorder(self.device, missed)
            for each in kinds:
                each.capture(recorder)
        for each in kinds:  # what called kernels that are only ready now
            each.capture(recorder)
        self.graphs, self.mixed = graphs if len(graphs) else None, mixed if len(mixed) else None
        logger.info(
            "%d graphs of steps of up to %d rows, %d with up to %d tokens of prompts too: %.1f s, %d of them twice, "
            "%.0f MiB; larger steps %.1f s",
            *(len(graphs), graphs.sizes[-1], len(mixed), max(mixed.tokens, default=0)),
            *(time.perf_counter() - tried, len(recorder.lacking), recorder.taken_bytes / 2**20, tried - began),
        )

    @torch.inference_mode()
    def _try_kinds(self) -> None:
        """Run a step of each kind that is not captured."""
        sched = self.config.sched
        for spans in spans_of_kinds(sched.rows, sched.step_tokens, self.max_length):
            batch = batch_of(self.model, spans, len(spans), self.device, self.table.tables, self.arena.planes)
            self.model.head(self.model.forward(batch)[batch.sampled])
            laid_out(spans, self.table)
        self.table.place(
            {group: [BlockEntry(self.table.rows, 0, 0)] for group in self.table.groups}
        )  # of the spare row
        try_draws(self.model.vocab_size, self.device)

    def _sample(self, plan: StepPlan, step: Step, hidden: Tensor) -> Sampled:
        """Draw for the entries of the work that sample, and add what was drawn to their rows."""
        rows = [plan.work[place].row for place in step.sampling]
        logits = self.model.head(hidden[step.batch.sampled])  # [S, V]
        draws = replace(self.table.draws(rows), masks=self.guides.masks(rows))
        sampled = self.sampler.draw(logits, draws)
        self.table.append(rows, sampled.tokens)
        self.guides.drawn(rows, sampled.tokens)
        return sampled

    def _prompt_logprobs(self, plan: StepPlan, step: Step, hidden: Tensor) -> dict[int, list[Logprobs]]:
        """By entry of the work: log-probabilities of the prompt tokens that its chunk predicts."""
        found: dict[int, list[Logprobs]] = {}
        slice_tokens = max(1, LOGITS_BYTES // (4 * self.model.vocab_size))
        for place, work in enumerate(plan.work):
            setup = self.table.setup(work.row)
            count = setup.params.prompt_logprobs
            if count is None or not isinstance(work, Chunk):
                continue
            last = min(work.stop, setup.prompt_length - 1)  # the last prompt token predicts no prompt token
            entries: list[Logprobs] = []
            for start in range(work.start, last, slice_tokens):
                stop = min(start + slice_tokens, last)
                offset = step.batch.packing.spans[place][0] - work.start
                logits = self.model.head(hidden[start + offset : stop + offset])
                targets = self.table.tokens[work.row, start + 1 : stop + 1].long()
                entries += logprobs(logits, targets, [count] * (stop - start))
            found[place] = entries
        return found
