"""Stop strings in text that arrives in pieces: found across pieces, and nothing shown that may turn out to be one.

The automaton of Aho and Corasick (CACM 18(6), 1975): the cost per character does not grow with the number of strings.
"""

from collections import deque
from collections.abc import Sequence

from inkcap.base.errors import BadRequest

MAX_CHARACTERS = 100_000  # of all stop strings of a request together


class StopStrings:
    """Finds the stop string that is complete first; of several that end together, the longest."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include`: the stop string itself is part of the text. Raises BadRequest for empty or too many strings."""
        if not all(stops):
            raise BadRequest("stop contains an empty string, which would stop at once; leave it out", "stop")
        if (total := sum(map(len, stops))) > MAX_CHARACTERS:
            raise BadRequest(f"the stop strings have {total} characters together; {MAX_CHARACTERS} are allowed", "stop")
        self.matched: str | None = None
        self._include = include
        self._held = ""
        self._state = 0
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._depth = [0]
        self._hit: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._link()

    def feed(self, text: str) -> str:
        """What may be shown of the text so far and was not yet. Once `matched` is set, nothing more is."""
        if self.matched is not None:
            return ""
        if not self._state and self._next[0].keys().isdisjoint(text):
            return text
        state, moves = self._state, self._next
        for i, letter in enumerate(text):
            while state and letter not in moves[state]:
                state = self._fallback[state]
            state = moves[state].get(letter, 0)
            if (stop := self._hit[state]) is not None:
                self.matched = stop
                seen = self._held + text[: i + 1]
                self._held = ""
                return seen if self._include else seen[: -len(stop)]
        self._state = state
        seen = self._held + text
        sure = len(seen) - self._depth[state]
        self._held = seen[sure:]
        return seen[:sure]

    def flush(self) -> str:
        """The text held back, when the stream ends or stops do not apply any more."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _add(self, stop: str) -> None:
        state = 0
        for letter in stop:
            if letter not in self._next[state]:
                self._next[state][letter] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self._depth.append(self._depth[state] + 1)
                self._hit.append(None)
            state = self._next[state][letter]
        self._hit[state] = stop

    def _link(self) -> None:
        """Each state falls back to its longest proper suffix that is a state, and inherits its hit."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            if self._hit[state] is None:
                self._hit[state] = self._hit[self._fallback[state]]
            for letter, child in self._next[state].items():
                fallback = self._fallback[state]
                while fallback and letter not in self._next[fallback]:
                    fallback = self._fallback[fallback]
                self._fallback[child] = self._next[fallback].get(letter, 0)
                queue.append(child)
