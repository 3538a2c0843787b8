"""The lives of an engine process and of a rank process: setup from stdin, work, exit code."""

import gc
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import msgspec
import zmq

from inkcap.base.config import EngineConfig
from inkcap.base.errors import EngineFault, InkcapError
from inkcap.base.log import logger, start_logging
from inkcap.base.request import EngineInfo
from inkcap.base.step import StepPlan
from inkcap.engine.child import FAULT, ORPHANED, SETUP, end_with_parent, read_setup
from inkcap.engine.core import Core, Port
from inkcap.engine.executor import (
    LOOK_MS,
    Begun,
    Launches,
    RankFailed,
    RankMessage,
    RankReady,
    RankResult,
    RankSetup,
    plan_address,
    reply_address,
)
from inkcap.engine.wire import EngineSetup, Ready, SetupFailed, SocketPort, described

CLOSING_SECONDS = 1.0  # that a server takes to close its engine once it has drained


def serve_core(build: Callable[[EngineConfig, Port], tuple[Core, EngineInfo]]) -> int:
    """Build the engine, run it until it is told to stop, and return the exit code.

    SIGINT is ignored: in a terminal it is meant for the server, which drains first and then ends this process. On
    SIGTERM no new requests are taken and the open ones finish; then it waits for the server, to which a service manager
    has sent the same signal, and ends by itself only when the server's own deadline has passed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        setup = read_setup(EngineSetup)
    except EOFError:  # the server, which begins before all else is known to be right, has said why it ended
        return ORPHANED
    end_with_parent(setup.folder)
    start_logging("engine", setup.config.server.log_level, setup.config.server.log_format)
    port = SocketPort(setup.address)
    try:
        core, info = build(setup.config, port)
    except Exception as error:  # told to the client, whatever it was
        if not isinstance(error, InkcapError):
            logger.error("the engine could not start", exc_info=error)
        port.send(SetupFailed(*described(error)))
        port.close()
        return SETUP

    def terminate(*_: object) -> None:
        core.drain()
        patience = threading.Timer(setup.config.server.drain_seconds + CLOSING_SECONDS, core.end)
        patience.daemon = True
        patience.start()

    signal.signal(signal.SIGTERM, terminate)
    gc.collect()
    gc.freeze()  # the model and its modules: a full collection over them would stop every row
    gc.enable()
    port.send(Ready(info))
    try:
        core.run()
        code = 0
    except EngineFault:
        code = FAULT
    port.close()
    core.executor.close()
    return code


def serve_rank(load: Callable[[RankSetup], Launches]) -> int:
    """Load a rank as told over stdin, then run plans until killed or failed. Returns the exit code.

    A plan is begun when it comes, while the device may still work on the one before; another thread waits for results.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when ranks end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setup = read_setup(RankSetup)
    end_with_parent(setup.folder)
    start_logging(f"rank {setup.rank}", setup.config.server.log_level, setup.config.server.log_format)
    folder = Path(setup.folder)
    context = zmq.Context()
    replies = context.socket(zmq.PUSH)
    replies.connect(reply_address(folder))
    plans = context.socket(zmq.PULL)
    plans.connect(plan_address(folder, setup.rank))
    decoder = msgspec.msgpack.Decoder(StepPlan)

    begun: SimpleQueue[Begun] = SimpleQueue()
    failed: list[Exception] = []

    def send(message: RankMessage) -> None:
        replies.send(msgspec.msgpack.encode(message))

    def finish() -> None:
        results = zmq.Context().socket(zmq.PUSH)  # a socket belongs to one thread
        results.connect(reply_address(folder))
        try:
            while True:
                result = begun.get().finish()
                if setup.rank == 0:
                    results.send(msgspec.msgpack.encode(RankResult(result)))
        except Exception as error:  # told by the other thread
            failed.append(error)

    try:
        rank = load(setup)
        send(RankReady(setup.rank, rank.facts))
        threading.Thread(target=finish, name="results", daemon=True).start()
        while not failed:
            if plans.poll(LOOK_MS):
                begun.put(rank.launch(decoder.decode(plans.recv())))
        raise failed[0]
    except Exception as error:  # told to the core, which ends every rank
        if not isinstance(error, InkcapError):
            logger.error("rank %d failed", setup.rank, exc_info=error)
        send(RankFailed(setup.rank, *described(error)))
    replies.close(linger=2000)
    plans.close(linger=0)
    context.term()
    return FAULT
