"""The board of captured draws: tokens come from the draw they are read for, or the step fails. A CPU draws at once."""

import pytest
import torch

from inkcap.ops.sample.ref import TURNS, draw_next
from inkcap.runner.transfer import LINES, Board

CPU = torch.device("cpu")
ROWS = 3


class Draws:
    """A model that says what it is told to, and the rows it says it in; `held` draws run when they are let go."""

    def __init__(self, begin: int = 0) -> None:
        self.board = Board(ROWS + 1, CPU)
        self.board.turn.fill_(begin)
        self.board.queued = begin
        self.tokens, self.lengths = torch.zeros(ROWS, 400, dtype=torch.int32), torch.ones(ROWS, dtype=torch.int64)
        self.held = []

    def draw(self, wanted: list[int]) -> None:
        """Draw these tokens, one a row."""
        logits = torch.nn.functional.one_hot(torch.tensor(wanted), 1000).float()
        greedy, seeds = torch.zeros(len(wanted)), torch.zeros(len(wanted), dtype=torch.int64)
        rows = torch.arange(len(wanted), dtype=torch.int32)
        draw_next.reference(
            logits,
            seeds[:0],
            greedy,
            None,
            seeds,
            rows,
            self.tokens,
            self.lengths,
            -1,
            self.board.words,
            self.board.turn,
        )

    def post(self, wanted: list[int], places=slice(ROWS), *, hold: bool = False):
        """As the worker does; `hold`: as a device that has not come to it yet."""
        queue = self.held.append if hold else lambda work: work()
        return self.board.post(lambda: queue(lambda: self.draw(wanted)), places)

    def go_on(self) -> None:
        for work in self.held:
            work()
        self.held.clear()


def numbers(posted) -> list[int]:
    (tokens,) = posted.wait()
    assert tokens.dtype == torch.int64
    return tokens.tolist()


@pytest.mark.parametrize("begin", [0, TURNS - 20])
@pytest.mark.parametrize("late", [0, 1, LINES - 1])
def test_tokens_may_be_read_some_draws_later(late, begin):
    draws, open_, found = Draws(begin), [], []
    wanted = [[n, n + 1, n + 2] for n in range(100)]
    for one in wanted:
        open_.append(draws.post(one))
        if len(open_) > late:
            found.append(numbers(open_.pop(0)))
    assert found + [numbers(posted) for posted in open_] == wanted


def test_whoever_is_not_read_is_read_before_its_line_is_taken():
    draws = Draws()
    posted = [draws.post([n, 2 * n, 3 * n]) for n in range(5 * LINES)]
    assert [numbers(each) for each in posted] == [[n, 2 * n, 3 * n] for n in range(5 * LINES)]


def test_some_places_of_a_draw():
    assert numbers(Draws().post([7, 8, 9], [2, 0])) == [9, 7]


def test_a_row_without_a_token():
    draws = Draws()
    posted = draws.board.post(lambda: draws.draw([5, 6, 7]), slice(ROWS))
    draws.board.words[1, 1] = 2**32 + 2**32 - 1  # as draw_next writes -1
    assert numbers(posted) == [5, -1, 7]


def test_tokens_that_are_read_too_early_fail_the_step():
    """The device has not come to the draw, and the host did not wait: at first, when words are 0, and later."""
    draws = Draws()
    for _ in range(3):
        early = draws.post([1, 2, 3], hold=True)
        with pytest.raises(RuntimeError, match="are of draws"):
            early.wait()
        draws.go_on()
        assert numbers(early) == [1, 2, 3]
        for n in range(LINES):
            draws.post([n, n, n])


def test_one_word_that_is_missing_fails_the_step():
    draws = Draws()
    posted = draws.post([1, 2, 3])
    draws.board.words[1, 2] -= 2**32
    with pytest.raises(RuntimeError, match=r"draw 1 are of draws \[0, 1\]"):
        posted.wait()


def test_tokens_that_are_written_over_fail_the_step():
    """The host counts on lines that nobody kept free for it."""
    draws = Draws()
    late = draws.post([1, 2, 3])
    for _ in range(LINES):
        draws.draw([4, 5, 6])
    with pytest.raises(RuntimeError, match=f"draw 1 are of draws .{1 + LINES}"):
        late.wait()
