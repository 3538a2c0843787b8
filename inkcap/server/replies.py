"""Response bodies and streamed chunks, encoded by msgspec. Fields a value leaves at its default may be absent."""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from inkcap.base.request import TokenDelta
from inkcap.chat.output import TokenChance, TokenLogprob

encode = msgspec.json.Encoder().encode


class CachedTokens(Struct):
    cached_tokens: int


class ReasoningTokens(Struct):
    reasoning_tokens: int


class Usage(Struct, omit_defaults=True):
    """Tokens of a request. The prompt counts once, however many answers it gets."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: ReasoningTokens | None = None


class TopToken(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(Struct):
    """One sampled id: thinking and control tokens are listed too, so the list is as long as the completion."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopToken]


class ChatLogprobs(Struct):
    content: list[ContentLogprob]


class CallFunction(Struct):
    name: str
    arguments: str


class CallArguments(Struct):
    """A later piece of a streamed call."""

    arguments: str


class ToolCall(Struct):
    id: str
    function: CallFunction
    type: str = "function"


class ToolCallDelta(Struct, omit_defaults=True):
    index: int
    function: CallFunction | CallArguments
    id: str | None = None
    type: str | None = None


class ChatStreamDelta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    function_call: CallFunction | CallArguments | None = None  # in answer to `functions`


class ChatStreamChoice(Struct):
    index: int
    delta: ChatStreamDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatMessage(Struct):
    content: str | None
    reasoning: str | None
    reasoning_content: str | None
    tool_calls: list[ToolCall]
    role: str = "assistant"
    refusal: None = None
    function_call: CallFunction | msgspec.UnsetType = msgspec.UNSET  # in answer to `functions`


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class PromptChance(Struct):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptChance] | None]


class ChatReply(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    service_tier: None = None
    system_fingerprint: None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class TextLogprobs(Struct):
    """Lists in step. `top_logprobs` has the token itself too; `text_offset` counts characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Struct):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class TextReply(Struct):
    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    object: str = "text_completion"
    system_fingerprint: None = None


MARK = "\0text"  # stands for a text in chunks that are encoded once


class Framer:
    """Puts choices of one stream into chunks. What all chunks share is encoded once."""

    def __init__(self, kind: str, identity: str, created: int, model: str, usage: bool) -> None:
        """`usage`: chunks say `"usage": null` until the last one has it."""
        shared = encode({"id": identity, "object": kind, "created": created, "model": model})
        self.head = b"data: " + shared[:-1] + b',"choices":'
        self.tail = b',"usage":null}\n\n' if usage else b"}\n\n"

    def chunk(self, choices: Sequence[ChatStreamChoice] | Sequence[TextChoice], usage: Usage | None = None) -> bytes:
        tail = self.tail if usage is None else b',"usage":' + encode(usage) + b"}\n\n"
        return self.head + encode(choices) + tail

    def around(self, choice: ChatStreamChoice) -> list[bytes]:
        """The chunk of a choice whose text is `MARK`, cut where that stands: joined by a JSON string, it says that."""
        return self.chunk([choice]).split(encode(MARK))


def usage_of(prompt: int, completion: int, cached: int, reasoning: int | None = None) -> Usage:
    details = None if reasoning is None else ReasoningTokens(reasoning)
    return Usage(prompt, completion, prompt + completion, CachedTokens(cached), details)


def merged(deltas: list[TokenDelta]) -> TokenDelta:
    """Several deltas of one sequence as one, for what makes text of them: times are not carried over."""
    if len(deltas) == 1:
        return deltas[0]
    first, last = deltas[0], deltas[-1]
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    return TokenDelta(
        last.request_id,
        [token for delta in deltas for token in delta.tokens],
        logprobs=logprobs if any(delta.logprobs is not None for delta in deltas) else None,
        finish=last.finish,
        stop_token=last.stop_token,
        cached_tokens=first.cached_tokens,
        prompt_logprobs=first.prompt_logprobs,
        error=last.error,
    )


def chat_logprobs(entries: list[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ContentLogprob(e.chosen.token, e.chosen.logprob, e.chosen.bytes, [_top(chance) for chance in e.top])
            for e in entries
        ]
    )


def _top(chance: TokenChance) -> TopToken:
    return TopToken(chance.token, chance.logprob, chance.bytes)


def text_logprobs(entries: Sequence[tuple[str, TokenLogprob | None]], base: int, offsets: list[int]) -> TextLogprobs:
    """`entries`: each token as a string, with its log-probability. `base` is added to each offset."""
    tops: list[dict[str, float] | None] = []
    for _, entry in entries:
        if entry is None:
            tops.append(None)
        else:
            top = {chance.token: chance.logprob for chance in entry.top}
            tops.append({**top, entry.chosen.token: entry.chosen.logprob})
    return TextLogprobs(
        [token for token, _ in entries],
        [None if entry is None else entry.chosen.logprob for _, entry in entries],
        tops,
        [base + offset for offset in offsets],
    )


def joined(parts: Sequence[TextLogprobs]) -> TextLogprobs:
    """Parts of one choice's log-probabilities, in order, as one."""
    whole = TextLogprobs([], [], [], [])
    for part in parts:
        whole.tokens += part.tokens
        whole.token_logprobs += part.token_logprobs
        whole.top_logprobs += part.top_logprobs
        whole.text_offset += part.text_offset
    return whole


def prompt_logprobs(entries: list[TokenLogprob | None]) -> PromptLogprobs:
    """As vLLM shows them: by token id, with rank and text."""
    shown: PromptLogprobs = []
    for entry in entries:
        if entry is None:
            shown.append(None)
            continue
        ranked = {str(c.token_id): PromptChance(c.logprob, i, c.token) for i, c in enumerate(entry.top, 1)}
        ranked[str(entry.chosen.token_id)] = PromptChance(entry.chosen.logprob, entry.rank, entry.chosen.token)
        shown.append(ranked)
    return shown
