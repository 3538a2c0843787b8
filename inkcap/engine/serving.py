"""The lives of an engine process and of a rank process: setup from stdin, work, exit code."""

import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from inkcap.base.config import EngineConfig
from inkcap.base.errors import EngineFault, InkcapError
from inkcap.base.log import logger, start_logging
from inkcap.base.request import EngineInfo
from inkcap.base.step import StepPlan
from inkcap.engine.child import FAULT, SETUP, end_with_parent, read_setup
from inkcap.engine.core import Core, Port
from inkcap.engine.executor import (
    RankFailed,
    RankMessage,
    RankReady,
    RankResult,
    RankSetup,
    Runs,
    plan_address,
    reply_address,
)
from inkcap.engine.wire import EngineSetup, Ready, SetupFailed, SocketPort, described


def serve_core(build: Callable[[EngineConfig, Port], tuple[Core, EngineInfo]]) -> int:
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


def serve_rank(load: Callable[[RankSetup], Runs]) -> int:
    """Load a rank as told over stdin, then run plans until killed or failed. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when ranks end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setup = read_setup(RankSetup)
    end_with_parent()
    start_logging(f"rank {setup.rank}", setup.config.server.log_level)
    folder = Path(setup.folder)
    context = zmq.Context()
    replies = context.socket(zmq.PUSH)
    replies.connect(reply_address(folder))
    plans = context.socket(zmq.PULL)
    plans.connect(plan_address(folder, setup.rank))
    decoder = msgspec.msgpack.Decoder(StepPlan)

    def send(message: RankMessage) -> None:
        replies.send(msgspec.msgpack.encode(message))

    try:
        rank = load(setup)
        send(RankReady(setup.rank, rank.facts))
        while True:
            result = rank.run(decoder.decode(plans.recv()))
            if setup.rank == 0:
                send(RankResult(result))
    except Exception as error:  # told to the core, which ends every rank
        if not isinstance(error, InkcapError):
            logger.error("rank %d failed", setup.rank, exc_info=error)
        send(RankFailed(setup.rank, *described(error)))
    replies.close(linger=2000)
    plans.close(linger=0)
    context.term()
    return FAULT
