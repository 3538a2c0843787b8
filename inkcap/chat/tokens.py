"""Control tokens of the chat format and the tokenizer. Text is encoded without them, so it can never become one."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import tiktoken

from inkcap.base.errors import BadRequest, CheckpointMismatch
from inkcap.base.vocabulary import (
    AUDIO,
    AUDIO_END,
    AUDIO_SLOT,
    CALL_JSON,
    CALL_TEXT,
    CONTROL_IDS,
    CONTROL_NAMES,
    END_MESSAGE,
    END_OF_TEXT,
    END_TURN,
    IMAGE,
    IMAGE_SLOT,
    KINDS,
    MODEL,
    ORDINARY,
    PADDED,
    ROLES,
    SLOTS,
    SPLIT,
    STOP_TOKENS,
    SYSTEM,
    TEXT,
    THINKING,
    TOOL,
    TOOL_ERROR,
    USER,
    VOCAB,
    XML,
    read_rank_file,
    read_ranks,
)

__all__ = (
    "AUDIO",
    "AUDIO_END",
    "AUDIO_SLOT",
    "CALL_JSON",
    "CALL_TEXT",
    "CONTROL_IDS",
    "CONTROL_NAMES",
    "END_MESSAGE",
    "END_OF_TEXT",
    "END_TURN",
    "IMAGE",
    "IMAGE_SLOT",
    "KINDS",
    "MODEL",
    "ORDINARY",
    "PADDED",
    "ROLES",
    "SLOTS",
    "SPLIT",
    "STOP_TOKENS",
    "SYSTEM",
    "TEXT",
    "THINKING",
    "TOOL",
    "TOOL_ERROR",
    "USER",
    "VOCAB",
    "XML",
    "Tokenizer",
    "read_rank_file",
)

# tiktoken overflows its stack inside `\s+(?!\S)` on hundreds of thousands of blanks (0.14: 100,000 pass, 1,000,000
# do not). Longer runs are therefore cut out where the pattern would cut them anyway, and merged by a second encoding
# that has no such pattern and only the tokens that blanks can become. (tiktoken's way to merge a single piece keeps the
# interpreter lock meanwhile: 3.7 s for 5 MB.)
LONG_BLANKS = 50_000
_BLANK = r"\t\x0b\x0c \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # what \s matches, line ends aside
_BLANK_BYTES = bytes(sorted(set("\t\x0b\x0c \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000".encode()))) + bytes(
    range(0x80, 0x8B)
)
_PROBE = 64


def long_run_pattern(limit: int) -> re.Pattern[str]:
    """Whole runs of at least `limit` blanks that no line end follows. Linear: a run is looked at once."""
    return re.compile(rf"(?<![{_BLANK}])[{_BLANK}]{{{limit},}}(?![{_BLANK}\r\n])")


_LONG_RUN = long_run_pattern(LONG_BLANKS)

_REPLACEMENT = "\ufffd".encode()


class Tokenizer:
    """Bytes to ids and back. Encoding releases the interpreter lock, so it can run in a thread.

    `token_bytes[id]` is what an id stands for: UTF-8 bytes, not always whole characters; a control token's spelling
    `<|name|>`; U+FFFD for ids that do not exist. It has PADDED entries.
    """

    def __init__(self, ranks: Mapping[bytes, int]) -> None:
        """`ranks`: bytes to id, in order of merging; all 256 single bytes and no id of ORDINARY or above."""
        lacking = [byte for byte in range(256) if bytes((byte,)) not in ranks]
        if lacking:
            raise CheckpointMismatch(
                f"the tokenizer's vocabulary has no token for {len(lacking)} of the 256 single bytes "
                f"(the first: {lacking[0]:#04x}), so it is not a byte-level vocabulary"
            )
        if (largest := max(ranks.values())) >= ORDINARY:
            raise CheckpointMismatch(
                f"the tokenizer's vocabulary has the ordinary id {largest}; ids from {ORDINARY} are control tokens"
            )
        self._encoding = tiktoken.Encoding("inkling", pat_str=SPLIT, mergeable_ranks=dict(ranks), special_tokens={})
        blanks = {piece: token for piece, token in ranks.items() if not piece.strip(_BLANK_BYTES)}
        self._blanks = tiktoken.Encoding("blanks", pat_str=r"(?s:.+)", mergeable_ranks=blanks, special_tokens={})
        self.token_bytes: list[bytes] = [_REPLACEMENT] * PADDED
        for piece, token in ranks.items():
            self.token_bytes[token] = piece
        for token, name in CONTROL_NAMES.items():
            self.token_bytes[token] = f"<|{name}|>".encode()

    @classmethod
    def load(cls, directory: str | Path) -> "Tokenizer":
        """Read `tiktoken/tokenizer.model`, or else `tokenizer.json`, of a checkpoint. Never touches the network.

        Raises CheckpointUnreadable when neither is there or a file is corrupt, CheckpointMismatch when the vocabulary
        is not the one these models were trained with.
        """
        return cls(read_ranks(directory))

    def encode_text(self, text: str, param: str | None = None) -> list[int]:
        """Ids of `text`, none of them a control token. Raises BadRequest when it has a lone surrogate."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(
                f"character {error.start} of the text is U+{ord(text[error.start]):04X}, half of a surrogate pair, "
                "and has no UTF-8 form; remove it or send the whole pair",
                param,
            ) from None
        if len(text) < LONG_BLANKS or not _may_have_long_blanks(text):
            return self._encoding.encode_ordinary(text)
        ids: list[int] = []
        done = 0
        for run in _LONG_RUN.finditer(text):
            # The last blank goes with the word that follows, so the piece ends before it; at the end it has no word.
            stop = run.end() - (run.end() < len(text))
            ids += self._encoding.encode_ordinary(text[done : run.start()])
            ids += self._blanks.encode_ordinary(text[run.start() : stop])
            done = stop
        return ids + self._encoding.encode_ordinary(text[done:])

    def decode(self, tokens: Iterable[int], skip_special: bool = False) -> str:
        """Text of whole sequences; broken UTF-8 becomes U+FFFD. Raises BadRequest for an id that does not exist."""
        pieces = []
        for token in tokens:
            if not 0 <= token < VOCAB:
                raise BadRequest(f"token id {token} does not exist; ids go from 0 to {VOCAB - 1}")
            if token < ORDINARY or not skip_special:
                pieces.append(self.token_bytes[token])
        return b"".join(pieces).decode("utf-8", "replace")

    def token_text(self, token: int) -> str:
        """One id as a string, as log-probability entries show it; a part of a character is shown as U+FFFD."""
        return self.token_bytes[token].decode("utf-8", "replace") if 0 <= token < PADDED else "\ufffd"


def _may_have_long_blanks(text: str) -> bool:
    """Looks at a few characters every LONG_BLANKS / 2: a long run covers one such place whole."""
    return any(text[i : i + _PROBE].isspace() for i in range(0, len(text), LONG_BLANKS // 2))
