"""Drawing at real vocabularies: kernels on the device against the reference on the CPU."""

import pytest
import torch

from inkcap.ops.sample.ref import Limits, sample
from inkcap.ops.sample.triton import draw_next_triton, sample_triton
from inkcap.runner.transfer import LINES, Board

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


@pytest.mark.parametrize("words", [25128, 200_058])
@pytest.mark.parametrize("spread", [0.1, 3.0, 12.0])
def test_draws_are_those_of_the_reference(words, spread):
    torch.manual_seed(words)
    rows = 96
    logits = torch.randn(rows, words) * spread
    logits[::3] = (logits[::3] * 8).round() / 8  # ties
    logits[1::4, 7::11] = -torch.inf
    heat = torch.tensor([0.0, 1.0, 0.6, 1.4]).repeat(24)
    top_k = torch.tensor([0, 0, 50, 1, 0, 1000], dtype=torch.int32).repeat(16)
    top_p = torch.tensor([1.0, 0.9, 0.999]).repeat(32)
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.05, 0.0]).repeat(20)[:rows]
    seeds, positions = torch.randint(0, 2**62, (rows,)), torch.randint(0, 10**6, (rows,))
    expected = sample.reference(logits, heat, Limits(top_k, top_p, min_p), seeds, positions)
    logits, heat, top_k, top_p, min_p, seeds, positions = (
        tensor.cuda() for tensor in (logits, heat, top_k, top_p, min_p, seeds, positions)
    )
    assert torch.equal(sample_triton(logits, heat, Limits(top_k, top_p, min_p), seeds, positions).cpu(), expected)
    plain = sample.reference(logits, heat, None, seeds, positions)
    assert torch.equal(sample_triton(logits, heat, None, seeds, positions), plain)


class Captured:
    """Draws of rows 0 to `count` - 1 from logits that stay, as one graph; the last row is the spare one."""

    def __init__(self, count: int, words: int) -> None:
        self.board, self.count = Board(count + 1, GPU), count
        self.logits = torch.randn(count + 1, words, device=GPU)
        self.banned = torch.arange(3, words, words // 50, device=GPU)
        self.logits[:, self.banned[::2]] += 20
        self.heat = torch.tensor([0.0, 1.0, 0.6, 1.4] * 64, device=GPU)[: count + 1]
        self.seeds = torch.randint(0, 2**62, (count + 1,), device=GPU)
        self.rows = torch.arange(count + 1, dtype=torch.int32, device=GPU)
        self.tokens = torch.zeros(count + 1, 1000, dtype=torch.int32, device=GPU)
        self.lengths = torch.arange(1, count + 2, device=GPU)
        self.begin = self.lengths.cpu()
        torch.cuda.synchronize()
        self.draw()  # compiles
        torch.cuda.synchronize()
        self.lengths.copy_(self.begin)
        self.board.turn.zero_()
        self.board.words.zero_()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.drawn = self.draw()

    def draw(self) -> torch.Tensor:
        return draw_next_triton(
            self.logits, self.banned, self.heat, None, self.seeds, self.rows, self.tokens, self.lengths, self.count,
            self.board.words, self.board.turn,
        )  # fmt: skip

    def expected(self, number: int) -> torch.Tensor:
        """Tokens of draw `number`, counted from 0."""
        own = slice(self.count)
        allowed = self.logits.index_fill(1, self.banned, -torch.inf)
        logits, heat, seeds = (each.cpu()[own] for each in (allowed, self.heat, self.seeds))
        return sample.reference(logits, heat, None, seeds, self.begin[own] + number)


@pytest.mark.parametrize(("count", "words"), [(1, 50_256), (5, 200_058), (200, 3000)])
def test_tokens_of_captured_draws_reach_the_host_with_many_in_flight(count, words):
    torch.manual_seed(count)
    made, number = Captured(count, words), 3 * LINES + 1
    posted = [made.board.post(made.graph.replay, slice(count)) for _ in range(number)]
    wanted = [made.expected(n) for n in range(number)]
    for each, tokens in zip(posted, wanted, strict=True):
        assert torch.equal(each.wait()[0], tokens)
    assert torch.equal(made.drawn.cpu()[:count], wanted[-1])
    for row in range(count):
        at = int(made.begin[row])
        assert made.tokens[row, at : at + number].tolist() == [int(tokens[row]) for tokens in wanted]
    assert torch.equal(made.lengths.cpu()[:count], made.begin[:count] + number)
    assert made.lengths[count] == made.begin[count]


def test_tokens_that_are_read_before_they_are_drawn_are_found():
    """Whoever forgets to wait, while the device is busy with something else."""
    made = Captured(3, 50_256)
    for _ in range(2 * LINES + 3):
        torch.cuda._sleep(50_000_000)
        posted = made.board.post(made.graph.replay, slice(3))
        posted.event, event = None, posted.event
        with pytest.raises(RuntimeError, match="are of draws"):
            posted.wait()
        posted.event = event
        assert len(posted.wait()[0]) == 3
