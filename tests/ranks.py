"""Ranks as threads of the test's process: a Comm whose verbs meet at a barrier."""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

R = TypeVar("R")


class ThreadComm:
    """One rank's end. Stands in for parallel.comm.Comm where no process is wanted."""

    def __init__(self, rank: int, size: int, board: list[torch.Tensor | None], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = size
        self.board = board
        self.barrier = barrier

    def exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's x, in order of rank."""
        self.board[self.rank] = x
        self.barrier.wait()
        seen = [part.clone() for part in self.board]
        self.barrier.wait()
        return seen

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(sum(self.exchange(x)))

    def all_max(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self.exchange(x)).amax(0))

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return torch.cat(self.exchange(x), dim)


def on_ranks(size: int, work: Callable[[ThreadComm], R]) -> list[R]:
    """Run `work` on `size` ranks at once; results in order of rank. The first exception of a rank is raised."""
    board: list[torch.Tensor | None] = [None] * size
    barrier = threading.Barrier(size, timeout=60)
    results: dict[int, R] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = work(ThreadComm(rank, size, board, barrier))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors, errors
    return [results[rank] for rank in range(size)]
