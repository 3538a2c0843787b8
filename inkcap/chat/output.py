"""From the engine's tokens to what a client sees: the one stage that the server and the offline API share."""

from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from inkcap.base.request import Finish, Logprobs, SamplingParams, TokenDelta
from inkcap.base.turn import Start
from inkcap.chat.detok import Detokenizer
from inkcap.chat.parse import Content, Event, Parser, Thought
from inkcap.chat.render import Rendered
from inkcap.chat.stops import StopStrings
from inkcap.chat.tokens import STOP_TOKENS, Tokenizer
from inkcap.chat.tools import Call, CallPiece, CallStart


class TokenChance(Struct, frozen=True):
    """One token with its log-probability. `bytes` are the token's, also when they are only a part of a character."""

    token: str
    logprob: float
    bytes: list[int]
    token_id: int


class TokenLogprob(Struct, frozen=True):
    """One position. `top` holds the alternatives from likely to unlikely."""

    chosen: TokenChance
    rank: int  # of the chosen token, 1 = most likely
    top: list[TokenChance]
    offset: int  # characters of text before this token


class TextDelta(Struct, frozen=True):
    """What a TokenDelta adds to a raw completion."""

    text: str
    tokens: list[int]  # those that count: up to the one that completed a stop string
    logprobs: list[TokenLogprob] | None = None  # one per token in `tokens`, when asked for
    finish_reason: str | None = None  # stop, length, abort, error
    stop_reason: int | str | None = None  # the requested stop id or string that ended it
    abort: bool = False  # the text has ended but the engine does not know: abort the sequence
    error: str | None = None


class ChatDelta(Struct, frozen=True):
    """What a TokenDelta adds to a chat answer. As TextDelta, with events for text."""

    events: list[Event]
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None  # also tool_calls
    stop_reason: int | str | None = None
    abort: bool = False
    error: str | None = None


class LogprobReader:
    """Token ids and log-probabilities of one sequence, in order, to entries with strings, bytes and offsets."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special: bool = True, offset: int = 0, show_ids: bool = False
    ) -> None:
        """`offset`: characters before the first token. `show_ids`: tokens are shown as `token_id:17`."""
        self._table = tokenizer.token_bytes
        self._detokenizer = Detokenizer(tokenizer, skip_special)
        self._offset = offset
        self._show_ids = show_ids

    def read(self, tokens: Sequence[int], logprobs: Sequence[Logprobs | None]) -> list[TokenLogprob | None]:
        """One entry per token; None where there is no log-probability, as at the first token of a prompt."""
        entries: list[TokenLogprob | None] = []
        for token, given in zip(tokens, logprobs, strict=True):
            if given is None:
                entries.append(None)
            else:
                chances = [self._chance(*pair) for pair in zip(given.token_ids, given.logprobs, strict=True)]
                entries.append(TokenLogprob(chances[0], given.rank, chances[1:], self._offset))
            self._offset += len(self._detokenizer.feed((token,)))
        return entries

    def _chance(self, token: int, logprob: float) -> TokenChance:
        piece = self._table[token]
        shown = f"token_id:{token}" if self._show_ids else piece.decode("utf-8", "replace")
        return TokenChance(shown, logprob, list(piece), token)


class _Counted:
    """What raw and chat output have in common: counters, log-probabilities, the end."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, show_ids: bool, offset: int) -> None:
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finished = False
        stops = [params.stop] if isinstance(params.stop, str) else params.stop
        self._stops = StopStrings(stops, params.include_stop_str_in_output) if stops else None
        self._params = params
        self._reader = None
        if params.logprobs is not None:
            self._reader = LogprobReader(tokenizer, params.skip_special_tokens, offset, show_ids)

    def _filter(self, text: str) -> str:
        """Text after stop strings were looked for. Before `min_tokens` they do not count."""
        if self._stops is None:
            return text
        if self.completion_tokens < self._params.min_tokens:
            return self._stops.flush() + text
        return self._stops.feed(text)

    def _matched(self) -> str | None:
        return self._stops.matched if self._stops is not None else None

    def _logprobs(self, delta: TokenDelta, count: int) -> list[TokenLogprob] | None:
        if self._reader is None or delta.logprobs is None:
            return None
        entries = self._reader.read(delta.tokens[:count], delta.logprobs[:count])
        return [entry for entry in entries if entry is not None]

    def _stop_reason(self, delta: TokenDelta) -> int | str | None:
        if (matched := self._matched()) is not None:
            return matched
        requested = delta.stop_token in self._params.stop_token_ids
        return delta.stop_token if requested and delta.stop_token not in STOP_TOKENS else None


