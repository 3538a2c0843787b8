"""Who waits, in order: priority, then the preempted, then arrival."""

from heapq import heappop, heappush

from inkcap.sched.sequence import Sequence


class WaitingQueue:
    """A heap; sequences removed from its middle leave their entry behind until it comes up."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, bool, float, int], Sequence]] = []
        self._waiting: dict[int, Sequence] = {}  # by serial number

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, sequence: Sequence, *, front: bool = False) -> None:
        """`front`: before all others of its priority, in the order they arrived; for what has run before."""
        priority, arrival, serial = sequence.order
        self._waiting[serial] = sequence
        heappush(self._heap, ((priority, not front, arrival, serial), sequence))

    def first(self) -> Sequence:
        """The next in order, left in place. There must be one."""
        while self._heap[0][0][3] not in self._waiting:
            heappop(self._heap)
        return self._heap[0][1]

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting sequence out, wherever it stands."""
        del self._waiting[sequence.order[2]]
        if self._heap[0][1] is sequence:
            heappop(self._heap)
