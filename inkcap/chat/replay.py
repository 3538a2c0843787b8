"""Exact-token replay: answers come back from clients as text; here they become the very tokens that were sampled.

Rendering an answer anew gives other tokens where a client wrote the arguments of a call in its own way, and where the
model split words unlike the tokenizer does. Then the cached state of everything behind that place is lost.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256

import msgspec

from inkcap.base.vocabulary import END_MESSAGE, END_TURN, KINDS, MODEL, ROLES, STOP_TOKENS, THINKING
from inkcap.chat.tools import Call

KEPT_TOKENS = 4_000_000  # of all answers together
Key = tuple[bytes, bytes]


class Prefix:
    """The hash of the tokens of a conversation so far, which only grow."""

    def __init__(self, salt: str = "") -> None:
        self._hash = sha256(salt.encode() + b"\0")
        self._done = 0

    def digest(self, ids: Sequence[int]) -> bytes:
        """Of `ids`, which begin with those of the last call."""
        self._hash.update(array("I", ids[self._done :]).tobytes())
        self._done = len(ids)
        return self._hash.digest()


def canonical(reasoning: str, content: str, calls: Iterable[tuple[str, object]]) -> bytes:
    """One form for all spellings of an answer; `calls`: names, and arguments as JSON values."""
    made = msgspec.json.encode([reasoning, content, list(calls)], order="sorted")
    return sha256(made).digest()


class Replays:
    """Answers by what came before them and what they say. Bounded; the least recently used go first.

    An answer is kept twice, for clients that give its thinking back and for those, the most, that leave it out.
    """

    def __init__(self, most_tokens: int = KEPT_TOKENS, hidden: bool = False) -> None:
        """`hidden`: thinking that a client left out comes back all the same."""
        self._most = most_tokens
        self._hidden = hidden
        self._kept: OrderedDict[Key, array[int]] = OrderedDict()
        self._tokens = 0

    def add(
        self,
        prompt: Sequence[int],
        sampled: Sequence[int],
        reasoning: str,
        content: str,
        calls: Sequence[Call],
        salt: str = "",
    ) -> None:
        """Keep an answer to `prompt`, which may end with the model's role token. `sampled`: all its tokens."""
        ids = list(sampled)
        if prompt and prompt[-1] == MODEL:
            prompt, ids = prompt[:-1], [MODEL, *ids]
        if not ids or ids[0] != MODEL or any(token in ROLES for token in ids if token != MODEL):
            return  # it began inside a message, or without one: rendering it anew is as good
        try:
            said = [(call.name, msgspec.json.decode(call.arguments)) for call in calls]
        except msgspec.DecodeError:
            return
        before = Prefix(salt).digest(prompt)
        whole = closed(ids)
        self._keep((before, canonical(reasoning, content, said)), whole)
        if reasoning:
            self._keep((before, canonical("", content, said)), whole if self._hidden else without_thinking(whole))

    def find(self, before: bytes, answer: bytes) -> list[int] | None:
        """The tokens of an answer, its end of turn included."""
        found = self._kept.get((before, answer))
        if found is None:
            return None
        self._kept.move_to_end((before, answer))
        return found.tolist()

    def _keep(self, key: Key, ids: list[int]) -> None:
        if (old := self._kept.pop(key, None)) is not None:
            self._tokens -= len(old)
        self._kept[key] = array("I", ids)
        self._tokens += len(ids)
        while self._tokens > self._most:
            _, gone = self._kept.popitem(last=False)
            self._tokens -= len(gone)


def closed(ids: Sequence[int]) -> list[int]:
    """An answer with an end: one that was cut off gets what is missing."""
    ids = list(ids)
    while ids and ids[-1] in STOP_TOKENS:
        ids.pop()
    if ids and ids[-1] != END_MESSAGE:
        ids.append(END_MESSAGE)
    return [*ids, END_TURN]


def without_thinking(ids: Sequence[int]) -> list[int]:
    """The messages of a closed answer but for its thinking."""
    kept: list[int] = []
    message: list[int] = []
    thinking = inside = False
    for token in ids:
        message.append(token)
        if not inside and token in KINDS:
            inside, thinking = True, token == THINKING
        elif token in (END_MESSAGE, END_TURN):
            if not thinking:
                kept += message
            message, inside, thinking = [], False, False
    return kept + message


def said_by(message: Mapping[str, object]) -> bytes | None:
    """The canonical form of an assistant message as clients send it; None where it has parts no answer has."""
    reasoning = message.get("reasoning") if message.get("reasoning") is not None else message.get("reasoning_content")
    content, calls = message.get("content"), message.get("tool_calls") or []
    if message.get("refusal") or message.get("function_call") or not isinstance(calls, list):
        return None
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if not all(isinstance(text, str) for text in texts):
            return None
        content = "".join(map(str, texts))
    said: list[tuple[str, object]] = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        name, arguments = (
            (function.get("name"), function.get("arguments")) if isinstance(function, Mapping) else (None, None)
        )
        if not isinstance(name, str):
            return None
        if isinstance(arguments, str):
            try:
                arguments = msgspec.json.decode(arguments or "{}")
            except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
                return None
        said.append((name, arguments))
    if not isinstance(reasoning, str | None) or not isinstance(content, str | None):
        return None
    try:
        return canonical(reasoning or "", content or "", said)
    except (UnicodeEncodeError, RecursionError, ValueError):
        return None
