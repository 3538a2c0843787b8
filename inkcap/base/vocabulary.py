"""The vocabulary of the models: its control tokens, how text is split, and the rank file of a checkpoint. No torch."""

from base64 import b64decode
from binascii import Error as Base64Error
from pathlib import Path

import msgspec

from inkcap.base.errors import CheckpointMismatch, CheckpointUnreadable

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


def read_ranks(directory: str | Path) -> dict[bytes, int]:
    """Bytes to id of `tiktoken/tokenizer.model`, or else `tokenizer.json`, of a checkpoint. Never touches the network.

    Raises CheckpointUnreadable when neither is there or a file is corrupt, CheckpointMismatch when the vocabulary is
    not the one these models were trained with.
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
    return ranks


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
