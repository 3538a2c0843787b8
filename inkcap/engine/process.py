"""`python -m inkcap.engine.process`: one engine core, started by a client with its setup on stdin."""

import signal
import sys
from collections.abc import Callable

from inkcap.base.config import EngineConfig
from inkcap.base.errors import EngineFault, InkcapError
from inkcap.base.log import logger, start_logging
from inkcap.base.request import EngineInfo
from inkcap.engine.assemble import assemble
from inkcap.engine.child import FAULT, SETUP, end_with_parent, read_setup
from inkcap.engine.core import Core, Port
from inkcap.engine.wire import EngineSetup, Ready, SetupFailed, SocketPort, described


def serve(build: Callable[[EngineConfig, Port], tuple[Core, EngineInfo]]) -> int:
    """Build the engine, run it until it is told to stop, and return the exit code.

    SIGINT is ignored: in a terminal it is meant for the server, which drains first and then ends this process. SIGTERM
    drains, since a service manager sends it to both at once.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup = read_setup(EngineSetup)
    end_with_parent(setup.folder)
    start_logging("engine", setup.config.server.log_level)
    port = SocketPort(setup.address)
    try:
        core, info = build(setup.config, port)
    except Exception as error:  # told to the client, whatever it was
        if not isinstance(error, InkcapError):
            logger.error("the engine could not start", exc_info=error)
        port.send(SetupFailed(*described(error)))
        port.close()
        return SETUP
    signal.signal(signal.SIGTERM, lambda *_: core.drain())
    port.send(Ready(info))
    try:
        core.run()
        code = 0
    except EngineFault:
        code = FAULT
    port.close()
    core.executor.close()
    return code


if __name__ == "__main__":
    sys.exit(serve(assemble))
