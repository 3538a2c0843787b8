"""Incremental text: pieces joined are the whole, and no piece has half a character."""

from hypothesis import given, settings
from hypothesis import strategies as st

from inkcap.chat.detok import Detokenizer


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(0, 201_023) | st.integers(0, 255), max_size=40),
    cuts=st.lists(st.integers(1, 5), max_size=40),
)
def test_pieces_joined_are_the_whole(tokenizer, ids, cuts):
    stream, pieces, rest = Detokenizer(tokenizer, skip_special=False), [], list(ids)
    for cut in [*cuts, len(ids)]:
        pieces.append(stream.feed(rest[:cut]))
        rest = rest[cut:]
    whole = b"".join(tokenizer.token_bytes[token] for token in ids).decode("utf-8", "replace")
    assert "".join(pieces) + stream.flush() == whole


def test_a_character_waits_for_its_last_byte(tokenizer):
    ids = [tokenizer.token_bytes.index(bytes((byte,))) for byte in "é😀".encode()]
    stream = Detokenizer(tokenizer)
    assert [stream.feed((token,)) for token in ids] == ["", "é", "", "", "", "😀"]
    assert stream.flush() == ""


def test_an_unfinished_character_is_shown_at_the_end(tokenizer):
    stream = Detokenizer(tokenizer)
    assert stream.feed([tokenizer.token_bytes.index(b"\xe4")]) == ""
    assert stream.flush() == "\ufffd"


def test_control_tokens_are_skipped_on_demand(tokenizer):
    assert Detokenizer(tokenizer).feed([200001, 13225, 200010]) == "Hello"
    assert Detokenizer(tokenizer, skip_special=False).feed([200001, 13225]) == "<|message_model|>Hello"
