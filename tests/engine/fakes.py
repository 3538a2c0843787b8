"""Ranks without a model, and programs that serve them. What they do is written into `model.path` as JSON.

`python fakes.py engine` stands for inkcap.engine.process, `python fakes.py rank` for inkcap.engine.rank.
"""

import json
import os
import signal
import sys
import threading
import time

from inkcap.base.config import EngineConfig
from inkcap.base.errors import CheckpointMismatch
from inkcap.base.step import Chunk, RowResult, StepPlan, StepResult
from inkcap.cache.group import CacheGroup
from inkcap.cache.plan import layout_of
from inkcap.engine.core import build_core
from inkcap.engine.executor import LocalExecutor, ProcessExecutor, RankFacts
from inkcap.engine.serving import serve_core, serve_rank

VOCABULARY = 100
ENGINE = (__file__, "engine")
RANK = (__file__, "rank")
WAIT = 30.0  # seconds: a step that ends later was not begun


def token_at(seed: int, position: int) -> int:
    """The token a fake rank draws: a function of seed and position, never 0, which stops."""
    return 1 + (seed * 31 + position * 7) % (VOCABULARY - 1)


class Begun:
    """A step that is over when it is begun, or once the next one is."""

    def __init__(self, result: StepResult, next_one: threading.Event | None, lost: bool) -> None:
        self.result, self.next_one, self.lost = result, next_one, lost

    def finish(self) -> StepResult:
        assert self.next_one is None or self.next_one.wait(WAIT), "the next step was not begun meanwhile"
        if self.lost:
            raise RuntimeError("the device lost it")
        return self.result


class FakeRank:
    """Keeps row tables as a worker does, and checks that plans make sense.

    Behaviour: {"setup": "mismatch" | "bug", "fail_at": step, "die_at": step, "step_seconds": s, "blocks": n,
    "only_rank": r, "waits_at": step that ends once the next one is begun, "lost_at": step}.
    """

    def __init__(self, config: EngineConfig, rank: int = 0) -> None:
        self.does = json.loads(config.model.path)
        if self.does.get("only_rank", rank) != rank:
            self.does = {}
        if self.does.get("setup") == "mismatch":
            raise CheckpointMismatch("the demo checkpoint lacks 3 tensors")
        if self.does.get("setup") == "bug":
            raise KeyError("surprise")
        self.next_one = threading.Event()
        self.rows: dict[int, tuple[int, list[int]]] = {}
        blocks = self.does.get("blocks", 2000)
        self.facts = RankFacts(
            family="fake",
            vocab_size=VOCABULARY,
            max_length=4096,
            dtype="float32",
            device="cpu",
            stop_ids=[0],
            layout=layout_of([CacheGroup("full", 64, 1)], blocks),
        )

    def launch(self, plan: StepPlan) -> Begun:
        waits = self.does.get("waits_at")
        if plan.step - 1 == waits:
            self.next_one.set()
        lost = plan.step == self.does.get("lost_at")
        return Begun(self.run(plan), self.next_one if plan.step == waits else None, lost)

    def run(self, plan: StepPlan) -> StepResult:
        if plan.step == self.does.get("fail_at"):
            raise RuntimeError("a planted bug")
        if plan.step == self.does.get("die_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.does.get("step_seconds", 0))  # stands for the model's work
        for row in plan.closed:
            del self.rows[row]
        for setup in plan.opened:
            assert setup.row not in self.rows, f"row {setup.row} was opened twice"
            self.rows[setup.row] = (setup.seed, list(setup.tokens))
        results = []
        for work in plan.work:
            seed, tokens = self.rows[work.row]
            if isinstance(work, Chunk):
                assert work.stop <= len(tokens), "a chunk of unknown tokens"
            drawn = []
            if not isinstance(work, Chunk) or work.samples:
                drawn = [token_at(seed, len(tokens))]
                tokens += drawn
            results.append(RowResult(work.row, drawn))
        return StepResult(step=plan.step, rows=results)


def fake_engine(config, port):
    """What `assemble` does, over fake ranks."""
    if config.parallel.tp > 1:
        ranks = ProcessExecutor(config, config.parallel.tp, port.wake, RANK)
        return build_core(config, port, ranks, ranks.facts)
    executor = LocalExecutor(lambda: FakeRank(config))
    return build_core(config, port, executor, executor.facts)


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        sys.exit(serve_core(fake_engine))
    sys.exit(serve_rank(lambda setup: FakeRank(setup.config, setup.rank)))
