"""What a caller asks for and what comes back, as plain data that crosses the process border (msgpack)."""

from enum import StrEnum

from msgspec import Struct, field

from inkcap.base.turn import TurnRules


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to continue a prompt. Names and defaults follow the field's offline APIs.

    `bad_words` and `stop` are strings; the client turns `bad_words` into `GenerateRequest.bad_words_ids` and applies
    `stop` to the text itself, so the engine sees token ids only. Ranges are checked by `base.sampling.check`.
    """

    n: int = 1
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = field(default_factory=list)
    max_tokens: int | None = 16  # None: what the context leaves
    min_tokens: int = 0
    stop: list[str] | str = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None  # None: drawn by the client, so that a request is replayable from its log line
    logprobs: int | None = None  # number of alternatives per token; 0: the sampled token only
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """One sequence to continue. `n > 1` is several of these, made by the client."""

    request_id: str
    token_ids: list[int]  # at least one
    params: SamplingParams
    seed: int  # 0 <= seed < 2**63
    max_tokens: int  # resolved: len(token_ids) + max_tokens <= the engine's max_length
    bad_words_ids: list[list[int]] = field(default_factory=list)
    rules: TurnRules | None = None  # what the answer may be; None: anything
    priority: int = 0  # smaller goes first
    salt: str = ""  # separates prefix-cache contents: tenant, adapter, media
    arrival: float = 0.0  # time.time() at the client


class Finish(StrEnum):
    """Why a sequence ended, as seen by the engine. Stop strings are the client's business."""

    STOP = "stop"  # a stop token; the token is the last of the delta
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"
    ERROR = "error"


class Logprobs(Struct, frozen=True, array_like=True):
    """One position: the token itself first, then the alternatives from likely to unlikely."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # rank of the token itself, 1 = most likely


class TokenDelta(Struct, frozen=True, array_like=True):
    """What one step adds to one sequence."""

    request_id: str
    tokens: list[int]
    logprobs: list[Logprobs] | None = None  # one per token when asked for
    finish: Finish | None = None
    stop_token: int | None = None  # the stop token that ended it
    cached_tokens: int | None = None  # on the first delta: prompt tokens found in the prefix cache
    prompt_logprobs: list[Logprobs | None] | None = None  # on the first delta when asked for; [0] is None
    error: str | None = None  # with Finish.ERROR
    queue_seconds: float | None = None  # on the first delta: from arrival until the first step that works on it
    preemptions: int = 0  # since the last delta: how often it lost its place and waited again


class EngineInfo(Struct, frozen=True, kw_only=True):
    """What the engine tells a client once it can serve."""

    max_length: int  # tokens, prompt and answer together
    vocab_size: int  # ids below this exist
    rows: int  # sequences that run at once
    step_tokens: int  # tokens of one step
    dtype: str
    cache_dtype: str  # of keys and values
    device: str
    family: str
    cache_groups: dict[str, int]  # blocks that each group would have if the whole cache were its own


STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens of a step


class EngineStats(Struct, frozen=True, kw_only=True):
    """Counters since start and gauges of now; the server turns them into Prometheus text."""

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0  # part that running sequences hold
    group_usage: dict[str, float] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    steps: int = 0
    step_tokens: int = 0  # tokens run in all steps
    step_sizes: list[int] = field(default_factory=list)  # steps by their tokens: up to each of STEP_BOUNDS, and above
    step_seconds: float = 0.0
    finished: dict[str, int] = field(default_factory=dict)  # by Finish
