"""A step is a value: what the scheduler tells the ranks, and what they answer. No torch on either side of it."""

from msgspec import Struct, field

from inkcap.base.request import Logprobs, SamplingParams
from inkcap.base.turn import TurnRules


class RowSetup(Struct, frozen=True, kw_only=True):
    """A sequence takes a row of the device's table. Sent again, whole, when a preempted sequence resumes."""

    row: int
    tokens: list[int]  # all tokens known so far: prompt, and what was generated before a preemption
    prompt_length: int
    params: SamplingParams
    seed: int
    bad_words_ids: list[list[int]] = field(default_factory=list)
    rules: TurnRules | None = None  # what the answer may be; None: anything


class Chunk(Struct, frozen=True, array_like=True, tag=True):
    """Tokens [start, stop) of a row, all of them known: prompt, or a resumed row's history."""

    row: int
    start: int
    stop: int
    samples: bool  # the logits of the last token are wanted and a token is drawn from them


class Continue(Struct, frozen=True, array_like=True, tag=True):
    """The row's newest token and its drafts, which only the device knows. Always samples."""

    row: int
    drafts: int = 0


class BlockEntry(Struct, frozen=True, array_like=True):
    """Block table of `row`, entry `index` (position // block) is now `block`."""

    row: int
    index: int
    block: int


class BlockMove(Struct, frozen=True, array_like=True):
    """Copy a whole block before the step's writes: a shared block is never written."""

    group: str
    source: int
    target: int


class StepPlan(Struct, frozen=True, kw_only=True):
    """One step, in the order ranks carry it out: close, open, place blocks, copy blocks, run the work, sample."""

    step: int
    closed: list[int] = field(default_factory=list)
    opened: list[RowSetup] = field(default_factory=list)
    blocks: dict[str, list[BlockEntry]] = field(default_factory=dict)  # per cache group
    moves: list[BlockMove] = field(default_factory=list)
    work: list[Chunk | Continue] = field(default_factory=list)  # at most one entry a row


class RowResult(Struct, frozen=True, array_like=True):
    """What one entry of `work` gave."""

    row: int
    tokens: list[int]  # accepted tokens, oldest first; empty when the entry did not sample
    logprobs: list[Logprobs] | None = None  # one per token, when the row asked for them
    prompt_logprobs: list[Logprobs] | None = None  # of prompt tokens start+1 .. stop, when the row asked for them
    error: str | None = None  # why the row cannot go on


class StepResult(Struct, frozen=True, kw_only=True):
    """Results in the order of the plan's `work`."""

    step: int
    rows: list[RowResult]
    seconds: float = 0.0  # wall time of the step on the ranks
