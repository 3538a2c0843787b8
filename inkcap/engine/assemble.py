"""From a configuration to a core that is ready to run: loads the model."""

from inkcap.base.config import EngineConfig
from inkcap.base.request import EngineInfo
from inkcap.engine.core import Core, Port, build_core
from inkcap.engine.executor import DeviceExecutor, LocalExecutor, ProcessExecutor
from inkcap.engine.rank import load_rank
from inkcap.parallel.comm import Comm
from inkcap.runner.load import device_for


def assemble(config: EngineConfig, port: Port) -> tuple[Core, EngineInfo]:
    """Load the model on as many ranks as the configuration has. Raises SetupError."""
    if config.parallel.tp == 1:
        kind = DeviceExecutor if device_for(config, 0).type == "cuda" else LocalExecutor
        local = kind(lambda: load_rank(config, Comm.alone()))
        return build_core(config, port, local, local.facts)
    ranks = ProcessExecutor(config, config.parallel.tp, port.wake)
    return build_core(config, port, ranks, ranks.facts)
