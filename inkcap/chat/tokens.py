"""Control tokens of the chat format and the tokenizer. Text is encoded without them, so it can never become one."""

import re
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import tiktoken

from inkcap.base.errors import BadRequest, CheckpointMismatch, CheckpointUnreadable

ORDINARY = 199_998  # ids below this are text
VOCAB = 200_058  # ids below this exist
PADDED = 201_024  # rows of the embedding and of the head

END_OF_TEXT = 199_999
USER = 200_000
MODEL = 200_001
SYSTEM = 200_002
TOOL = 200_003
TEXT = 200_004
IMAGE = 200_005
END_TURN = 200_006
THINKING = 200_008
END_MESSAGE = 200_010
AUDIO = 200_020
TOOL_ERROR = 200_022
XML = 200_024
AUDIO_END = 200_043
CALL_JSON = 200_049
AUDIO_SLOT = 200_053
IMAGE_SLOT = 200_054
CALL_TEXT = 200_057

STOP_TOKENS = frozenset((END_TURN, END_OF_TEXT))
ROLES = frozenset((USER, MODEL, SYSTEM, TOOL))
KINDS = frozenset((TEXT, IMAGE, THINKING, AUDIO, TOOL_ERROR, XML, CALL_JSON, CALL_TEXT))
SLOTS = frozenset((AUDIO_SLOT, IMAGE_SLOT))  # stand for media features; only the media path may write them

CONTROL_NAMES: dict[int, str] = {token: f"unused_{token}" for token in range(ORDINARY, VOCAB)} | {
    199_998: "unused",
    END_OF_TEXT: "endoftext",
    USER: "message_user",
    MODEL: "message_model",
    SYSTEM: "message_system",
    TOOL: "message_tool",
    TEXT: "content_text",
    IMAGE: "content_image",
    END_TURN: "content_model_end_sampling",
    THINKING: "content_thinking",
    END_MESSAGE: "end_message",
    AUDIO: "content_audio_input",
    TOOL_ERROR: "content_tool_error",
    200_023: "audio",
    XML: "content_xml",
    200_028: "begin_of_text",
    AUDIO_END: "audio_end",
    CALL_JSON: "content_invoke_tool_json",
    CALL_TEXT: "content_invoke_tool_text",
}
CONTROL_IDS: dict[str, int] = {name: token for token, name in CONTROL_NAMES.items()}

# The split pattern of o200k_base: two shapes of words, digits by threes, punctuation, line ends, blanks.
SPLIT = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
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
        rank_file, json_file = Path(directory) / "tiktoken" / "tokenizer.model", Path(directory) / "tokenizer.json"
        if rank_file.exists():
            source, ranks = rank_file, read_rank_file(rank_file)
        elif json_file.exists():
            source, ranks = json_file, read_tokenizer_json(json_file)
        else:
            raise CheckpointUnreadable(f"no tokenizer: neither {rank_file} nor {json_file} exists")
        if len(ranks) != ORDINARY or max(ranks.values()) != ORDINARY - 1:
            raise CheckpointMismatch(
                f"{source} has {len(ranks)} ordinary tokens, the last of id {max(ranks.values(), default=-1)}; "
                f"this model family has {ORDINARY}, ids 0 to {ORDINARY - 1}"
            )
        return cls(ranks)

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


def read_rank_file(path: Path) -> dict[bytes, int]:
    """Lines of base64 bytes and id. Raises CheckpointUnreadable naming the line."""
    ranks: dict[bytes, int] = {}
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointUnreadable(f"{path}: {error.strerror}") from error
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line:
            continue
        piece, _, rank = line.partition(b" ")
        try:
            ranks[b64decode(piece, validate=True)] = int(rank)
        except (Base64Error, ValueError):
            raise CheckpointUnreadable(
                f"{path} line {number} is not 'base64 id': {line[:40]!r}; the file is truncated or corrupt"
            ) from None
    return ranks


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int]
    type: str = "BPE"


class _TokenizerFile(msgspec.Struct):
    model: _Vocabulary
    added_tokens: list[_AddedToken]


def read_tokenizer_json(path: Path) -> dict[bytes, int]:
    """The byte-level BPE vocabulary of a Hugging Face tokenizer; ids are ranks. Checks its control tokens too."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
    except OSError as error:
        raise CheckpointUnreadable(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointUnreadable(f"{path} is not a byte-level BPE tokenizer: {error}") from error
    named = {token.id: token.content for token in file.added_tokens}
    for token, name in CONTROL_NAMES.items():
        spellings = {f"<|{name}|>", f"<|unused_{token}|>"} if token == XML else {f"<|{name}|>"}
        if named.get(token) not in spellings:
            raise CheckpointMismatch(
                f"{path} spells control token {token} {named.get(token)!r}; this model family has <|{name}|>"
            )
    byte_of = _bytes_by_letter()
    ranks: dict[bytes, int] = {}
    for letters, token in file.model.vocab.items():
        if token in named:
            continue
        try:
            ranks[bytes([byte_of[letter] for letter in letters])] = token
        except KeyError:
            raise CheckpointMismatch(
                f"{path}: token {token} {letters!r} is not spelled in byte-level letters"
            ) from None
    return ranks


def _bytes_by_letter() -> dict[str, int]:
    """GPT-2's printable letter for each byte, inverted: printable Latin-1 is itself, the rest is U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _may_have_long_blanks(text: str) -> bool:
    """Looks at a few characters every LONG_BLANKS / 2: a long run covers one such place whole."""
    return any(text[i : i + _PROBE].isspace() for i in range(0, len(text), LONG_BLANKS // 2))
