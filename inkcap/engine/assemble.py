"""From a configuration to a core that is ready to run: ranks, scheduler, loop."""

from dataclasses import replace

from inkcap.base.config import EngineConfig
from inkcap.base.log import logger
from inkcap.base.request import EngineInfo
from inkcap.engine.core import Core, Executor, Port
from inkcap.engine.executor import LocalExecutor, ProcessExecutor, RankFacts
from inkcap.engine.rank import load_rank
from inkcap.parallel.comm import Comm
from inkcap.sched.scheduler import build_scheduler


def assemble(config: EngineConfig, port: Port) -> tuple[Core, EngineInfo]:
    """Load the model on as many ranks as the configuration has. Raises SetupError."""
    if config.parallel.tp == 1:
        local = LocalExecutor(lambda: load_rank(config, Comm.alone()))
        return join(config, port, local, local.facts)
    ranks = ProcessExecutor(config, config.parallel.tp, port.wake)
    return join(config, port, ranks, ranks.facts)


def join(config: EngineConfig, port: Port, executor: Executor, facts: RankFacts) -> tuple[Core, EngineInfo]:
    """A core over loaded ranks. Closes the executor when that fails."""
    # The client counts what is open and refuses the surplus: all of it may wait here before the first step is planned.
    sched = replace(config.sched, waiting=config.sched.waiting + config.sched.rows)
    try:
        scheduler = build_scheduler(
            config.cache,
            sched,
            facts.groups,
            facts.blocks,
            stop_ids=tuple(facts.stop_ids),
            max_length=facts.max_length,
        )
    except BaseException:
        executor.close()
        raise
    info = EngineInfo(
        max_length=facts.max_length,
        vocab_size=facts.vocab_size,
        rows=config.sched.rows,
        step_tokens=config.sched.step_tokens,
        dtype=facts.dtype,
        device=facts.device,
        family=facts.family,
        cache_groups=facts.blocks,
    )
    logger.info(
        "ready: %s, %s on %s, %d ranks, %d tokens of context, cache blocks %s",
        *(info.family, info.dtype, info.device, config.parallel.tp, info.max_length, info.cache_groups),
    )
    return Core(scheduler, executor, port), info
