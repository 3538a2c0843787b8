"""Text from tokens as they come, whole characters only."""

from codecs import getincrementaldecoder
from collections.abc import Iterable

from inkcap.chat.tokens import ORDINARY, VOCAB, Tokenizer

_decoder = getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one token stream. Pieces joined are the decoded whole, wherever the stream is cut."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._table = tokenizer.token_bytes
        self._skip_special = skip_special
        self._decode = _decoder("replace").decode

    def feed(self, tokens: Iterable[int]) -> str:
        """Text completed by `tokens`; the bytes of an unfinished character wait."""
        if self._skip_special:
            tokens = [token for token in tokens if not ORDINARY <= token < VOCAB]
        table = self._table
        return self._decode(b"".join([table[token] for token in tokens]))

    def flush(self) -> str:
        """U+FFFD if a character was left unfinished, else nothing."""
        return self._decode(b"", True)
