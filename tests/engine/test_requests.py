"""From a prompt to the sequences of a request: limits, seeds, and every way to be refused."""

import pytest

from inkcap.base.errors import BadRequest, ContextTooLong
from inkcap.base.request import EngineInfo, SamplingParams
from inkcap.engine.requests import child_seed, expand

INFO = EngineInfo(
    max_length=131_072,
    vocab_size=200_058,
    rows=8,
    step_tokens=512,
    dtype="float32",
    cache_dtype="float32",
    device="cpu",
    family="inkling",
    cache_groups={},
)


def one(ids, info=INFO, **params):
    (request,) = made(ids, info, **params)
    return request


def made(ids, info=INFO, **params):
    return expand(ids, SamplingParams(**params), info=info, request_id="r", draw_seed=lambda: 77, encode=encode)


def encode(text):
    return [ord(letter) for letter in text]


def test_one_sequence():
    request = one([1, 2, 3], max_tokens=9, seed=5)
    assert (request.request_id, request.token_ids, request.seed, request.max_tokens) == ("r", [1, 2, 3], 5, 9)
    assert request.arrival > 0


def test_a_seed_is_drawn_where_none_is_given():
    assert one([1]).seed == 77
    assert one([1], seed=-1).seed == 77
    assert one([1], seed=0).seed == 0
    assert one([1], seed=-5).seed == 2**63 - 5
    assert one([1], seed=2**63 - 1).seed == 2**63 - 1


def test_n_sequences_have_seeds_and_ids_of_their_own():
    requests = made([1], n=5, seed=5)
    assert [request.request_id for request in requests] == ["r-0", "r-1", "r-2", "r-3", "r-4"]
    seeds = [request.seed for request in requests]
    assert seeds[0] == 5
    assert len(set(seeds)) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [child_seed(5, index) for index in range(5)]
    # written down once: replays of logged requests depend on it
    assert child_seed(5, 1) == 3_137_727_415_170_620_344
    assert seeds[1:] != [request.seed for request in made([1], n=5, seed=6)][1:]


def test_open_ended_requests_fill_the_context():
    assert one([1] * 72, max_tokens=None).max_tokens == 131_000
    assert one([1] * 131_071, max_tokens=1).max_tokens == 1


def test_a_prompt_that_is_too_long_is_told_both_numbers():
    with pytest.raises(ContextTooLong) as caught:
        one([1] * 140_312)
    assert "140,312" in str(caught.value)
    assert "131,072" in str(caught.value)
    assert "9,241" in str(caught.value)
    with pytest.raises(ContextTooLong):
        one([1] * 131_072, max_tokens=None)


def test_an_answer_that_is_too_long_is_told_the_numbers():
    with pytest.raises(ContextTooLong) as caught:
        one([1] * 131_000, max_tokens=100)
    for number in ("131,000", "131,100", "131,072", "28"):
        assert number in str(caught.value)
    assert caught.value.param == "max_tokens"


def test_min_tokens_beyond_the_context():
    with pytest.raises(BadRequest, match="min_tokens is 100 but") as caught:
        one([1] * 131_000, max_tokens=None, min_tokens=100)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt is empty"),
        ([1, -1], "prompt token 1 is -1"),
        ([200_058], "prompt token 0 is 200058; token ids are integers from 0 to 200,057"),
        ([1, 2, 2**70], "prompt token 2 is 1180591620717411303424"),
        ([1, True], "prompt token 1 is True"),
        ([1.0], "prompt token 0 is 1.0"),
        (["1"], "prompt token 0 is '1'"),
        ([1, 200_053], "prompt token 1 is 200053, the audio placeholder"),
        ([200_054], "prompt token 0 is 200054, the image placeholder"),
    ],
)
def test_prompts_that_are_refused(ids, message):
    with pytest.raises(BadRequest, match=message) as caught:
        one(ids)
    assert caught.value.param == "prompt"


def test_parameters_are_checked():
    with pytest.raises(BadRequest, match="temperature"):
        one([1], temperature=-1.0)
    with pytest.raises(BadRequest, match="top_p"):
        one([1], top_p=float("nan"))


def test_bad_words_in_both_spellings():
    assert one([1], bad_words=["ab", " c"]).bad_words_ids == [
        [97, 98],
        [32, 97, 98],
        [32, 99],
        [99],
    ]
    with pytest.raises(BadRequest, match="tokenizer"):
        expand([1], SamplingParams(bad_words=["x"]), info=INFO, request_id="r", draw_seed=lambda: 1)
