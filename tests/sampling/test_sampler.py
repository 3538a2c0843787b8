"""The sampler against float64 NumPy, each feature alone and all at once; rows in company against rows alone."""

from random import Random

import numpy as np
import pytest
import torch

from inkcap.base.request import SamplingParams
from inkcap.base.sampling import TokenRules
from inkcap.base.step import RowSetup
from inkcap.runner.table import RowTable
from inkcap.sampling.sampler import Sampler

CPU = torch.device("cpu")
VOCABULARY = 200
RULES = TokenRules(stop=(7, 8), banned=(190, 191, 199))


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def setup(row: int, tokens: list[int], prompt_length: int | None = None, bad: list[list[int]] | None = None, **params):
    return RowSetup(
        row=row,
        tokens=tokens,
        prompt_length=prompt_length or len(tokens),
        params=SamplingParams(**params),
        seed=row * 13 + 1,
        bad_words_ids=bad or [],
    )


def draw(setups: list[RowSetup], logits: torch.Tensor):
    """Tokens and log-probabilities of rows opened in a fresh table."""
    table = RowTable(1 + max(s.row for s in setups), {}, VOCABULARY, RULES, CPU)
    table.open(setups)
    sampled = Sampler(RULES.banned, CPU).draw(logits.clone(), table.draws([s.row for s in setups]))
    return sampled.collect(sampled.numbers)


def greedy(logits: torch.Tensor, tokens: list[int], prompt_length: int | None = None, bad=None, **params) -> int:
    return draw([setup(0, tokens, prompt_length, bad, temperature=0.0, **params)], logits)[0][0]


