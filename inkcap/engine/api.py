"""The engine as its callers see it: the server, the offline API and the tests' fakes. No torch."""

from collections.abc import AsyncIterator
from typing import Protocol

from inkcap.base.request import EngineInfo, EngineStats, GenerateRequest, TokenDelta


class Engine(Protocol):
    """A running engine."""

    @property
    def info(self) -> EngineInfo | None:
        """None while the model loads."""
        ...

    @property
    def fault(self) -> str | None:
        """Why the engine can serve no more; None while it can."""
        ...

    def submit(self, request: GenerateRequest) -> AsyncIterator[list[TokenDelta]]:
        """Start one sequence. Each item is what came since the last one was taken, in order; the last has a finish.

        Raises QueueFull, Draining or EngineFault at once, before the first item. Closing the iterator (or cancelling
        the task that reads it) aborts the sequence.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a sequence wherever it is; its iterator ends with Finish.ABORT. Unknown ids are ignored."""
        ...

    async def stats(self) -> EngineStats:
        """Counters and gauges of now."""
        ...
