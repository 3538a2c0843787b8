"""The drawing kernels against the reference, under the interpreter."""

import numpy as np
import pytest
import torch

from inkcap.ops.sample import triton as kernels
from inkcap.ops.sample.ref import TURNS, Limits, draw_next, penalize, sample
from inkcap.ops.sample.triton import draw_next_triton, penalize_triton, sample_triton

SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 40, "temperature": 1.3},
    {"top_p": 0.95, "temperature": 0.6},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.02, "temperature": 1.7},
]


def columns(rows):
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    heat, *limits = (
        torch.tensor([row.get(name, default) for row in rows], dtype=dtype)
        for (name, default), dtype in zip(defaults.items(), dtypes, strict=True)
    )
    limited = any(name in row for row in rows for name in ("top_k", "top_p", "min_p"))
    return heat, Limits(*limits) if limited else None


def keyed(count, seed=0):
    made = np.random.default_rng(seed)
    return torch.from_numpy(made.integers(0, 2**63, count)), torch.from_numpy(made.integers(0, 10**6, count))


@pytest.mark.parametrize(("words", "spread"), [(1, 1.0), (131, 0.0), (300, 3.0)])
def test_draws_are_those_of_the_reference(monkeypatch, words, spread):
    monkeypatch.setattr(kernels, "SPAN", 128)
    monkeypatch.setattr(kernels, "SEEN", 64)
    torch.manual_seed(int(spread))
    settings = SETTINGS
    logits = torch.randn(len(settings), words) * spread
    logits[::2] = (logits[::2] * 2).round() / 2  # ties, and both zeros
    logits[1::3, 5::7] = -torch.inf
    arguments = (*columns(settings), *keyed(len(settings)))
    assert torch.equal(sample_triton(logits, *arguments), sample.reference(logits, *arguments))


def test_rows_without_limits():
    torch.manual_seed(5)
    logits = torch.randn(6, 3000)
    arguments = (*columns([{"temperature": heat} for heat in (0.0, 0.3, 1.0, 2.0, 1.0, 0.7)]), *keyed(6))
    assert arguments[1] is None
    assert torch.equal(sample_triton(logits, *arguments), sample.reference(logits, *arguments))


def test_rows_that_stand_apart():
    torch.manual_seed(2)
    wide = torch.randn(5, 200)
    arguments = (*columns(SETTINGS[1:6]), *keyed(5))
    assert torch.equal(sample_triton(wide[:, :150], *arguments), sample.reference(wide[:, :150], *arguments))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_rows_that_are_no_numbers_give_no_token(bad, heat):
    logits = torch.randn(3, 90)
    logits[1, 17] = bad
    logits[2] = -torch.inf
    arguments = (*columns([{"temperature": heat}] * 3), *keyed(3))
    for function in (sample_triton, sample.reference):
        drawn = function(logits, *arguments)
        assert drawn[0] >= 0
        assert drawn[1:].tolist() == [-1, -1]


@pytest.mark.parametrize("function", [draw_next.reference, draw_next_triton])
@pytest.mark.parametrize("settings", [SETTINGS[:2] * 3, SETTINGS[:6]])
@pytest.mark.parametrize("banned", [[], [0, 61, 299]])
def test_what_is_drawn_next_is_in_the_rows_and_on_the_board(function, settings, banned):
    """Against `sample` and loops over rows, three draws running; the count of draws begins again in between."""
    torch.manual_seed(3)
    listed, spare, lines = [4, 0, 9, 2, 9, 7], 9, 4
    rows = torch.tensor(listed, dtype=torch.int32)
    tokens, lengths = torch.randint(0, 300, (10, 50), dtype=torch.int32), torch.randint(1, 40, (10,))
    heat, limits = columns(settings)
    seeds, _ = keyed(6)
    board, turn = torch.full((lines, 8), -7), torch.tensor([TURNS - 2])
    banned = torch.tensor(banned, dtype=torch.int64)
    for now in (TURNS - 1, 0, 1):
        logits = torch.randn(6, 300)
        if limits is None:
            logits[2, 5] = torch.nan
        logits[:, 61] += 9  # of those that may be banned
        allowed = logits.index_fill(1, banned, -torch.inf)
        wanted = sample.reference(allowed, heat, limits, seeds, lengths[rows.long()]).tolist()
        assert wanted[2] == -1 or limits is not None
        assert (61 in wanted) == (len(banned) == 0)
        known, grown, words = tokens.clone(), lengths.clone(), board.clone()
        for place, (row, token) in enumerate(zip(listed, wanted, strict=True)):
            words[now % lines, place] = now * 2**32 + token % 2**32
            if row != spare:
                known[row, grown[row]] = token
                grown[row] += 1
        drawn = function(logits, banned, heat, limits, seeds, rows, tokens, lengths, spare, board, turn)
        assert drawn.tolist() == wanted
        assert turn == now
        for found, want in ((tokens, known), (lengths, grown), (board, words)):
            assert torch.equal(found, want)


def test_penalties():
    torch.manual_seed(4)
    logits, counts = torch.randn(3, 3000), torch.randint(0, 3, (3000,), dtype=torch.int32)
    seen = (counts > 0) | (torch.rand(3000) < 0.2)
    expected = logits.clone()
    penalize.reference(expected[1], counts, seen, 1.3, 0.7, 0.4)
    penalize_triton(logits[1], counts, seen, 1.3, 0.7, 0.4)
    torch.testing.assert_close(logits, expected)
