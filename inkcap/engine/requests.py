"""From a prompt and its parameters to the sequences an engine runs: checks, limits, seeds. All callers use this."""

import hashlib
import time
from collections.abc import Callable, Sequence

from inkcap.base.errors import BadRequest, ContextTooLong
from inkcap.base.request import EngineInfo, GenerateRequest, SamplingParams
from inkcap.base.sampling import O200K_VOCABULARY, check
from inkcap.base.turn import TurnRules

SEED_LIMIT = 2**63
PLACEHOLDERS = {200053: "audio", 200054: "image"}  # one per frame or patch; only media may put them in a prompt


def expand(
    token_ids: Sequence[int],
    params: SamplingParams,
    *,
    info: EngineInfo,
    request_id: str,
    draw_seed: Callable[[], int],
    encode: Callable[[str], list[int]] | None = None,
    salt: str = "",
    priority: int = 0,
    max_logprobs: int = 20,
    rules: TurnRules | None = None,
) -> list[GenerateRequest]:
    """The `params.n` sequences that continue one prompt, in order of index.

    Their ids are `request_id`, or `request_id-INDEX` where `n` is more than 1. `draw_seed` gives a seed below 2**63
    where `params` has none (None or -1). Sequence 0 runs under the seed itself, the others under seeds made from it
    and their index. `encode` turns text into ids, for `params.bad_words`. `rules` say what the answers may be. Raises
    BadRequest and ContextTooLong.
    """
    check(params, info.vocab_size, max_logprobs=max_logprobs)
    if rules is not None and rules.strict and params.allowed_token_ids is not None:
        raise BadRequest(
            "allowed_token_ids cannot be combined with a format or a required call: they may leave no token",
            "allowed_token_ids",
        )
    if not token_ids:
        raise BadRequest("the prompt is empty; it needs at least one token", "prompt")
    max_tokens = resolve_max_tokens(len(token_ids), params, info)  # before anyone looks at a million ids
    ids = check_prompt(token_ids, info)
    seed = draw_seed() if params.seed in (None, -1) else params.seed % SEED_LIMIT
    bad_words = bad_words_ids(params.bad_words, encode) if params.bad_words else []
    arrival = time.time()
    return [
        GenerateRequest(
            request_id=request_id if params.n == 1 else f"{request_id}-{index}",
            token_ids=ids,
            params=params,
            seed=child_seed(seed, index),
            max_tokens=max_tokens,
            bad_words_ids=bad_words,
            rules=rules,
            priority=priority,
            salt=salt,
            arrival=arrival,
        )
        for index in range(params.n)
    ]


def child_seed(seed: int, index: int) -> int:
    """The seed of sequence `index` of a request: the same for the same two numbers, on every machine."""
    if index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % SEED_LIMIT


def bad_words_ids(words: Sequence[str], encode: Callable[[str], list[int]] | None) -> list[list[int]]:
    """Each word as it is written at the start of a text and after a space. Raises BadRequest without a tokenizer."""
    if encode is None:
        raise BadRequest("bad_words needs a tokenizer, and this engine runs without one; use logit_bias", "bad_words")
    found: list[list[int]] = []
    for word in words:
        bare = word.strip()
        for spelling in dict.fromkeys((word, bare, f" {bare}")):
            ids = encode(spelling) if spelling else []
            if ids and ids not in found:
                found.append(ids)
    return found


def check_prompt(token_ids: Sequence[int], info: EngineInfo) -> list[int]:
    """A prompt, not empty, as a list. Raises BadRequest for an id that it may not hold."""
    ids = list(token_ids)
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= info.vocab_size:
        at = next(i for i, token in enumerate(ids) if type(token) is not int or not 0 <= token < info.vocab_size)
        raise BadRequest(
            f"prompt token {at} is {ids[at]!r:.40}; token ids are integers from 0 to {info.vocab_size - 1:,}", "prompt"
        )
    if info.vocab_size == O200K_VOCABULARY:
        for token, medium in PLACEHOLDERS.items():
            if token in ids:
                raise BadRequest(
                    f"prompt token {ids.index(token)} is {token}, the {medium} placeholder, which a prompt of token "
                    f"ids may not contain; send the {medium} itself",
                    "prompt",
                )
    return ids


def resolve_max_tokens(length: int, params: SamplingParams, info: EngineInfo) -> int:
    """How many tokens a prompt of `length` tokens may be continued by. Raises ContextTooLong and BadRequest."""
    limit = info.max_length
    if length >= limit:
        raise ContextTooLong(
            f"prompt has {length:,} tokens; this engine accepts {limit:,} (model.max_length), of which one is needed "
            f"for the answer. Shorten it by {length - limit + 1:,} tokens or raise the limit.",
            "prompt",
        )
    if params.max_tokens is None:
        if params.min_tokens > limit - length:
            raise BadRequest(
                f"min_tokens is {params.min_tokens:,} but the prompt of {length:,} tokens leaves {limit - length:,} of "
                f"{limit:,}; lower min_tokens.",
                "min_tokens",
            )
        return limit - length
    total = length + params.max_tokens
    if total > limit:
        raise ContextTooLong(
            f"prompt has {length:,} tokens and max_tokens is {params.max_tokens:,}, together {total:,}; this engine "
            f"accepts {limit:,} (model.max_length). Shorten the prompt or lower max_tokens by {total - limit:,}, or "
            f"raise the limit.",
            "max_tokens",
        )
    return params.max_tokens
