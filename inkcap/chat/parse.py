"""The streaming parser: sampled token ids to thinking, text and tool calls. It never raises and never loses text.

It works on ids, never on text, since spellings of control tokens are legal text. The end-of-message token closes
every kind of message, so what is open follows from the last kind token alone.
"""

import re
from codecs import getincrementaldecoder
from collections.abc import Collection, Sequence

from msgspec import Struct

from inkcap.base.turn import Start
from inkcap.chat.tokens import (
    CALL_JSON,
    END_MESSAGE,
    KINDS,
    MODEL,
    ORDINARY,
    ROLES,
    STOP_TOKENS,
    TEXT,
    THINKING,
    Tokenizer,
)
from inkcap.chat.tools import ArgumentReader, Call, CallPiece, CallStart, new_call_id, read_call

_decoder = getincrementaldecoder("utf-8")
_NAME_SO_FAR = re.compile(rb"[A-Za-z0-9_.-]{1,128}")


class Thought(Struct, frozen=True):
    """A piece of reasoning."""

    text: str


class Content(Struct, frozen=True):
    """A piece of the answer."""

    text: str


Event = Thought | Content | Call | CallStart | CallPiece

# States. In BARE, text without a kind token streams as content; BODY is a message whose kind is known.
_BETWEEN, _HEADER, _BARE, _BODY = range(4)


class Parser:
    """One turn. Feed it ids as they come; concatenated events do not depend on where the stream is cut."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        start: Start = Start.BETWEEN,
        tools: Collection[str] = (),
        ignore_eos: bool = False,
        stream_calls: bool = False,
    ) -> None:
        """`tools`: declared names. `ignore_eos`: an end of turn is a border between messages, as in benchmarks.

        `stream_calls`: a grammar holds calls to their form, so their arguments may be told as they come.
        """
        self.ended = False  # the turn is over; later ids are ignored
        self.calls = 0
        self.reasoning_tokens = 0
        self.malformed_calls = 0
        self.undeclared_calls = 0
        self.bare_texts = 0  # texts without a kind token
        self._table = tokenizer.token_bytes
        self._tools = frozenset(tools)
        self._ignore_eos = ignore_eos
        self._stream_calls = stream_calls
        self._arguments: ArgumentReader | None = None  # of the open call, if it is told in pieces
        self._told = 0  # entries of `_bytes` that `_arguments` has read
        self._state = {Start.BETWEEN: _BETWEEN, Start.HEADER: _HEADER}.get(start, _BODY)
        self._kind = THINKING if start == Start.THINKING else TEXT
        self._header = b""  # ordinary text after a role token, while it may be a tool's name
        self._bytes: list[bytes] = []  # of the open message, not decoded yet
        self._decode = _decoder("replace").decode
        self._events: list[Event] = []

    def feed(self, tokens: Sequence[int]) -> list[Event]:
        """What `tokens` add. A call comes whole, when its message ends, or in pieces with `stream_calls`."""
        if self._state >= _BARE and self._kind != CALL_JSON and not self.ended and max(tokens, default=0) < ORDINARY:
            # most tokens of most answers: the same as below, in fewer steps
            if self._kind == THINKING:
                self.reasoning_tokens += len(tokens)
            text = self._decode(b"".join([self._table[token] for token in tokens]))
            return [(Thought if self._kind == THINKING else Content)(text)] if text else []
        for token in tokens:
            if self.ended:
                break
            if self._state == _BODY and token != END_MESSAGE and token not in STOP_TOKENS:
                # Other control tokens inside a message are spelled out, as the official parser does.
                self._bytes.append(self._table[token])
                if self._kind == THINKING:
                    self.reasoning_tokens += 1
            elif token < ORDINARY:
                self._ordinary(token)
            else:
                self._control(token)
        if self._kind != CALL_JSON:
            if self._bytes:
                self._drain(final=False)
        elif self._arguments is not None:
            self._tell(self._arguments, final=False)
        return self._take()

    def finish(self) -> list[Event]:
        """What is still held, when the stream ended anywhere."""
        self._close()
        self.ended = True
        return self._take()

    def _ordinary(self, token: int) -> None:
        """Text outside a message with a kind: a tool's name, or an answer given without one."""
        piece = self._table[token]
        if self._state == _BARE:
            self._bytes.append(piece)
            return
        self._state = _HEADER
        self._header += piece
        if not (self._tools and _NAME_SO_FAR.fullmatch(self._header)):
            self._release_header()

    def _control(self, token: int) -> None:
        if token in KINDS:
            if token != CALL_JSON and self._header:
                self._release_header()  # only calls are named; what stood here was text
            header, self._header = self._header, b""
            self._close()
            self._header = header
            self._state, self._kind = _BODY, token
            if token == CALL_JSON and self._stream_calls and header:
                self._arguments, self._told = ArgumentReader(header.decode("utf-8", "replace")), 0
        elif token in ROLES:
            self._close()
            self._state = _HEADER
            # A model that writes another role's message is making up the other side.
            self.ended = token != MODEL
        elif token == END_MESSAGE:
            self._close()
        elif token in STOP_TOKENS:
            self._close()
            self.ended = not self._ignore_eos
        else:
            self._ordinary(token)

    def _release_header(self) -> None:
        """The held name was text."""
        self._kind = TEXT
        self._bytes.append(self._header)
        self._header = b""
        self._state = _BARE
        self.bare_texts += 1

    def _close(self) -> None:
        """End whatever is open."""
        if self._state == _HEADER and self._header:
            self._release_header()
        if self._state == _BODY and self._kind == CALL_JSON:
            self._call()
        elif self._state in (_BODY, _BARE):
            self._drain(final=True)
        self._state = _BETWEEN

    def _tell(self, arguments: ArgumentReader, final: bool) -> None:
        """Tell what has come of a call's arguments."""
        begun, name = arguments.begun, self._header.decode("utf-8", "replace")
        data = arguments.feed(b"".join(self._bytes[self._told :]))
        self._told = len(self._bytes)
        if arguments.other:
            self._arguments = None
        elif arguments.begun:
            if not begun:
                self._events.append(CallStart(self.calls, new_call_id(), name))
                self.undeclared_calls += name not in self._tools
                self.calls += 1
            if text := self._decode(data, final):
                self._events.append(CallPiece(self.calls - 1, text))

    def _call(self) -> None:
        if self._arguments is not None:
            self._tell(self._arguments, final=True)
        told, self._arguments = self._arguments, None
        if told is not None and told.begun:
            self._header = b""
            self._bytes.clear()
            return
        header = self._header.decode("utf-8", "replace")
        payload = b"".join(self._bytes).decode("utf-8", "replace")
        self._header = b""
        self._bytes.clear()
        found = read_call(header, payload, self._tools)
        if found is None:
            self.malformed_calls += 1
            self._emit(Content, payload or header)
            return
        name, arguments = found
        self.undeclared_calls += name not in self._tools
        self._events.append(Call(self.calls, new_call_id(), name, arguments))
        self.calls += 1

    def _drain(self, final: bool) -> None:
        text = self._decode(b"".join(self._bytes), final)
        self._bytes.clear()
        self._emit(Thought if self._kind == THINKING else Content, text)

    def _emit(self, kind: type[Thought] | type[Content], text: str) -> None:
        if not text:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, Thought | Content) and type(last) is kind:
            self._events[-1] = kind(last.text + text)
        else:
            self._events.append(kind(text))

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events
