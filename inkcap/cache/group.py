"""What a layer's state needs of the past. One formula serves full attention, sliding windows and short convolutions."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose state is kept, shared and dropped together. All quantities are in tokens."""

    name: str
    block: int  # tokens in one block
    block_bytes: int  # bytes of one block over all layers of the group, on one rank
    window: int | None = None  # tokens one token can see, itself included; None: all of them
    reads_own_step: bool = True  # False: this step's tokens come from the step's own input

    def first_needed(self, position: int) -> int:
        """The oldest position that computing the token at `position` reads."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def resume_spans(self, boundary: int, lag: int) -> list[tuple[int, int]]:
        """What must be present to go on from `boundary`: a prefix hit, a preempted row, a hand-over."""
        return [(self.first_needed(max(0, boundary - lag)), boundary)]

    def step_spans(self, start: int, stop: int, earliest_next: int, lag: int, keep_every: int) -> list[tuple[int, int]]:
        """What must have storage while tokens [start, stop) run.

        The next step begins anywhere in [earliest_next, stop], since drafted tokens may be refused.
        `keep_every` is the distance between boundaries worth resuming from.
        """
        if self.reads_own_step:
            return [(self.first_needed(max(0, start - lag)), stop)]
        first_edge = start // keep_every * keep_every + keep_every
        return [
            *self.resume_spans(start, lag),
            (self.first_needed(max(0, earliest_next - lag)), stop),
            *((self.first_needed(max(0, edge - lag)), edge) for edge in range(first_edge, stop + 1, keep_every)),
        ]

    def blocks(self, spans: list[tuple[int, int]]) -> list[int]:
        """Indices (position // block) of the blocks that the spans touch."""
        return sorted({b for lo, hi in spans for b in range(lo // self.block, -(-hi // self.block))})
