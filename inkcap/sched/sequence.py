"""One sequence on its way through the scheduler: its tokens, how far it is, and the moves its status may make.

WAITING -> RUNNING -> FINISHED      RUNNING -> WAITING (preempted)      WAITING -> FINISHED (aborted, or see apply)
"""

from enum import Enum

from inkcap.base.request import Finish, GenerateRequest, Logprobs
from inkcap.base.step import Continue
from inkcap.cache.manager import Holding
from inkcap.cache.prefix import Chain


class Status(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Positions are counted from the prompt's first token. `low` and `high` bound where the next step starts.

    They differ while a step with drafts is in flight, whose refusals are not known yet.
    """

    __slots__ = (
        "again",
        "cached_tokens",
        "chain",
        "finish",
        "high",
        "holding",
        "in_flight",
        "limit",
        "low",
        "name",
        "order",
        "preemptions",
        "prompt_length",
        "prompt_logprobs",
        "queue_seconds",
        "request",
        "row",
        "served",
        "status",
        "stops",
        "tokens",
    )

    def __init__(self, request: GenerateRequest, stops: frozenset[int], chain: Chain | None, serial: int) -> None:
        self.request = request
        self.name = request.request_id
        self.tokens = list(request.token_ids)  # the prompt, then what has been generated and reported
        self.prompt_length = len(self.tokens)
        self.limit = self.prompt_length + request.max_tokens  # tokens at which it ends
        self.stops = stops
        self.chain = chain
        self.order = (request.priority, request.arrival, serial)  # smaller is served first and preempted last
        self.status = Status.WAITING
        self.finish: Finish | None = None
        self.row = -1
        self.holding: Holding | None = None  # while it runs
        self.again = Continue(-1)  # the work of a plain decode step, made once a stay
        self.low = self.high = 0
        self.in_flight = 0  # planned steps without a result
        self.served = 0  # the step that last had work for it, kept where not all rows get some; 0: never ran
        self.cached_tokens: int | None = None  # prompt tokens that were found, until reported
        self.queue_seconds: float | None = None  # that it waited before it first ran, until reported
        self.preemptions = 0  # that are not reported yet
        self.prompt_logprobs: list[Logprobs | None] | None = None
        if request.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    @property
    def generated(self) -> int:
        """Tokens drawn and reported."""
        return len(self.tokens) - self.prompt_length

    def start(self, row: int, holding: Holding) -> None:
        """WAITING -> RUNNING, in `row`, from where `holding` starts."""
        assert self.status is Status.WAITING, f"{self.name} cannot start: it is {self.status.value}"
        self.status = Status.RUNNING
        self.row = holding.row = row
        self.holding = holding
        self.again = Continue(row)
        self.low = self.high = holding.start

    def preempt(self) -> None:
        """RUNNING -> WAITING. The caller has released the holding; state is computed again later."""
        assert self.status is Status.RUNNING, f"{self.name} cannot be preempted: {self.status.value}"
        self.status = Status.WAITING
        self.preemptions += 1
        self.row = -1
        self.holding = None
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    def end(self, finish: Finish) -> None:
        """WAITING or RUNNING -> FINISHED. The caller has released the holding."""
        assert self.status is not Status.FINISHED, f"{self.name} cannot end twice"
        self.status = Status.FINISHED
        self.finish = finish
        self.row = -1
        self.holding = None
