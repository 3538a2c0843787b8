"""Rows open, grow and close without leaving anything to each other."""

import pytest
import torch

from inkcap.base.request import SamplingParams
from inkcap.base.sampling import TokenRules
from inkcap.base.step import BlockEntry, RowSetup
from inkcap.runner.table import RowTable

CPU = torch.device("cpu")


def setup(row: int, tokens: list[int], prompt_length: int | None = None, seed: int = 0, **params) -> RowSetup:
    bad = params.pop("bad_words_ids", [])
    return RowSetup(
        row=row,
        tokens=tokens,
        prompt_length=prompt_length or len(tokens),
        params=SamplingParams(**params),
        seed=seed,
        bad_words_ids=bad,
    )


def table() -> RowTable:
    return RowTable(4, {"full": 8, "sconv": 4}, 100, TokenRules(stop=(7,)), CPU)


def test_tokens_survive_growth():
    rows = table()
    rows.open([setup(1, [1, 2, 3]), setup(2, list(range(90)))])
    for token in range(900):
        rows.append([2, 1], torch.tensor([token % 100, token % 50]))
    assert rows.tokens[2, : rows.lengths[2]].tolist() == [*range(90), *(t % 100 for t in range(900))]
    assert rows.tokens[1, : rows.lengths[1]].tolist() == [1, 2, 3, *(t % 50 for t in range(900))]
    assert rows.host_lengths == rows.lengths.tolist()


def test_columns_are_those_of_the_request():
    rows = table()
    rows.open(
        [
            setup(3, [1], temperature=0.7, top_k=5, top_p=0.5, min_p=0.25, seed=2**63 - 1),
            setup(0, [1, 2], temperature=0.0, top_k=-1),
            setup(1, [1], temperature=0.001),
        ]
    )
    draws = rows.draws([3, 0, 1])
    torch.testing.assert_close(draws.temperature, torch.tensor([0.7, 0.0, 0.01]))
    assert draws.limits.top_k.tolist() == [5, 0, 0]
    assert draws.limits.top_p.tolist() == [0.5, 1, 1]
    assert draws.limits.min_p.tolist() == [0.25, 0, 0]
    assert draws.seeds.tolist() == [2**63 - 1, 0, 0]
    assert draws.positions.tolist() == [1, 2, 1]
    assert not draws.extras


def test_only_rows_that_use_them_have_extras():
    rows = table()
    rows.open(
        [
            setup(0, [1], logprobs=5, top_k=3),
            setup(1, [1, 2, 2, 9, 9], prompt_length=2, frequency_penalty=0.5),
            setup(2, [1, 2], min_tokens=3, stop_token_ids=[50]),
            setup(
                3,
                [1],
                logit_bias={4: 1e6, 5: -1e6},
                allowed_token_ids=[4, 5],
                bad_words_ids=[[8], [], [1, 2, 3], [100], [100, 5]],
            ),
        ]
    )
    assert set(rows.extras) == {1, 2, 3}
    assert rows.extras[1].counts.nonzero().flatten().tolist() == [2, 9]
    assert rows.extras[1].counts[[2, 9]].tolist() == [1, 2]
    assert rows.extras[1].seen.nonzero().flatten().tolist() == [1, 2, 9]
    assert rows.extras[2].stops.tolist() == [7, 50]
    assert rows.extras[2].stops_from == 5
    assert rows.extras[3].biases.tolist() == [100, -100]
    assert (~rows.extras[3].forbidden).nonzero().flatten().tolist() == [4, 5]
    assert rows.extras[3].bad_words.prefixes.tolist() == [[-1, -1], [1, 2]]
    assert rows.extras[3].bad_words.lasts.tolist() == [8, 3]
    rows.append([1, 0], torch.tensor([9, 3]))
    assert rows.extras[1].counts[9] == 3
    rows.append([1], torch.tensor([60]))
    assert rows.extras[1].seen[60]
    rows.close([1, 3])
    assert set(rows.extras) == {2}


def test_ignore_eos_leaves_only_the_requests_own_stops():
    rows = table()
    rows.open(
        [setup(0, [1], min_tokens=1, ignore_eos=True), setup(1, [1], min_tokens=1, ignore_eos=True, stop_token_ids=[9])]
    )
    assert 0 not in rows.extras
    assert rows.extras[1].stops.tolist() == [9]


def test_a_closed_rows_block_table_is_empty():
    rows = table()
    rows.open([setup(0, [1]), setup(1, [1])])
    rows.place(
        {"full": [BlockEntry(0, 40, 5), BlockEntry(1, 0, 6), BlockEntry(1, 0, 7)], "sconv": [BlockEntry(0, 2, 9)]}
    )
    assert rows.tables["full"][0, 40] == 5
    assert rows.tables["full"][1, 0] == 7  # the later entry
    rows.close([0])
    assert not rows.tables["full"][0].any()
    assert not rows.tables["sconv"][0].any()
    assert rows.tables["full"][1, 0] == 7
    rows.open([setup(0, [3, 4])])
    assert rows.host_lengths[0] == 2


def test_taking_a_taken_row_or_closing_a_closed_one_is_a_bug():
    rows = table()
    rows.open([setup(0, [1])])
    with pytest.raises(AssertionError, match="row 0 is taken"):
        rows.open([setup(0, [1])])
    with pytest.raises(AssertionError, match="row 2 is closed"):
        rows.close([2])


def test_a_row_with_enough_tokens_is_drawn_as_most_are():
    rows = table()
    rows.open(
        [
            setup(0, [1, 2, 3], prompt_length=1, min_tokens=2),
            setup(1, [1, 2], prompt_length=1, min_tokens=2),
            setup(2, [1, 2], prompt_length=1, min_tokens=2, presence_penalty=1.0),
        ]
    )
    assert set(rows.extras) == {1, 2}
    rows.append([0, 1, 2], torch.tensor([9, 9, 9]))
    assert set(rows.extras) == {2}
    assert rows.extras[2].stops is None
    assert rows.extras[2].counts[9] == 1
