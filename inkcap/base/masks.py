"""The masks of texts in their grammars: walked by llguidance, or put together from what was walked before. No torch."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import llguidance
import numpy as np
from numpy.typing import NDArray

from inkcap.base.room import WORDS, Rooms

Mask = NDArray[np.uint32]  # [WORDS]: bit t is set if token t may come next
ROW_BYTES = WORDS * 4
KEPT_PLACES = 2048  # of which masks are kept: 50 MB at most
SEEN_PLACES = 100_000
LONGEST_PATH = 1024  # bytes
NUMBER, AFTER_NUMBER = b"0123456789+-.eE", b",]} \n\r\t"
SLOW_S = 200e-6  # a walk that takes longer is one of those that several threads share
SLOW_STEPS = 8  # for so many steps
LANES = min(8, os.cpu_count() or 1)
PUT_OFF = 64  # tokens of a string that a matcher may owe its grammar


class Compiled(NamedTuple):
    """A grammar: over all tokens and, if its strings have a witness, over those that have to be walked inside them."""

    number: int
    whole: llguidance.LLMatcher
    rest: llguidance.LLMatcher | None
    witness: list[int]  # one token, as often as rooms are told apart
    steady: bool  # what may follow a string does not depend on it


class Known(NamedTuple):
    """The mask of a place in a grammar."""

    mask: Mask
    room: int  # letters that the string there has room for, as far as that is told apart; 0: there is no such string


class Matcher:
    """Where one text is in one grammar."""

    __slots__ = (
        "_inner", "behind", "capped", "full", "grammar", "inside", "owed", "path", "rest", "room", "rooms", "slow"
    )  # fmt: skip

    def __init__(self, grammar: Compiled, rooms: Rooms) -> None:
        self.grammar = grammar
        self.rooms = rooms
        self._inner = grammar.whole.deep_copy()
        self.owed: list[int] = []  # letters inside a string, which `_inner` has not seen yet: they cannot be refused
        self.rest: llguidance.LLMatcher | None = None  # made when it is needed
        self.behind: list[int] = []  # tokens that `rest` has not seen yet
        # The text without what stands in strings and numbers that do not matter for what follows: texts of one path are
        # in the same place, but for the room that is left. None: not known.
        self.path: bytes | None = b""
        self.full = False  # in a string without room
        # In a string that may end, which is no key: what could come next when its room was larger, and the room now.
        self.inside: Mask | None = None
        self.room = 0
        self.capped = False  # there may be more room
        self.slow = 0  # steps for which walks are taken to be slow

    @property
    def inner(self) -> llguidance.LLMatcher:
        """The grammar's own matcher, which has seen all tokens."""
        if self.owed:
            self._inner.consume_tokens(self.owed)
            self.owed.clear()
        return self._inner

    def consume(self, token: int) -> bool:
        """Go on by one token. False: it may not come next, or a limit is reached, see `error`.

        Letters that fit into a string are put off: consumed one a step, each finds its grammar gone from the caches.
        """
        if self.grammar.rest is not None:
            self.behind.append(token)
        if self.inside is not None and (letters := self.rooms.letters[token]):
            self.room -= letters
            if self.room >= 0 and len(self.owed) < PUT_OFF:
                self.owed.append(token)
                return True
        else:
            if self.path is not None:
                tail = self.rooms.pieces[token] if self.inside is None else self.rooms.tails.get(token)
                self.path = self._onward(self.path, tail) if tail is not None else None
            self.inside, self.full = None, False
        return self.inner.consume_token(token)

    def _onward(self, path: bytes, tail: bytes) -> bytes | None:
        """The path after `tail`, in which a number that has ended counts like any other."""
        ended = path[-1:].isdigit() and tail[:1] in AFTER_NUMBER
        # with an odd number of quotes, or escaped ones, it may be in a key or a literal
        if ended and self.grammar.steady and path.count(b'"') % 2 == 0 and b"\\" not in path:
            path = path.rstrip(NUMBER) + b"0"
        return path + tail if len(path) < LONGEST_PATH else None

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""
        return not self.owed and self.inner.is_accepting()

    @property
    def error(self) -> str:
        """Why this matcher can say nothing any more; empty while it can."""
        return readable(self._inner.get_error()) if self._inner.is_error() else ""


Place = tuple[int, bytes | None, bool]


def place_of(matcher: Matcher) -> Place:
    """What tells places of grammars apart."""
    return matcher.grammar.number, matcher.path, matcher.full