class TextOutput(_Counted):
    """A raw completion: text of its tokens, ended by stop strings or by the engine."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, show_ids: bool = False, offset: int = 0) -> None:
        """`show_ids`: log-probabilities name tokens as `token_id:17`. `offset`: characters of an echoed prompt."""
        super().__init__(tokenizer, params, show_ids, offset)
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)

    def feed(self, delta: TokenDelta) -> TextDelta:
        """The next delta of the sequence. After the end everything is empty."""
        if self.finished:
            return TextDelta("", [])
        self.cached_tokens = delta.cached_tokens or self.cached_tokens
        tokens, last = delta.tokens, len(delta.tokens)
        # The token that stopped it counts but is not text, unless the request wants to see what stopped it.
        if delta.stop_token is not None and not self._params.include_stop_str_in_output:
            last -= 1
        pieces: list[str] = []
        count = len(tokens)
        if self._stops is None:
            self.completion_tokens += count
            pieces.append(self._detokenizer.feed(tokens[:last]))
        else:
            for i, token in enumerate(tokens):
                self.completion_tokens += 1
                if i < last:
                    pieces.append(self._filter(self._detokenizer.feed((token,))))
                if self._stops.matched is not None:
                    count = i + 1
                    break
        if self._matched() is None and delta.finish is not None:
            pieces.append(self._filter(self._detokenizer.flush()))
            if self._stops is not None and self._stops.matched is None:
                pieces.append(self._stops.flush())
        matched = self._matched() is not None
        self.finished = matched or delta.finish is not None
        return TextDelta(
            text="".join(pieces),
            tokens=tokens[:count],
            logprobs=self._logprobs(delta, count),
            finish_reason="stop" if matched else delta.finish.value if delta.finish is not None else None,
            stop_reason=self._stop_reason(delta) if self.finished else None,
            abort=matched and delta.finish is None,
            error=delta.error,
        )


class ChatOutput(_Counted):
    """A chat answer: thinking, text and calls. Stop strings are looked for in the text only, never in thinking.

    `parser` has the counters of what was found; `reasoning_tokens` belongs to the usage.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt: Rendered | None = None,
        show_ids: bool = False,
        stream_calls: bool = False,
    ) -> None:
        """`prompt` says where parsing begins and which tools exist; `stream_calls` is the parser's."""
        super().__init__(tokenizer, params, show_ids, 0)
        start, names = (prompt.start, prompt.tool_names) if prompt is not None else (Start.BETWEEN, ())
        self.parser = Parser(tokenizer, start, names, params.ignore_eos, stream_calls)
        self.answer = Answer()  # what has been said so far
        self.tokens: list[int] = []  # with which

    @property
    def reasoning_tokens(self) -> int:
        return self.parser.reasoning_tokens

    def feed(self, delta: TokenDelta) -> ChatDelta:
        """The next delta of the sequence. After the end everything is empty."""
        if self.finished:
            return ChatDelta([], [])
        self.cached_tokens = delta.cached_tokens or self.cached_tokens
        tokens, last = delta.tokens, len(delta.tokens)
        # A stop id of the request is no part of the answer; the grammar's own are the parser's to read.
        if delta.stop_token is not None and delta.stop_token not in STOP_TOKENS:
            last -= 1
        events: list[Event] = []
        count = len(tokens)
        if self._stops is None and last == count:
            self.completion_tokens += count
            events = self.parser.feed(tokens)
        else:
            for i, token in enumerate(tokens):
                self.completion_tokens += 1
                if i < last:
                    self._add(events, self.parser.feed((token,)))
                if self._matched() is not None or self.parser.ended:
                    count = i + 1
                    break
        ended = self._matched() is not None or self.parser.ended
        if ended or delta.finish is not None:
            self._end(events)
            self.finished = True
        self.answer.add(events)
        self.tokens += tokens[:count]
        return ChatDelta(
            events=events,
            tokens=tokens[:count],
            logprobs=self._logprobs(delta, count),
            finish_reason=self._reason(delta) if self.finished else None,
            stop_reason=self._stop_reason(delta) if self.finished else None,
            abort=ended and delta.finish is None,
            error=delta.error,
        )

    def _add(self, events: list[Event], new: Iterable[Event]) -> None:
        """Append what stop strings leave of `new`."""
        for event in new:
            if isinstance(event, Content):
                _append(events, Content(self._filter(event.text)))
            elif self._matched() is None:
                _append(events, event)

    def _end(self, events: list[Event]) -> None:
        if self._matched() is not None:
            return
        self._add(events, self.parser.finish())
        if self._stops is not None and self._stops.matched is None:
            _append(events, Content(self._stops.flush()))

    def _reason(self, delta: TokenDelta) -> str:
        if self._matched() is not None:
            return "stop"
        if delta.finish is None or delta.finish == Finish.STOP:
            by_request = delta.stop_token is not None and delta.stop_token not in STOP_TOKENS
            return "tool_calls" if self.parser.calls and not by_request else "stop"
        return delta.finish.value


def _append(events: list[Event], event: Event) -> None:
    """Pieces of the same kind in a row become one; empty ones are left out."""
    last = events[-1] if events else None
    if isinstance(event, Call | CallStart):
        events.append(event)
    elif not event.text:
        return
    elif isinstance(last, CallPiece) and isinstance(event, CallPiece) and last.index == event.index:
        events[-1] = CallPiece(event.index, last.text + event.text)
    elif isinstance(last, Content) and isinstance(event, Content):
        events[-1] = Content(last.text + event.text)
    elif isinstance(last, Thought) and isinstance(event, Thought):
        events[-1] = Thought(last.text + event.text)
    else:
        events.append(event)


class Answer:
    """A chat answer put together from its events."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Content):
                self._content.append(event.text)
            elif isinstance(event, Thought):
                self._reasoning.append(event.text)
            elif isinstance(event, CallStart):
                self.calls.append(Call(event.index, event.id, event.name, ""))
            elif isinstance(event, CallPiece):
                call = self.calls[-1]
                self.calls[-1] = replace(call, arguments=call.arguments + event.text)
            else:
                self.calls.append(event)

    @property
    def content(self) -> str | None:
        """None when there are only calls or only reasoning."""
        return "".join(self._content) or None

    @property
    def reasoning(self) -> str | None:
        return "".join(self._reasoning) or None
