"""From a configuration to a core that is ready to run: loads the model."""

from inkcap.base.config import EngineConfig
from inkcap.base.request import EngineInfo
from inkcap.engine.core import Core, Port, build_core
from inkcap.engine.executor import LocalExecutor, ProcessExecutor
from inkcap.engine.rank import load_rank
from inkcap.parallel.comm import Comm


def assemble(config: EngineConfig, port: Port) -> tuple[Core, EngineInfo]:
    """Load the model on as many ranks as the configuration has. Raises SetupError."""
    if config.parallel.tp == 1:
        local = LocalExecutor(lambda: load_rank(config, Comm.alone()))
        return build_core(config, port, local, local.facts)
    ranks = ProcessExecutor(config, config.parallel.tp, port.wake)
    return build_core(config, port, ranks, ranks.facts)