def adjusted(logits: np.ndarray, s: RowSetup) -> np.ndarray:
    """Penalties, biases and masks of one row, token by token in float64."""
    made, params = logits.astype(np.float64), s.params
    output = s.tokens[s.prompt_length :]
    for token in range(VOCABULARY):
        if token in s.tokens:
            made[token] = (
                made[token] / params.repetition_penalty if made[token] > 0 else made[token] * params.repetition_penalty
            )
        made[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
        made[token] += max(-100, min(100, params.logit_bias.get(token, 0.0)))
        if token in RULES.banned or (params.allowed_token_ids is not None and token not in params.allowed_token_ids):
            made[token] = -np.inf
        if len(output) < params.min_tokens and token in {
            *params.stop_token_ids,
            *(() if params.ignore_eos else RULES.stop),
        }:
            made[token] = -np.inf
        for word in s.bad_words_ids:
            if token == word[-1] and (len(word) == 1 or s.tokens[-len(word) + 1 :] == word[:-1]):
                made[token] = -np.inf
    return made


def random_setup(row: int, random: Random) -> RowSetup:
    tokens = [random.randrange(20) for _ in range(random.randrange(1, 30))]
    params: dict = {"temperature": 0.0}
    if random.random() < 0.5:
        params |= {"repetition_penalty": random.uniform(0.5, 2), "presence_penalty": random.uniform(-2, 2)}
    if random.random() < 0.5:
        params["frequency_penalty"] = random.uniform(-2, 2)
    if random.random() < 0.5:
        params["logit_bias"] = {random.randrange(VOCABULARY): random.uniform(-200, 200) for _ in range(5)}
    if random.random() < 0.3:
        params["allowed_token_ids"] = random.sample(range(180), 30)
    if random.random() < 0.5:
        params |= {"min_tokens": random.randrange(20), "stop_token_ids": random.sample(range(180), 40)}
    if random.random() < 0.3:
        params["ignore_eos"] = True
    bad = []
    if random.random() < 0.5:
        bad = [[*tokens[-k:], random.randrange(180)] for k in (1, 2, 3)] + [[random.randrange(180)] for _ in range(30)]
        bad += [[random.randrange(20), random.randrange(180)] for _ in range(20)]
    return setup(row, tokens, random.randrange(1, len(tokens) + 1), bad, **params)


def test_greedy_choice_equals_a_plain_derivation_of_everything_at_once():
    random = Random(1)
    setups = [random_setup(row, random) for row in range(150)]
    logits = logits_of(150)
    tokens, _ = draw(setups, logits)
    for s in setups:
        expected = adjusted(logits[s.row].numpy(), s)
        assert tokens[s.row] == expected.argmax(), s
    assert len({token != int(row.argmax()) for token, row in zip(tokens, logits, strict=True)}) == 2


def test_rows_draw_the_same_alone_and_among_others():
    random = Random(2)
    heats = [{}, {"top_k": 9}, {"top_p": 0.7}, {"temperature": 0.0}, {"min_p": 0.05, "temperature": 1.4}]
    setups = []
    for row in range(16):
        s = random_setup(row, random)
        extra = heats[row % 5] | ({"logprobs": row % 4} if row % 3 else {})
        bad = s.bad_words_ids if row % 2 else []
        base = {"frequency_penalty": s.params.frequency_penalty, "logit_bias": s.params.logit_bias} if row % 2 else {}
        setups.append(setup(row, s.tokens, s.prompt_length, bad, **(base | extra)))
    logits = logits_of(16, seed=3)
    logits[4] = logits[4].round()  # ties
    tokens, logprobs = draw(setups, logits)
    for row, s in enumerate(setups):
        assert draw([s], logits[row : row + 1]) == ([tokens[row]], [logprobs[row]]), s


def test_banned_ids_are_never_drawn():
    logits = logits_of(40)
    logits[:, [190, 191, 199]] += 50
    tokens, _ = draw([setup(row, [1], temperature=float(row % 2)) for row in range(40)], logits)
    assert not {190, 191, 199} & set(tokens)


def test_min_tokens_counts_the_output_only():
    logits = logits_of(1)
    logits[0, 8] = 99
    logits[0, 5] = 98
    assert greedy(logits, [1] * 10, min_tokens=2) == 5
    assert greedy(logits, [1] * 10, 9, min_tokens=2) == 5
    assert greedy(logits, [1] * 10, 8, min_tokens=2) == 8
    assert greedy(logits, [1] * 10, 9, min_tokens=2, ignore_eos=True) == 8
    assert greedy(logits, [1] * 10, 9, min_tokens=2, ignore_eos=True, stop_token_ids=[8]) == 5


def test_bad_words_are_banned_at_their_last_id_only():
    logits = logits_of(1)
    logits[0, 5], logits[0, 6] = 99, 98
    assert greedy(logits, [1, 2, 3], bad=[[5]]) == 6
    assert greedy(logits, [1, 2, 3], bad=[[2, 3, 5]]) == 6
    assert greedy(logits, [1, 2, 3], bad=[[2, 2, 5]]) == 5
    assert greedy(logits, [3], bad=[[2, 3, 5]]) == 5  # the row is shorter than the prefix
    assert greedy(logits, [1, 2, 3], bad=[[9, 5], [3, 5], [8, 5]]) == 6  # one of several words with this last id
    assert greedy(logits, [0, 1, 2], bad=[[0, 5]]) == 5  # id 0 is no padding


def test_a_row_that_stop_ids_and_bad_words_would_leave_nothing_is_drawn_without_them():
    logits = logits_of(1)
    logits[0, 11] = 40
    assert greedy(logits, [1], bad=[[11], [12]], allowed_token_ids=[11, 12]) == 11
    assert greedy(logits, [1], min_tokens=4, allowed_token_ids=[7]) == 7
    assert greedy(logits, [1], bad=[[11]], allowed_token_ids=[11, 12]) == 12


def test_logprobs_are_taken_before_anything_is_changed():
    logits = logits_of(2, seed=4)
    logits[:, 199] = 9.5  # banned, but likely
    params = {"temperature": 0.3, "top_k": 1, "logit_bias": {3: 100.0}, "presence_penalty": 1.0}
    tokens, logprobs = draw([setup(0, [3, 4], 1, logprobs=4, **params), setup(1, [3])], logits)
    assert tokens[0] == 3
    assert logprobs[1] is None
    exact = logits[0].double() - logits[0].double().logsumexp(0)
    likely = exact.argsort(descending=True).tolist()
    assert logprobs[0].token_ids == [3, *likely[:4]]
    assert 199 in logprobs[0].token_ids
    assert logprobs[0].rank == likely.index(3) + 1
    np.testing.assert_allclose(logprobs[0].logprobs, exact[logprobs[0].token_ids], atol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_numbers_raise(bad):
    logits = logits_of(3)
    logits[1, 17] = bad
    for heat in (0.0, 1.0):
        with pytest.raises(ValueError, match="not finite"):
            draw([setup(row, [1], temperature=heat) for row in range(3)], logits)


def test_a_seed_gives_the_same_tokens_again_and_another_seed_gives_others():
    logits = logits_of(1).expand(60, -1)
    first, _ = draw([setup(row, [1]) for row in range(60)], logits)
    again, _ = draw([setup(row, [1]) for row in range(60)], logits)
    assert first == again
    assert len(set(first)) > 3
