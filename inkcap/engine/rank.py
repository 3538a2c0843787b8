"""One rank: loading it, and the process that runs it when there are several."""

import sys

import torch.distributed as dist

from inkcap.base.config import EngineConfig
from inkcap.engine.executor import RankFacts, RankSetup
from inkcap.engine.serving import serve_rank
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
            layout=worker.memory.layout,
        )
        self.run = worker.run
        self.launch = worker.launch


def load_rank(config: EngineConfig, comm: Comm) -> Rank:
    """This rank's part of the configured model. Raises SetupError."""
    return Rank(load_worker(config, comm, progress=comm.rank == 0))


def join_and_load(setup: RankSetup) -> Rank:
    """Meet the other ranks, then load. The ranks meet at a file in the engine's private folder: no port to guess."""
    store = dist.FileStore(f"{setup.folder}/meeting", setup.size)  # pyright: ignore[reportPrivateImportUsage]
    device, ordered = device_for(setup.config, setup.rank), setup.config.model.deterministic
    comm = Comm.join(store, setup.rank, setup.size, name="tp", device=device, ordered=ordered)
    return load_rank(setup.config, comm)


if __name__ == "__main__":
    sys.exit(serve_rank(join_and_load))