class Filler:
    """Makes masks over one vocabulary."""

    def __init__(self, ranks: Mapping[bytes, int]) -> None:
        self.rooms = Rooms(ranks)
        self._bytes = [ranks[bytes((byte,))] for byte in range(256)]
        self._key = [self._bytes[byte] for byte in b'":']  # what ends a string if that is a key
        self._lanes = llguidance.LLExecutor(LANES)
        self._known: dict[Place, Known] = {}
        self._seen: set[int] = set()  # hashes of places that were walked once

    def fill(self, matchers: Sequence[tuple[Matcher, int]], masks: NDArray[np.uint32]) -> None:
        """Write masks to rows of masks [n, WORDS].

        One after another but for slow ones: handing quick ones to threads takes longer than they do.
        """
        assert masks.strides == (ROW_BYTES, 4), "rows of masks follow one another"
        fitting, longest = self.rooms.fitting, self.rooms.longest
        slow: list[tuple[Matcher, int]] = []
        for matcher, row in matchers:
            mask = masks[row]
            if matcher.inside is None or not self._has_room(matcher):
                known = None if matcher.path is None else self._known.get(place_of(matcher))
                if known is None and matcher.slow:
                    matcher.slow -= 1
                    slow.append((matcher, row))
                    continue
                if known is None:
                    self._walk(matcher, mask)
                    continue
                if not known.room:
                    mask[:] = known.mask
                    continue
                self._enter(matcher, known)
            assert matcher.inside is not None, "what has room is a string"
            np.bitwise_and(matcher.inside, fitting[min(matcher.room, longest)], out=mask)
        if slow:
            inner = [(matcher.inner, row) for matcher, row in slow]
            self._lanes.unsafe_compute_mask_ptr(inner, masks.ctypes.data, ROW_BYTES, len(masks))
            for matcher, row in slow:
                self._note(matcher, masks[row], 0)

    def _has_room(self, matcher: Matcher) -> bool:
        """Whether the string has room; if not, its end may be forced, which is not what could come before."""
        if matcher.capped and matcher.room < self.rooms.longest:
            matcher.room = matcher.inner.validate_tokens(matcher.grammar.witness)
            matcher.capped = matcher.room == len(matcher.grammar.witness)
        if matcher.room:
            return True
        matcher.inside, matcher.full = None, True
        return False

    def _enter(self, matcher: Matcher, string: Known) -> None:
        matcher.inside, matcher.room = string
        matcher.capped = string.room == len(matcher.grammar.witness)

    def _walk(self, matcher: Matcher, mask: Mask) -> None:
        """Write a mask that is not known, and note it."""
        room = 0
        if matcher.grammar.rest is not None and matcher.inner.validate_tokens(matcher.grammar.witness[:1]):
            room = matcher.inner.validate_tokens(matcher.grammar.witness)
        if room and self._walk_rest(matcher, mask):
            mask |= self.rooms.plain & self.rooms.fitting[min(room, self.rooms.longest)]
        else:
            began = time.perf_counter()
            matcher.inner.unsafe_compute_mask_ptr(mask.ctypes.data, ROW_BYTES)
            if matcher.grammar.rest is None and time.perf_counter() - began > SLOW_S:
                matcher.slow = SLOW_STEPS
        # a key may not be any text, and before the least length there is no end
        if room and matcher.grammar.steady and matcher.inner.validate_tokens(self._key) == 1:
            self._enter(matcher, Known(mask.copy(), room))
            self._note(matcher, mask, room)
            if matcher.path is not None:
                matcher.path = matcher.path[: matcher.path.rfind(b'"') + 1]
        else:
            self._note(matcher, mask, 0)

    def _note(self, matcher: Matcher, mask: Mask, room: int) -> None:
        """Keep a mask whose place was seen before."""
        if matcher.path is None or matcher.error:
            return
        place = place_of(matcher)
        if hash(place) in self._seen:
            self._known[place] = Known(mask.copy(), room)
            if len(self._known) > KEPT_PLACES:
                del self._known[next(iter(self._known))]
        else:
            if len(self._seen) >= SEEN_PLACES:
                self._seen.clear()
            self._seen.add(hash(place))

    def _walk_rest(self, matcher: Matcher, mask: Mask) -> bool:
        """Write the mask of tokens that are no plain text; False if limits do not let `rest` come that far."""
        if matcher.rest is None:
            assert matcher.grammar.rest is not None, "strings of this grammar have no witness"
            matcher.rest = matcher.grammar.rest.deep_copy()
        text = b"".join([self.rooms.pieces[token] for token in matcher.behind])
        matcher.behind.clear()
        if not matcher.rest.consume_tokens([self._bytes[byte] for byte in text]):
            return False
        matcher.rest.unsafe_compute_mask_ptr(mask.ctypes.data, ROW_BYTES)
        return not matcher.rest.is_error()


def readable(error: str) -> str:
    """What an error says, in one line that is not too long."""
    lines = error.strip().splitlines() or [""]
    reason = next((line for line in lines[1:] if line.startswith("error: ")), "")
    first = lines[0] if len(lines[0]) <= 200 else lines[0][:200] + "…"
    return f"{first} {reason}".strip()[:300]
