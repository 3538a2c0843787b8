"""Strings that are bounded in nothing but their length: which tokens fit in the room that is left. No torch.

llguidance finds the mask inside such a string by walking down most of the vocabulary, up to 2 ms, once the room is less
than its longest slice of plain text. But of plain text exactly that fits which is not longer than the room; what is
left to walk are the tokens that are no plain text, three of a hundred.
"""

import re

import numpy as np
from numpy.typing import NDArray

LETTER = r'[^"\\\x00-\x1F\x7F]'  # what may stand in a JSON string as it is
MOST_ROOM = 16  # letters; with more room llguidance is quick, since its slices of plain text match
WITNESSES = "¶§ЖλФщ"  # letters that hardly any schema mentions, each one token
_PLAIN = re.compile(LETTER + "+")
# A grammar of one JSON schema: of `json_grammar`, or of a call.
_OF_A_SCHEMA = re.compile(r'start: (?:json\njson|"[^\n]*" args "}"\nargs): %json (?P<schema>[^\n]*)\n')
# Keywords by which a text can be held to more than its length, and those that put alternatives beside one another.
_OTHER = ("pattern", "patternProperties", "propertyNames", "format", "not", "if")
_BRANCH, _LITERAL = ("anyOf", "oneOf"), ("enum", "const")


def witness(grammar: str) -> str | None:
    """A letter by which the room can be told: what it may be repeated is what any letters may.

    None for grammars in which that does not follow: those that hold texts to more than their length, or in which a
    bounded string and a literal can be alternatives. Also None where no string is bounded.
    """
    found = _OF_A_SCHEMA.fullmatch(grammar)
    if found is None or '"maxLength"' not in grammar:
        return None
    schema = found["schema"]
    has = {key for key in (*_OTHER, *_BRANCH, *_LITERAL) if f'"{key}"' in schema}
    if has.intersection(_OTHER) or (has.intersection(_BRANCH) and has.intersection(_LITERAL)):
        return None
    text = grammar.lower()  # json.dumps writes escapes
    return next((one for one in WITNESSES if one.lower() not in text and f"\\u{ord(one):04x}" not in text), None)


def letters(piece: bytes) -> int:
    """How many letters a token has; 0 if it is no plain text."""
    try:
        text = piece.decode()
    except UnicodeDecodeError:
        return 0
    return len(text) if _PLAIN.fullmatch(text) else 0


def fitting(lengths: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Masks [MOST_ROOM + 1, n / 32] from the letters [n] of each token: row r has those with 1 to r."""
    rooms = np.arange(MOST_ROOM + 1)[:, None]
    bits = (lengths > 0) & (lengths <= rooms)
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
