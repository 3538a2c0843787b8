"""Who waits, in which order."""

from inkcap.base.request import GenerateRequest, SamplingParams
from inkcap.sched.queue import WaitingQueue
from inkcap.sched.sequence import Sequence


def waiting(name: str, serial: int, priority: int = 0, arrival: float = 0.0) -> Sequence:
    request = GenerateRequest(
        request_id=name,
        token_ids=[1],
        params=SamplingParams(),
        seed=0,
        max_tokens=1,
        priority=priority,
        arrival=arrival,
    )
    return Sequence(request, frozenset(), None, serial)


def drain(queue: WaitingQueue) -> str:
    names = ""
    while len(queue):
        names += queue.first().name
        queue.remove(queue.first())
    return names


def test_priority_goes_before_arrival_and_arrival_before_the_order_of_adding() -> None:
    queue = WaitingQueue()
    for sequence in (
        waiting("c", 1, 1, 5.0),
        waiting("b", 2, 0, 9.0),
        waiting("a", 3, 0, 8.0),
        waiting("d", 4, 1, 5.0),
    ):
        queue.push(sequence)
    assert drain(queue) == "abcd"


def test_the_preempted_go_first_among_their_priority() -> None:
    queue = WaitingQueue()
    queue.push(waiting("b", 1, 0, 1.0))
    queue.push(waiting("d", 2, 1, 0.0))
    queue.push(waiting("c", 3, 1, 9.0), front=True)
    queue.push(waiting("a", 4, 0, 9.0), front=True)
    assert drain(queue) == "abcd"


def test_one_can_leave_from_the_middle() -> None:
    queue = WaitingQueue()
    line = [waiting(name, serial) for serial, name in enumerate("abc")]
    for sequence in line:
        queue.push(sequence)
    queue.remove(line[1])
    assert len(queue) == 2
    assert drain(queue) == "ac"
