"""Ranges of sampling parameters, and which ids a model may produce. No torch: the server checks before it queues."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inkcap.base.errors import BadRequest
from inkcap.base.request import SamplingParams

MAX_N = 128
MAX_STOPS = 64  # stop strings, and stop ids
MAX_STOP_CHARACTERS = 1024  # of one stop string: that much text is held back while streaming
MAX_BIASES = 1024
MAX_BAD_WORDS = 256
BIAS_LIMIT = 100.0  # larger biases are clamped, as the field's servers do
LOWEST_TEMPERATURE = 0.01  # temperatures between 0 and this are raised to it

O200K_VOCABULARY = 200058  # 199,998 ordinary ids and 60 control tokens
O200K_ORDINARY = 199998
END_OF_TEXT = 199999
END_SAMPLING = 200006
# model, text, thinking, end of message, end of sampling, the two tool calls, end of text
O200K_GENERATED = (200001, 200004, 200008, 200010, END_SAMPLING, 200049, 200057, END_OF_TEXT)


@dataclass(frozen=True)
class TokenRules:
    """What a vocabulary means to the engine."""

    stop: tuple[int, ...] = ()  # ids that end a sequence unless `ignore_eos`
    banned: tuple[int, ...] = ()  # ids that are never generated


def token_rules(vocab_size: int, eos_ids: Iterable[int] = ()) -> TokenRules:
    """The rules of a vocabulary. Only that of the published checkpoints bans ids and has stop ids of its own.

    `eos_ids` are what a checkpoint states; they are added to the stop ids, but for those that do not exist.
    """
    eos_ids = [token for token in eos_ids if token < vocab_size]
    if vocab_size != O200K_VOCABULARY:
        return TokenRules(stop=tuple(sorted(set(eos_ids))))
    stop = {END_SAMPLING, END_OF_TEXT, *eos_ids}
    banned = set(range(O200K_ORDINARY, O200K_VOCABULARY)) - set(O200K_GENERATED)
    return TokenRules(stop=tuple(sorted(stop)), banned=tuple(sorted(banned)))


def stop_ids(params: SamplingParams, rules: TokenRules) -> frozenset[int]:
    """The ids that end this request; `min_tokens` keeps them from being drawn too early."""
    return frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else rules.stop)


def check(params: SamplingParams, vocab_size: int, *, max_logprobs: int = 20, rules: TokenRules | None = None) -> None:
    """Raise BadRequest, naming field, value and limit, unless the engine can honour `params`.

    `vocab_size` is the number of ids that exist; `rules` defaults to those of that vocabulary.
    """
    rules = token_rules(vocab_size) if rules is None else rules
    _integer("n", params.n, 1, MAX_N)
    _number("temperature", params.temperature, 0.0, 2.0)
    if _number("top_p", params.top_p, 0.0, 1.0) == 0.0:
        raise BadRequest(
            "top_p is 0; it must be above 0 and at most 1. Use temperature 0 for greedy decoding.", "top_p"
        )
    _integer("top_k", params.top_k, -1, None)
    _number("min_p", params.min_p, 0.0, 1.0)
    _number("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _number("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    if _number("repetition_penalty", params.repetition_penalty, 0.0, None) == 0.0:
        raise BadRequest("repetition_penalty is 0; it must be above 0 (1 switches it off).", "repetition_penalty")
    if params.max_tokens is not None:
        _integer("max_tokens", params.max_tokens, 1, None)
    _integer("min_tokens", params.min_tokens, 0, None)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise BadRequest(
            f"min_tokens is {params.min_tokens} but max_tokens is {params.max_tokens}; lower min_tokens.", "min_tokens"
        )
    if params.seed is not None:
        _integer("seed", params.seed, -(2**63), 2**63 - 1)
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None:
            _integer(name, count, 0, min(max_logprobs, vocab_size))
    _check_stops(params)
    _token_ids("stop_token_ids", params.stop_token_ids, vocab_size, MAX_STOPS)
    _check_bias(params, vocab_size)
    _check_allowed(params.allowed_token_ids, vocab_size, rules)
    _strings("bad_words", params.bad_words, MAX_BAD_WORDS)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _number(name: str, value: object, low: float, high: float | None) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f"{name} is {_shown(value)}; it must be a number.", name)
    limit = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
    if not math.isfinite(value) or value < low or (high is not None and value > high):
        raise BadRequest(f"{name} is {_shown(value)}; it must be a finite number {limit}.", name)
    return value


def _integer(name: str, value: object, low: int, high: int | None) -> int:
    limit = f"at least {low}" if high is None else f"between {low} and {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(f"{name} is {_shown(value)}; it must be an integer {limit}.", name)
    if value < low or (high is not None and value > high):
        raise BadRequest(f"{name} is {_shown(value)}; it must be {limit}.", name)
    return value


def _sequence(name: str, value: object, most: int) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise BadRequest(f"{name} is {_shown(value)}; it must be a list.", name)
    if len(value) > most:
        raise BadRequest(f"{name} has {len(value)} entries; the limit is {most}. Send fewer.", name)
    return value


def _strings(name: str, value: object, most: int) -> Sequence[str]:
    entries = _sequence(name, value, most)
    for entry in entries:
        if not isinstance(entry, str) or not entry:
            raise BadRequest(f"{name} contains {_shown(entry)}; every entry must be a non-empty string.", name)
    return [entry for entry in entries if isinstance(entry, str)]


def _token_ids(name: str, value: object, vocab_size: int, most: int) -> None:
    for entry in _sequence(name, value, most):
        _token_id(name, entry, vocab_size)


def _token_id(name: str, value: object, vocab_size: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise BadRequest(f"{name} contains {_shown(value)}; token ids are integers from 0 to {vocab_size - 1}.", name)


def _check_stops(params: SamplingParams) -> None:
    for stop in _strings("stop", [params.stop] if isinstance(params.stop, str) else params.stop, MAX_STOPS):
        if len(stop) > MAX_STOP_CHARACTERS:
            raise BadRequest(
                f"a stop string has {len(stop)} characters; the limit is {MAX_STOP_CHARACTERS}. Shorten it.", "stop"
            )


def _check_bias(params: SamplingParams, vocab_size: int) -> None:
    if not isinstance(params.logit_bias, dict):
        raise BadRequest(f"logit_bias is {_shown(params.logit_bias)}; it must map token ids to numbers.", "logit_bias")
    if len(params.logit_bias) > MAX_BIASES:
        raise BadRequest(
            f"logit_bias has {len(params.logit_bias)} entries; the limit is {MAX_BIASES}. Send fewer.", "logit_bias"
        )
    for token, bias in params.logit_bias.items():
        _token_id("logit_bias", token, vocab_size)
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not math.isfinite(bias):
            raise BadRequest(
                f"logit_bias of token {token} is {_shown(bias)}; it must be a finite number.", "logit_bias"
            )


def _check_allowed(allowed: object, vocab_size: int, rules: TokenRules) -> None:
    if allowed is None:
        return
    _token_ids("allowed_token_ids", allowed, vocab_size, vocab_size)
    banned = frozenset(rules.banned)
    if all(entry in banned for entry in _sequence("allowed_token_ids", allowed, vocab_size)):
        raise BadRequest(
            "allowed_token_ids leaves no token that may be generated; name at least one ordinary token id.",
            "allowed_token_ids",
        )
