"""Sampling parameters are refused with field, value and limit; nothing valid is."""

import math

import pytest

from inkcap.base.errors import BadRequest
from inkcap.base.request import SamplingParams
from inkcap.base.sampling import TokenRules, check, stop_ids, token_rules

NAN, INF = math.nan, math.inf
GOOD = [
    {},
    {"temperature": 0},
    {"temperature": 2.0, "top_p": 1, "top_k": -1, "min_p": 1.0},
    {"top_k": 10**9, "top_p": 1e-9},
    {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 1e-3},
    {"max_tokens": None, "min_tokens": 5},
    {"max_tokens": 5, "min_tokens": 5},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"logprobs": 0, "prompt_logprobs": 20},
    {"stop": "x", "stop_token_ids": [0, 99]},
    {"stop": ["x"] * 64},
    {"logit_bias": {0: -1e9, 99: 5}, "allowed_token_ids": [3]},
    {"bad_words": ["a", "b"]},
    {"n": 128},
]
BAD = [
    ("n", 0, "128"),
    ("n", 129, "128"),
    ("n", 1.0, "integer"),
    ("n", True, "integer"),
    ("temperature", -0.1, "between 0 and 2"),
    ("temperature", 2.1, "between 0 and 2"),
    ("temperature", NAN, "nan"),
    ("temperature", INF, "inf"),
    ("temperature", "hot", "number"),
    ("temperature", True, "number"),
    ("temperature", None, "number"),
    ("top_p", 0, "above 0"),
    ("top_p", 1.01, "between 0 and 1"),
    ("top_p", NAN, "nan"),
    ("top_k", -2, "at least -1"),
    ("top_k", 1.5, "integer"),
    ("min_p", -0.01, "between 0 and 1"),
    ("min_p", NAN, "nan"),
    ("presence_penalty", 2.5, "between -2 and 2"),
    ("frequency_penalty", -3, "between -2 and 2"),
    ("frequency_penalty", -INF, "-inf"),
    ("repetition_penalty", 0, "above 0"),
    ("repetition_penalty", -1, "at least 0"),
    ("repetition_penalty", INF, "finite"),
    ("max_tokens", 0, "at least 1"),
    ("min_tokens", -1, "at least 0"),
    ("min_tokens", 17, "max_tokens is 16"),
    ("seed", 2**63, "9223372036854775807"),
    ("seed", 1.5, "integer"),
    ("logprobs", 21, "between 0 and 20"),
    ("logprobs", -1, "between 0 and 20"),
    ("prompt_logprobs", 21, "between 0 and 20"),
    ("stop", ["x"] * 1000, "1000 entries; the limit is 64"),
    ("stop", ["a", ""], "non-empty"),
    ("stop", "", "non-empty"),
    ("stop", [3], "non-empty string"),
    ("stop", ["x" * 1025], "1025 characters; the limit is 1024"),
    ("stop_token_ids", [100], "0 to 99"),
    ("stop_token_ids", [-1], "0 to 99"),
    ("stop_token_ids", list(range(65)), "limit is 64"),
    ("stop_token_ids", 5, "list"),
    ("logit_bias", {100: 1.0}, "0 to 99"),
    ("logit_bias", {"5": 1.0}, "'5'"),
    ("logit_bias", {5: NAN}, "token 5 is nan"),
    ("logit_bias", {5: "x"}, "token 5"),
    ("logit_bias", [5], "map token ids"),
    ("logit_bias", dict.fromkeys(range(1025), 0.0), "limit is 1024"),
    ("allowed_token_ids", [], "at least one"),
    ("allowed_token_ids", [50], "at least one"),
    ("allowed_token_ids", [3, 100], "0 to 99"),
    ("bad_words", [""], "non-empty"),
    ("bad_words", ["x"] * 257, "limit is 256"),
]
RULES = TokenRules(stop=(7,), banned=(50,))


@pytest.mark.parametrize("params", GOOD)
def test_valid_parameters_pass(params):
    check(SamplingParams(**params), 100, rules=RULES)


@pytest.mark.parametrize(("name", "value", "limit"), BAD)
def test_invalid_parameters_name_field_and_limit(name, value, limit):
    with pytest.raises(BadRequest) as caught:
        check(SamplingParams(**{name: value}), 100, rules=RULES)
    assert caught.value.param == name
    assert name.split("_")[0] in str(caught.value)
    assert limit in str(caught.value)
    assert len(str(caught.value)) < 300


def test_the_limit_of_logprobs_is_the_servers():
    check(SamplingParams(logprobs=50), 100, max_logprobs=50)
    with pytest.raises(BadRequest, match="between 0 and 5"):
        check(SamplingParams(logprobs=6), 100, max_logprobs=5)


def test_the_published_vocabulary_bans_what_a_model_must_not_emit():
    rules = token_rules(200058, [200006])
    assert rules.stop == (199999, 200006)
    assert len(rules.banned) == 60 - 8
    assert not {200001, 200004, 200006, 200008, 200010, 200049, 200057, 199999} & set(rules.banned)
    assert {199998, 200000, 200002, 200003, 200005, 200053, 200054} <= set(rules.banned)
    assert min(rules.banned) == 199998


def test_other_vocabularies_have_only_the_checkpoints_rules():
    assert token_rules(500) == TokenRules()
    assert token_rules(500, [3, 2, 3]) == TokenRules(stop=(2, 3))


def test_ignore_eos_drops_the_vocabularys_stops_only():
    assert stop_ids(SamplingParams(stop_token_ids=[4]), RULES) == {4, 7}
    assert stop_ids(SamplingParams(stop_token_ids=[4], ignore_eos=True), RULES) == {4}
