"""What a row under rules may say next: messages by their control tokens, the text inside them by grammars.

A guide follows one row's tokens. It is rebuilt from them when a row resumes, so it has no state that could be lost.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from inkcap.base.masks import Mask, Matcher
from inkcap.base.matching import Compiler
from inkcap.base.room import WORDS
from inkcap.base.turn import Start, TurnRules
from inkcap.base.vocabulary import (
    CALL_JSON,
    CALL_TEXT,
    END_MESSAGE,
    END_TURN,
    KINDS,
    MODEL,
    ORDINARY,
    STOP_TOKENS,
    TEXT,
    THINKING,
)

LAST_TEXT_WORD = ORDINARY // 32  # the word in which ordinary tokens end and control tokens begin
LAST_TEXT_BITS = np.uint32((1 << ORDINARY % 32) - 1)
# States. After a call of a free turn that may have no more, a turn is OVER.
BETWEEN, HEADER, BODY, RAW, OVER = range(5)
# A call that names no declared tool, in a turn that is not strict.
ANY_CALL = (
    'start: "{\\"name\\":\\"" NAME "\\",\\"args\\":" args "}"\n'
    "NAME: /[A-Za-z0-9_.-]{1,64}/\n"
    'args: %json {"type": "object", "x-guidance": {"whitespace_flexible": false}}\n'
)


def only(tokens: Iterable[int], text: bool = False) -> Mask:
    """The mask that allows `tokens`, and with `text` every ordinary token."""
    mask = np.zeros(WORDS, np.uint32)
    if text:
        mask[:LAST_TEXT_WORD] = 0xFFFFFFFF
        mask[LAST_TEXT_WORD] = LAST_TEXT_BITS
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask


class Masks:
    """Masks that do not depend on a text, each made once."""

    def __init__(self) -> None:
        self._allowed: dict[tuple[int, ...], Mask] = {}
        self._refused: dict[tuple[int, ...], Mask] = {}
        self.message = only((END_MESSAGE,), text=True)

    def only(self, *tokens: int) -> Mask:
        """Allows `tokens`."""
        found = self._allowed.get(tokens)
        if found is None:
            if len(self._allowed) > 256:  # names of tools are without number
                self._allowed.clear()
            found = self._allowed[tokens] = only(tokens)
        return found

    def all_but(self, *tokens: int) -> Mask:
        """Allows everything but `tokens`."""
        found = self._refused.get(tokens)
        if found is None:
            found = self._refused[tokens] = ~only(tokens)
        return found


class Guide:
    """One row's place in its turn. `advance` takes its tokens; `allowed` says what may come next."""

    def __init__(self, rules: TurnRules, compiler: Compiler, masks: Masks) -> None:
        self.rules = rules
        self.failed = ""  # why the row cannot go on under its rules
        self._compiler = compiler
        self._masks = masks
        self._calls = 0
        self._answered = False  # a strict turn has its text
        self._thought = False  # a strict turn has had its thinking message
        self._thinking = 0  # tokens so far
        self._forced = False  # thinking was cut off; an answer has to come
        self._header = b""  # ordinary text after the role token
        self._kind = TEXT
        self.matcher: Matcher | None = None  # of the open message
        self._state = {Start.BETWEEN: BETWEEN, Start.HEADER: HEADER, Start.RAW: RAW}.get(rules.start, BODY)
        if self._state == BODY:
            self._kind = THINKING if rules.start == Start.THINKING else TEXT
        if rules.start == Start.RAW and rules.text:
            self.matcher = compiler.matcher(rules.text)

    def begin(self) -> None:
        """Have the grammars compiled that this row will need."""
        for grammar in (self.rules.text, *self.rules.calls.values()):
            if grammar:
                self._compiler.begin(grammar)

    def advance(self, token: int) -> None:
        """The row's next token."""
        if self._state in (BODY, RAW):
            self._inside(token)
        elif token in STOP_TOKENS:
            self._state = OVER
        elif token in KINDS:
            self._open(token)
        elif token == MODEL:
            self._state, self._header = HEADER, b""
        elif token == END_MESSAGE:
            self._state, self._header = BETWEEN, b""
        else:
            self._state, self._forced = HEADER, False
            self._header += self._compiler.pieces[token] if token < ORDINARY else b"\xff"

    def _inside(self, token: int) -> None:
        if token in STOP_TOKENS or (token == END_MESSAGE and self._state == BODY):
            self._close(token)
        elif self.matcher is not None:
            if not self.matcher.consume(token):
                self.failed = self.matcher.error
        elif self._kind == THINKING:
            self._thinking += 1

    def _open(self, kind: int) -> None:
        self._state, self._kind, self._forced = BODY, kind, False
        if kind == CALL_JSON:
            name = self._header.decode("utf-8", "replace")
            self.matcher = self._compiler.matcher(self.rules.calls.get(name, ANY_CALL))
        elif kind == TEXT and self.rules.text:
            self.matcher = self._compiler.matcher(self.rules.text)
        if self.matcher is not None:
            self.failed = self.matcher.error
        self._header = b""

    def _close(self, token: int) -> None:
        self.matcher = None
        self._calls += self._kind == CALL_JSON
        self._answered = self._answered or self._kind == TEXT
        self._thought = self._thought or self._kind == THINKING
        self._forced = self._kind == THINKING and self._spent
        self._state = OVER if token in STOP_TOKENS else BETWEEN

    @property
    def _spent(self) -> bool:
        """Whether the turn has had all the thinking it may have."""
        return self.rules.thinking is not None and self._thinking >= self.rules.thinking

    @property
    def _calls_left(self) -> bool:
        return self.rules.most_calls is None or self._calls < self.rules.most_calls

    @property
    def raw(self) -> bool:
        """Whether the turn is one text, without messages."""
        return self._state == RAW

    def allowed(self) -> Mask | None:
        """What may come next, but for texts under a grammar (`matcher`); None: anything."""
        masks = self._masks
        if self._state == OVER:
            return masks.only(END_TURN)
        if self._state == RAW:
            return None
        if self._state == BODY:
            if self._kind == THINKING and self._spent:
                return masks.only(END_MESSAGE)
            return masks.message if self.rules.strict else None
        return self._strict() if self.rules.strict else self._free()

    def _strict(self) -> Mask:
        rules, masks = self.rules, self._masks
        calls = self._calls_left and bool(rules.calls) and not self._answered
        if self._state == BETWEEN:
            more = calls or (rules.texts and not self._answered and not self._calls)
            over = self._answered or (self._calls >= rules.least_calls and self._calls > 0)
            return masks.only(*((MODEL,) if more else ()), *((END_TURN,) if over or not more else ()))
        names = [name for name in map(str.encode, rules.calls) if name.startswith(self._header)] if calls else []
        rests = tuple(name[len(self._header) :] for name in names)
        tokens = self._compiler.spelling(tuple(rest for rest in rests if rest))
        if b"" in rests:
            tokens += (CALL_JSON,)
        if not self._header:
            if not self._thought and not self._calls and not self._spent:
                tokens += (THINKING,)
            if rules.texts and not self._calls:
                tokens += (TEXT,)
        return masks.only(*tokens)

    def _free(self) -> Mask | None:
        rules, masks = self.rules, self._masks
        if self._state == BETWEEN:
            if self._calls and not self._calls_left:
                return masks.only(END_TURN)
            if self._forced:
                return masks.only(MODEL)
        refused = (THINKING,) if self._spent else ()
        if self._forced:
            refused += (END_MESSAGE, *STOP_TOKENS)
        if rules.most_calls == 0:
            refused += (CALL_JSON, CALL_TEXT)
        elif rules.closed:
            named = self._header.decode("utf-8", "replace") in rules.calls
            refused += (CALL_TEXT,) if named else (CALL_JSON, CALL_TEXT)
        return masks.all_but(*refused) if refused else None


def end_texts(texts: Sequence[tuple[int, Guide]], masks: NDArray[np.uint32]) -> None:
    """Finish masks of matchers: a text may end where its grammar is complete, and has no control token.

    `texts`: a row of masks [n, WORDS], and the guide whose matcher filled it.
    """
    rows = [row for row, _ in texts]
    masks[rows, LAST_TEXT_WORD] &= LAST_TEXT_BITS
    masks[rows, LAST_TEXT_WORD + 1 :] = 0
    for row, guide in texts:
        assert guide.matcher is not None, "no text under a grammar is open"
        if guide.matcher.accepting:
            end = END_TURN if guide.raw else END_MESSAGE
            masks[row, end // 32] |= np.uint32(1 << end % 32)
        else:
            guide.failed = guide.matcher.error  # a grammar that allows no token here, or a limit
