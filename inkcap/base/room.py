"""Strings that are bounded in nothing but their length: which tokens fit in the room that is left. No torch.

llguidance finds the mask inside such a string by walking down most of the vocabulary, up to 2 ms, once the room is less
than its longest slice of plain text. But of plain text exactly that fits which is not longer than the room; what is
left to walk are the tokens that end a string or write an escape, one or two of a hundred. And as long as only plain
text follows, nothing changes but the room: of what was allowed at first, what needs more is not allowed any more.
"""

import json
import re
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from inkcap.base.vocabulary import VOCAB

WORDS = -(-VOCAB // 32)  # 32-bit words of one row of masks
LETTER = r'[^"\\\x00-\x1F\x7F]'  # what may stand in a JSON string as it is
WITNESSES = "¶§ЖλФщ"  # letters that hardly any schema mentions, each one token
# Letters of tokens; bytes that are no whole letter are surrogates here.
_LETTER = r'[^"\\\x00-\x1F\x7F\uDC80-\uDCFF]'
_PLAIN = re.compile(_LETTER + "+")
_STRING = re.compile(rf'(?:{_LETTER}|\\["\\/bfnrt]|\\u[0-9a-fA-F]{{4}})*')
_ESCAPE = re.compile(r"\\u....|\\.")
_CONTROL = re.compile(r"[\x00-\x1F\x7F]")
# A grammar of one JSON schema: of `json_grammar`, or of a call.
_OF_A_SCHEMA = re.compile(r'start: (?:json\njson|"[^\n]*" args "}"\nargs): %json (?P<schema>[^\n]*)\n')
# Keywords by which a text can be held to more than its length, and those that put alternatives beside one another.
_OTHER = ("pattern", "patternProperties", "propertyNames", "format", "not", "if")
_BRANCH, _LITERAL = ("anyOf", "oneOf"), ("enum", "const")
NEVER = np.iinfo(np.int16).max  # is what ids need that are no text
_SCALARS = ("null", "boolean", "integer", "number")


def witness(grammar: str) -> str | None:
    """A letter by which the room can be told: what it may be repeated is what any letters may.

    None for grammars in which that does not follow: those that hold texts to more than their length, or in which a
    string and a literal can be alternatives.
    """
    found = _OF_A_SCHEMA.fullmatch(grammar)
    if found is None:
        return None
    schema = found["schema"]
    has = {key for key in (*_OTHER, *_BRANCH, *_LITERAL) if f'"{key}"' in schema}
    if has.intersection(_OTHER) or (has.intersection(_BRANCH) and has.intersection(_LITERAL)):
        return None
    text = grammar.lower()  # json.dumps writes escapes
    return next((one for one in WITNESSES if one.lower() not in text and f"\\u{ord(one):04x}" not in text), None)


def steady(grammar: str) -> bool:
    """Whether in a grammar that has a witness what may follow a string or a number does not depend on it.

    It could if a text can be in two of them at once, so of alternatives all but one must be scalars, and literals hold
    no others.
    """
    found = _OF_A_SCHEMA.fullmatch(grammar)
    assert found is not None, "grammars that have a witness are of a schema"
    left: list[object] = [json.loads(found["schema"])]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            for key in _BRANCH:
                if isinstance(branches := value.get(key), list):
                    kinds = [one.get("type") if isinstance(one, Mapping) else None for one in branches]
                    if sum(kind not in _SCALARS for kind in kinds) > 1:
                        return False
            literals = [value.get("const"), *(value["enum"] if isinstance(value.get("enum"), list) else ())]
            if any(isinstance(one, Mapping | list) for one in literals):
                return False
            left += value.values()
        elif isinstance(value, list):
            left += value
    return True


class Rooms:
    """Of a vocabulary: what its tokens are inside strings, and which fit in how much room."""

    def __init__(self, ranks: Mapping[bytes, int]) -> None:
        self.pieces = [b""] * WORDS * 32  # what each token stands for
        self.letters = [0] * WORDS * 32  # that a token adds, if it is nothing but letters
        self.tails: dict[int, bytes] = {}  # of tokens that end a string: what they are from there
        self.rest: dict[bytes, int] = {}  # tokens that have to be walked inside a string, and all bytes
        needs = np.full(WORDS * 32, NEVER, np.int16)
        plain = np.zeros(WORDS * 32, bool)
        for piece, token in ranks.items():
            self.pieces[token] = piece
            text = piece.decode("utf-8", "surrogateescape")
            if _PLAIN.fullmatch(text):
                needs[token] = self.letters[token] = len(text)
                plain[token] = True
                continue
            inside = _STRING.match(text)
            assert inside is not None, "no text is text, too"
            written, behind = inside[0], text[inside.end() : inside.end() + 1]
            letters = len(_ESCAPE.sub("x", written))
            needs[token] = letters + (behind not in ("", '"'))  # one is begun
            if not behind and "\\u" not in written:
                self.letters[token] = letters
            elif behind == '"':
                self.tails[token] = piece[len(written.encode("utf-8", "surrogateescape")) :]
            if not _CONTROL.match(behind):
                self.rest[piece] = token
        self.rest |= {piece: ranks[piece] for piece in map(bytes, zip(range(256), strict=True))}
        self.longest = int(needs[needs < NEVER].max())  # with as much room all tokens fit
        # [longest + 1, WORDS]: row r has those that need up to r letters
        self.fitting = np.stack([bits(needs <= most) for most in range(self.longest + 1)])
        self.plain = bits(plain)


def bits(allowed: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """A row of masks [n / 32] from booleans [n]."""
    return np.packbits(allowed, bitorder="little").view(np.uint32)
