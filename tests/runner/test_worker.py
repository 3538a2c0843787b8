"""A rank end to end, with a toy model that reads its state through the batch and an oracle that reads the tokens."""

from random import Random
from typing import ClassVar

import pytest
import torch

from inkcap.base.config import CacheConfig, EngineConfig, ModelConfig, SchedConfig
from inkcap.base.errors import EngineFault, NotEnoughMemory
from inkcap.base.request import SamplingParams
from inkcap.base.sampling import TokenRules
from inkcap.base.step import BlockEntry, BlockMove, Chunk, Continue, RowSetup, StepPlan
from inkcap.cache.state import LayerState, Plane
from inkcap.ops.sample.ref import Limits, sample
from inkcap.parallel.comm import Comm
from inkcap.runner.worker import Worker

VOCABULARY = 61
STOP = 7
BANNED = (0, 1)
# whole numbers, as the hidden states are: products of them are exact, whatever order a library sums in
MIX = torch.randint(-8, 9, (6, VOCABULARY), generator=torch.Generator().manual_seed(0)).float()


def trace(token: float, position: float) -> float:
    """What one token leaves behind; a small integer, exact in bfloat16."""
    return (token * 31 + position * 7) % 127


class Toy:
    """Hidden states are sums over what each kind of state can see: two visits, one plane of each dtype."""

    family = "toy"
    vocab_size = VOCABULARY
    max_length = 500
    states: ClassVar = [
        LayerState("full", 0, (Plane("a", (), "float32"), Plane("b", (3,), "bfloat16")), None, 8, True),
        LayerState("window", 1, (Plane("a", (2,), "float32"),), 6, 4, True),
        LayerState("sconv", 1, (Plane("a", (5,), "bfloat16"),), 4, 4, False),
    ]

    def forward(self, batch):
        parts = []
        for state in self.states:
            view = batch.at(state.visit).view(state.group)
            own = trace(batch.ids, batch.packing.positions).float()
            for number, plane in enumerate(view.planes):
                keep = view.slots >= 0
                plane[view.slots[keep] // view.block, view.slots[keep] % view.block] = (
                    (own[keep] + number).reshape(-1, *[1] * (plane.dim() - 2)).to(plane.dtype)
                )
                parts.append([])
                for start, stop, row, first in batch.packing.spans:
                    for index in range(start, stop):
                        position = first + index - start
                        total = 0.0
                        for p in range(
                            0 if state.window is None else max(0, position - state.window + 1), position + 1
                        ):
                            if p >= first and not state.reads_own_step:
                                value = own[start + p - first] + number
                            else:
                                block = view.table[row, p // view.block]
                                assert block > 0, f"{state.group} of row {row} lacks position {p}"
                                value = plane[block, p % view.block].flatten()[-1].float()
                            total += float(value) * (p + 1)
                        parts[-1].append(total)
        return torch.tensor(parts).T  # [T, 4]

    def head(self, hidden):
        return torch.sin((torch.nn.functional.pad(hidden, (0, 2), value=1.0) @ MIX).double() * 0.37).float() * 3


def plain_logits(tokens: list[int]) -> torch.Tensor:
    """The toy's logits [V] after `tokens`."""
    position = len(tokens) - 1
    parts = []
    for state in Toy.states:
        for number in range(len(state.planes)):
            first = 0 if state.window is None else max(0, position - state.window + 1)
            parts.append(sum((trace(tokens[p], p) + number) * (p + 1) for p in range(first, position + 1)))
    return Toy().head(torch.tensor([parts], dtype=torch.float32))[0]


def expected(tokens: list[int], params: SamplingParams, seed: int, count: int) -> list[int]:
    """What a request without masks and penalties draws."""
    tokens, made = list(tokens), []
    for _ in range(count):
        heat, *limits = (torch.tensor([v]) for v in (params.temperature, params.top_k, params.top_p, params.min_p))
        logits = plain_logits(tokens)
        logits[[*BANNED]] = -torch.inf
        drawn = sample.reference(logits[None], heat, Limits(*limits), torch.tensor([seed]), torch.tensor([len(tokens)]))
        made.append(int(drawn))
        tokens.append(made[-1])
    return made


def worker(**sched) -> Worker:
    config = EngineConfig(
        model=ModelConfig(path="toy"),
        cache=CacheConfig(memory_bytes=1 << 20, keep_every=64),
        sched=SchedConfig(**{"rows": 6, "step_tokens": 64, "chunk": 64} | sched),
    )
    made = Worker(config, Toy(), Comm.alone(), rules=TokenRules(stop=(STOP,), banned=BANNED))
    for storage in made.arena.storage.values():
        storage.fill_(0xFF)  # NaN in every dtype: what was not written must not matter
    return made


class Driver:
    """A scheduler that only hands out blocks: as few as the groups ask for, in shuffled order, never twice."""

    def __init__(self, seed: int) -> None:
        self.worker, self.random = worker(), Random(seed)
        layout = self.worker.memory.layout
        self.free: dict[str, list[int]] = {group.name: [] for group in layout.groups}
        cuts = [layout.cuts(group) for group in layout.groups]
        for slab in range(layout.slabs):  # each is one group's, in turn
            i = slab % len(cuts)
            self.free[layout.groups[i].name] += cuts[i][slab]
        for blocks in self.free.values():
            self.random.shuffle(blocks)
        self.tables: dict[int, dict[str, set[int]]] = {}
        self.lengths: dict[int, int] = {}
        self.made: dict[int, list[int]] = {}
        self.steps = 0
        self.opened: list[RowSetup] = []
        self.closed: list[int] = []

    def open(self, setup: RowSetup) -> None:
        self.opened.append(setup)
        self.tables[setup.row] = {group.name: set() for group in self.worker.groups}
        self.lengths[setup.row] = len(setup.tokens)
        self.made[setup.row] = []

    def close(self, row: int) -> None:
        self.closed.append(row)
        del self.tables[row]

    def step(self, *work: Chunk | Continue):
        blocks: dict[str, list[BlockEntry]] = {}
        for entry in work:
            start, stop = (
                (entry.start, entry.stop)
                if isinstance(entry, Chunk)
                else (self.lengths[entry.row] - 1, self.lengths[entry.row])
            )
            for group in self.worker.groups:
                have = self.tables[entry.row][group.name]
                for index in group.blocks(group.step_spans(start, stop, stop, 0, 64)):
                    if index not in have:
                        have.add(index)
                        blocks.setdefault(group.name, []).append(
                            BlockEntry(entry.row, index, self.free[group.name].pop())
                        )
        self.steps += 1
        plan = StepPlan(step=self.steps, closed=self.closed, opened=self.opened, blocks=blocks, work=list(work))
        self.closed, self.opened = [], []
        result = self.worker.run(plan)
        assert [row.row for row in result.rows] == [entry.row for entry in work]
        for row in result.rows:
            self.made[row.row] += row.tokens
            self.lengths[row.row] += len(row.tokens)
        return result

    def chunks(self, row: int, sizes: list[int]) -> list[Chunk]:
        """The row's known tokens, in chunks of these sizes and the rest in a last one that samples."""
        edges, known = [0], self.lengths[row]
        for size in sizes:
            if edges[-1] + size < known:
                edges.append(edges[-1] + size)
        return [Chunk(row, a, b, b == known) for a, b in zip(edges, [*edges[1:], known], strict=True)]


def prompt(length: int, seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(2, VOCABULARY) for _ in range(length)]


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_k=20),
    SamplingParams(temperature=1.0, top_p=0.8),
]


