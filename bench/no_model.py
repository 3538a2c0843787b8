"""`inkcap serve` with random tokens for a model: all of the server and of the engine core, none of the forward pass.

python bench/no_model.py CHECKPOINT [flags of inkcap serve]     the checkpoint gives the tokenizer
"""

import argparse
import random
import sys
import time

import uvloop

from inkcap.base.config import EngineConfig
from inkcap.base.flags import add_flags, config_from_flags
from inkcap.base.log import start_logging
from inkcap.base.request import EngineInfo
from inkcap.base.step import Chunk, RowResult, StepPlan, StepResult
from inkcap.cache.group import CacheGroup
from inkcap.cache.plan import layout_of
from inkcap.engine.core import Core, Port, build_core
from inkcap.engine.executor import LocalExecutor, RankFacts
from inkcap.engine.serving import serve_core
from inkcap.server.run import serve_checkpoint

STEP_SECONDS = 0.02
WORDS = 150_000  # ordinary ids that are drawn; real text has fewer and shorter tokens on average


class NoModel:
    """A rank that draws one random token for each row that samples, after a pause."""

    facts = RankFacts(
        family="none",
        vocab_size=200_058,
        max_length=32_768,
        dtype="float32",
        device="cpu",
        stop_ids=[200_006, 199_999],
        layout=layout_of(
            [CacheGroup("full", 64, 1), CacheGroup("window", 64, 1, 512), CacheGroup("sconv", 4, 1, 4, False)], 32_000
        ),
    )

    def __init__(self) -> None:
        self.draw = random.Random(0)

    def run(self, plan: StepPlan) -> StepResult:
        time.sleep(STEP_SECONDS)
        samples = [not isinstance(entry, Chunk) or entry.samples for entry in plan.work]
        rows = [
            RowResult(entry.row, [self.draw.randrange(WORDS)] if sampled else [])
            for entry, sampled in zip(plan.work, samples, strict=True)
        ]
        return StepResult(step=plan.step, rows=rows, seconds=STEP_SECONDS)


def build(config: EngineConfig, port: Port) -> tuple[Core, EngineInfo]:
    executor = LocalExecutor(NoModel)
    return build_core(config, port, executor, executor.facts)


def main() -> int:
    if sys.argv[1:] == ["engine"]:
        return serve_core(build)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model.path", metavar="CHECKPOINT")
    add_flags(parser)
    config = config_from_flags(parser.parse_args())
    start_logging("server", config.server.log_level)
    return uvloop.run(serve_checkpoint(config, program=(__file__, "engine")))


if __name__ == "__main__":
    sys.exit(main())
