"""Request bodies. A field that is wrong is a 400 naming its path; an unknown field is accepted and logged once.

Types stand here; the ranges of sampling parameters are checked by `base.sampling`, for every way in.
"""

from typing import Annotated, Any

from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field

from inkcap.base.errors import BadRequest, NotBuiltYet
from inkcap.base.request import SamplingParams

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]  # goes to the engine as it is: any int would not fit a message
Effort = str | float | None
COMPLETION_TOKENS = 16  # of a text completion that does not say
MOST_PROMPTS = 4096  # prompts of one request


class Body(BaseModel):
    """Root of the bodies."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())

    def unknown(self) -> list[str]:
        return list(self.model_extra or {})


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Sampled(Body):
    """What chat and text completions have in common. None means: not given."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    priority: Int32 = 0
    request_id: Annotated[str, Field(pattern="^[A-Za-z0-9_.:-]{1,128}$")] | None = None
    cache_salt: Annotated[str, Field(max_length=128)] | None = None
    use_beam_search: bool = False
    # accepted and of no effect
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    documents: list[Any] | None = None
    add_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None

    def sampling(self, defaults: dict[str, Any], max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Sampling parameters, unchecked: the body's, else the checkpoint's defaults, else the API's.

        `max_tokens` is the API's default; `logprobs` is the number of alternatives the body asks for.
        """
        names = (
            "n",
            "max_tokens",
            "min_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
        )
        names += ("repetition_penalty", "stop", "stop_token_ids", "allowed_token_ids", "bad_words", "prompt_logprobs")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **{"max_tokens": max_tokens, **defaults, **given},
            logprobs=logprobs,
            seed=None if self.seed == -1 else self.seed,
            logit_bias=self.biases(),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
        )

    def biases(self) -> dict[int, float]:
        biases = {}
        for key, value in (self.logit_bias or {}).items():
            if not (key.isascii() and key.isdecimal() and len(key) < 10):
                raise BadRequest(f"logit_bias has the key {key[:20]!r}; keys are token ids, as digits", "logit_bias")
            biases[int(key)] = value
        return biases

    def formats(self) -> dict[str, object]:
        """The fields that say what form an answer's text has."""
        names = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice")
        return {name: getattr(self, name) for name in (*names, "guided_grammar")}

    def refuse_unbuilt(self) -> None:
        """Raise NotBuiltYet for the first feature this version lacks, BadRequest for fields in contradiction."""
        if self.use_beam_search:
            raise NotBuiltYet("beam search is not built", "use_beam_search")
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is given but stream is false; leave it out or stream", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise BadRequest("prompt_logprobs cannot be streamed; set stream to false", "prompt_logprobs")


class ChatBody(Sampled):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: Effort = None
    include_reasoning: bool = True
    thinking_token_budget: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: bool = False
    mm_processor_kwargs: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None

    def refuse_unbuilt(self) -> None:
        super().refuse_unbuilt()
        if self.chat_template is not None:
            raise BadRequest("chat_template cannot be set: the server renders the model's own format", "chat_template")
        if self.functions is not None and self.tools is not None:
            raise BadRequest("functions and tools are given; functions is the older name, use tools", "functions")
        for name in ("mm_processor_kwargs", "audio"):
            if getattr(self, name) is not None:
                raise NotBuiltYet(f"{name} is not built yet", name)
        if self.modalities not in (None, ["text"]):
            raise NotBuiltYet("modalities other than text are not built", "modalities")
        if self.echo:
            raise NotBuiltYet("echo is not built for chat; /v1/completions has it", "echo")
        if self.add_generation_prompt and self.continue_final_message:
            raise BadRequest(
                "continue_final_message needs add_generation_prompt: false; both are true", "continue_final_message"
            )
        if self.top_logprobs not in (None, 0) and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")

    def adopt_functions(self) -> bool:
        """Turn `functions` and `function_call`, which came before tools, into tools; whether there were any."""
        if self.functions is None and self.function_call is None:
            return False
        if self.functions is not None:
            self.tools = [{"type": "function", "function": function} for function in self.functions]
            self.parallel_tool_calls = False  # a message has one function_call
        if isinstance(self.function_call, dict):
            self.tool_choice = {"type": "function", "function": self.function_call}
        elif self.function_call is not None:
            self.tool_choice = self.function_call
        return True

    def params(self, defaults: dict[str, Any]) -> SamplingParams:
        """Sampling parameters, unchecked."""
        params = self.sampling(defaults, None, (self.top_logprobs or 0) if self.logprobs else None)
        if self.max_completion_tokens is not None:
            params = replace(params, max_tokens=self.max_completion_tokens)
        return params


class CompletionBody(Sampled):
    """Body of `POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None

    def refuse_unbuilt(self) -> None:
        super().refuse_unbuilt()
        if self.suffix:
            raise NotBuiltYet("suffix is not built: the model does not fill in the middle", "suffix")
        if self.best_of not in (None, 1):
            raise NotBuiltYet("best_of is not built; use n", "best_of")

    def params(self, defaults: dict[str, Any]) -> SamplingParams:
        """Sampling parameters, unchecked. An echo with log-probabilities needs those of the prompt."""
        params = self.sampling(defaults, COMPLETION_TOKENS, self.logprobs)
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            params = replace(params, prompt_logprobs=self.logprobs)
        return params


class TokenizeBody(Body):
    """Body of `POST /tokenize`: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: Effort = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False
    add_special_tokens: bool | None = None


class DetokenizeBody(Body):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]
