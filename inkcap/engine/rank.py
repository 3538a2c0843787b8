"""One rank: loading it, and the process that runs it when there are several."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch.distributed as dist
import zmq

from inkcap.base.config import EngineConfig
from inkcap.base.errors import InkcapError
from inkcap.base.log import logger, start_logging
from inkcap.base.step import StepPlan
from inkcap.engine.child import FAULT, end_with_parent, read_setup
from inkcap.engine.executor import (
    RankFacts,
    RankFailed,
    RankMessage,
    RankReady,
    RankResult,
    RankSetup,
    Runs,
    plan_address,
    reply_address,
)
from inkcap.engine.wire import described
from inkcap.parallel.comm import Comm
from inkcap.runner.load import device_for, load_worker
from inkcap.runner.worker import Worker


class Rank:
    """A loaded worker, as executors see it."""

    def __init__(self, worker: Worker) -> None:
        self.facts = RankFacts(
            family=worker.model.family,
            vocab_size=worker.model.vocab_size,
            max_length=worker.max_length,
            dtype=worker.dtype,
            device=worker.device.type,
            stop_ids=list(worker.rules.stop),
            groups=worker.groups,
            blocks=worker.memory.blocks,
        )
        self.run = worker.run


def load_rank(config: EngineConfig, comm: Comm) -> Rank:
    """This rank's part of the configured model. Raises SetupError."""
    return Rank(load_worker(config, comm, progress=comm.rank == 0))


def join_and_load(setup: RankSetup) -> Rank:
    """Meet the other ranks, then load. The ranks meet at a file in the engine's private folder: no port to guess."""
    store = dist.FileStore(f"{setup.folder}/meeting", setup.size)  # pyright: ignore[reportPrivateImportUsage]
    device = device_for(setup.config, setup.rank)
    return load_rank(setup.config, Comm.join(store, setup.rank, setup.size, name="tp", device=device))


def serve(load: Callable[[RankSetup], Runs]) -> int:
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


if __name__ == "__main__":
    sys.exit(serve(join_and_load))