def test_rows_draw_what_the_oracle_draws_however_their_prompts_are_cut():
    for seed, sizes in ((1, []), (2, [1] * 40), (3, [7] * 10), (4, [3, 11, 2])):
        driver = Driver(seed)
        lengths = [1, 5, 23, 40]
        for row, length in enumerate(lengths):
            driver.open(
                RowSetup(row=row + 1, tokens=prompt(length, row), prompt_length=length, params=PARAMS[row], seed=row)
            )
        waiting = {row: driver.chunks(row, sizes) for row in driver.lengths}
        while any(len(made) < 12 for made in driver.made.values()):
            # prompts and decoding rows in one step, in changing order
            work = [waiting[row].pop(0) if waiting[row] else Continue(row) for row in waiting]
            driver.random.shuffle(work)
            driver.step(*work)
        for row, length in enumerate(lengths):
            assert driver.made[row + 1][:12] == expected(prompt(length, row), PARAMS[row], row, 12), (seed, row)


def test_a_resumed_row_goes_on_as_if_nothing_had_happened():
    driver, tokens = Driver(5), prompt(19, 9)
    driver.open(RowSetup(row=0, tokens=tokens, prompt_length=19, params=PARAMS[1], seed=4))
    driver.step(*driver.chunks(0, []))
    for _ in range(5):
        driver.step(Continue(0))
    known = tokens + driver.made[0]
    driver.close(0)
    driver.open(RowSetup(row=3, tokens=known, prompt_length=19, params=PARAMS[1], seed=4))
    for chunk in driver.chunks(3, [10, 4]):
        driver.step(chunk)
    for _ in range(4):
        driver.step(Continue(3))
    assert known[19:] + driver.made[3] == expected(tokens, PARAMS[1], 4, 11)


