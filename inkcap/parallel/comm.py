"""Collectives of one group of ranks: eight verbs that do nothing for a group of one.

There is no default group: whoever needs to talk gets a `Comm`. gloo carries CPU tensors, NCCL those of a GPU.
The verbs call the process group itself: the functions of torch.distributed want a registered, global one.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]


@dataclass(frozen=True)
class Comm:
    """One rank's end of a group. Every rank of the group calls the same verbs in the same order.

    Every rank gets the same bits of a sum. The order it is formed in is the transport's, which may choose it by the
    tensor's size; where sums are `ordered` it is that of the ranks.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None = None  # None exactly when size is 1
    ordered: bool = False

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"
        assert (self.group is None) == (self.size == 1), "a group of one needs no process group, a larger one does"

    @staticmethod
    def alone() -> "Comm":
        """A group of one."""
        return Comm(rank=0, size=1)

    @staticmethod
    def outline(size: int) -> "Comm":
        """Rank 0 of a group of `size` that has nobody in it: gives shapes on paper, and fails in every verb."""
        return Comm(rank=0, size=size, group=cast(dist.ProcessGroup, object())) if size > 1 else Comm.alone()

    @staticmethod
    def join(
        store: Store,
        rank: int,
        size: int,
        *,
        name: str,
        device: torch.device,
        timeout_seconds: float = 600.0,
        ordered: bool = False,
    ) -> "Comm":
        """Meet the other ranks of group `name` at `store`; blocks until all are there. Touches no global state.

        A rank that waits longer than the timeout, here or in a verb, raises RuntimeError.
        """
        if size == 1:
            return Comm.alone()
        timeout = timedelta(seconds=timeout_seconds)
        prefix = PrefixStore(f"inkcap/{name}", store)
        group = dist.ProcessGroup(prefix, rank, size)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            backend = dist.ProcessGroupNCCL(prefix, rank, size, options)
            kind = dist.ProcessGroup.BackendType.NCCL
        else:
            backend = dist.ProcessGroupGloo(prefix, rank, size, timeout)
            kind = dist.ProcessGroup.BackendType.GLOO
        group._set_default_backend(kind)
        group._register_backend(torch.device(device.type), kind, backend)
        return Comm(rank=rank, size=size, group=group, ordered=ordered)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place; `x` must be contiguous. Returns `x`."""
        assert x.is_contiguous(), "all_reduce needs a contiguous tensor"
        if self.group is not None and self.ordered:
            total, *others = self.all_gather(x.unsqueeze(0)).float()  # [size, ...]
            for other in others:
                total = total + other
            x.copy_(total)
        elif self.group is not None:
            self.group.allreduce([x]).wait()
        return x

    def all_max(self, x: Tensor) -> Tensor:
        """The largest over ranks, in place; `x` must be contiguous. Returns `x`."""
        assert x.is_contiguous(), "all_max needs a contiguous tensor"
        if self.group is not None:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX  # pyright: ignore[reportAttributeAccessIssue]
            self.group.allreduce([x], options).wait()
        return x

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        """The sum over ranks, of which this rank keeps slab `rank` of `size` along `dim`."""
        if self.group is None:
            return x
        assert x.shape[dim] % self.size == 0, f"{x.shape[dim]} does not divide by {self.size} ranks"
        slabs = torch.cat(x.chunk(self.size, dim)) if dim else x.contiguous()  # slab r is rows r * n .. r * n + n
        out = slabs.new_empty((len(slabs) // self.size, *slabs.shape[1:]))
        self.group._reduce_scatter_base(out, slabs, dist.ReduceScatterOptions()).wait()
        return out

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Every rank's `x`, joined along `dim` in order of rank; shapes must agree."""
        if self.group is None:
            return x
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self.group._allgather_base(out, x.contiguous()).wait()
        return torch.cat(out.chunk(self.size), dim) if dim else out

    def all_to_all(self, x: Tensor, give: list[int], take: list[int]) -> Tensor:
        """Rows of `x` [sum(give), ...] go to ranks in order, `give[r]` to rank r; returns [sum(take), ...] likewise."""
        if self.group is None:
            return x
        out = x.new_empty((sum(take), *x.shape[1:]))
        self.group.alltoall_base(out, x.contiguous(), take, give).wait()
        return out

    def send(self, x: Tensor, to: int) -> None:
        """Give `x` to rank `to` of the group, which calls `recv`."""
        assert self.group is not None, "a group of one has nobody to send to"
        assert to != self.rank, "a rank does not send to itself"
        self.group.send([x.contiguous()], to, 0).wait()

    def recv(self, out: Tensor, source: int) -> Tensor:
        """Fill contiguous `out` with what rank `source` sends; returns `out`."""
        assert self.group is not None, "a group of one has nobody to receive from"
        assert source != self.rank, "a rank does not receive from itself"
        assert out.is_contiguous(), "recv needs a contiguous tensor"
        self.group.recv([out], source, 0).wait()
        return out

    def close(self) -> None:
        """Leave the group, once every verb is done; none may follow."""
        if self.group is not None:
            self.group.shutdown()