def test_a_row_of_the_table_is_clean_for_its_next_sequence():
    driver = Driver(6)
    strict = SamplingParams(
        presence_penalty=2.0, logit_bias={3: 100.0}, allowed_token_ids=[3, 4], min_tokens=50, logprobs=2
    )
    driver.open(RowSetup(row=0, tokens=prompt(30, 1), prompt_length=30, params=strict, seed=4, bad_words_ids=[[4]]))
    driver.step(*driver.chunks(0, []))
    driver.step(Continue(0))
    assert driver.made[0] == [3, 3]
    driver.close(0)
    driver.open(RowSetup(row=0, tokens=prompt(9, 2), prompt_length=9, params=PARAMS[1], seed=8))
    for chunk in driver.chunks(0, [4]):
        driver.step(chunk)
    driver.step(Continue(0))
    assert driver.made[0] == expected(prompt(9, 2), PARAMS[1], 8, 2)


def test_copied_blocks_serve_like_their_source():
    driver, tokens = Driver(7), prompt(8, 3)
    driver.open(RowSetup(row=0, tokens=tokens, prompt_length=8, params=PARAMS[1], seed=2))
    driver.step(*driver.chunks(0, []))
    known = tokens + driver.made[0]
    rank = driver.worker
    moves, blocks = [], {}
    for group in rank.groups:
        for index in sorted(driver.tables[0][group.name]):
            target = driver.free[group.name].pop()
            moves.append(BlockMove(group.name, int(rank.table.tables[group.name][0, index]), target))
            blocks.setdefault(group.name, []).append(BlockEntry(1, index, target))
    for name, size in (("full", 8), ("window", 4), ("sconv", 4)):
        blocks[name].append(BlockEntry(1, 8 // size, driver.free[name].pop()))
    plan = StepPlan(
        step=9,
        opened=[RowSetup(row=1, tokens=known, prompt_length=8, params=PARAMS[1], seed=2)],
        blocks=blocks,
        moves=moves,
        work=[Chunk(1, 8, 9, True)],
    )
    assert rank.run(plan).rows[0].tokens == expected(known, PARAMS[1], 2, 1)


def test_logprobs_are_those_of_the_models_own_distribution():
    driver, tokens = Driver(8), prompt(11, 4)
    params = SamplingParams(temperature=0.5, logprobs=3, prompt_logprobs=2, logit_bias={5: 9.0}, frequency_penalty=1.0)
    driver.open(RowSetup(row=0, tokens=tokens, prompt_length=11, params=params, seed=1))
    driver.open(RowSetup(row=1, tokens=prompt(3, 5), prompt_length=3, params=PARAMS[1], seed=1))
    found = []
    for chunk in driver.chunks(0, [4, 5]):
        mine, other = driver.step(chunk, *(driver.chunks(1, []) if chunk.start == 0 else [Continue(1)])).rows
        found += mine.prompt_logprobs
        assert other.logprobs is None
        assert other.prompt_logprobs is None
    last = mine.logprobs + driver.step(Continue(0)).rows[0].logprobs
    assert len(found) == 10
    assert len(last) == 2
    known = tokens + driver.made[0]
    for position, entry in enumerate([*found, *last], start=1):
        logs = plain_logits(known[:position]).log_softmax(0)
        assert entry.token_ids[0] == known[position]
        likely = logs.argsort(descending=True).tolist()
        assert entry.token_ids[1:] == likely[: 2 if position < 11 else 3]
        assert entry.rank == likely.index(known[position]) + 1
        torch.testing.assert_close(torch.tensor(entry.logprobs), logs[entry.token_ids], rtol=0, atol=1e-5)


def test_a_resumed_rows_history_counts_as_output():
    """Penalties after a preemption are those from before it."""
    tokens = prompt(6, 6)
    params = SamplingParams(temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.2)
    whole, cut = Driver(9), Driver(10)
    for driver in (whole, cut):
        driver.open(RowSetup(row=0, tokens=tokens, prompt_length=6, params=params, seed=0))
        driver.step(*driver.chunks(0, []))
    for _ in range(9):
        whole.step(Continue(0))
    for _ in range(4):
        cut.step(Continue(0))
    known = tokens + cut.made[0]
    cut.close(0)
    cut.open(RowSetup(row=2, tokens=known, prompt_length=6, params=params, seed=0))
    cut.step(*cut.chunks(2, []))
    for _ in range(4):
        cut.step(Continue(2))
    assert known[6:] + cut.made[2] == whole.made[0]
    assert len(set(whole.made[0])) > 5  # the penalties do something


def test_a_failing_step_is_an_engine_fault_that_names_it():
    rank = worker()
    with pytest.raises(EngineFault, match=r"step 3 failed.*row 2 is closed"):
        rank.run(StepPlan(step=3, work=[Continue(2)]))


def test_logits_that_are_not_numbers_end_the_engine():
    driver = Driver(11)
    driver.worker.model.head = lambda hidden: torch.full((len(hidden), VOCABULARY), torch.nan)
    driver.open(RowSetup(row=0, tokens=[5], prompt_length=1, params=PARAMS[1], seed=0))
    with pytest.raises(EngineFault, match="not finite"):
        driver.step(Chunk(0, 0, 1, True))


def test_info_says_what_was_decided():
    rank = worker()
    assert rank.info.vocab_size == VOCABULARY
    assert rank.info.max_length == 500
    assert set(rank.info.cache_groups) == {"full", "window", "sconv"}
    for name, blocks in rank.info.cache_groups.items():
        assert 0 < blocks < len(rank.arena.storage[name])  # block 0 is nobody's


def test_a_length_that_does_not_fit_is_refused_with_both_numbers():
    config = EngineConfig(
        model=ModelConfig(path="toy", max_length=400),
        cache=CacheConfig(memory_bytes=4500, keep_every=64),
        sched=SchedConfig(rows=2, step_tokens=8, chunk=8),
    )
    with pytest.raises(NotEnoughMemory, match=r"max_length = 400 .* holds \d+ tokens"):
        Worker(config, Toy(), Comm.alone())
