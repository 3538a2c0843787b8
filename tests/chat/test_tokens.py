"""Tokenizer: loading, agreement with the official one, texts that break others."""

import random
import re
import socket
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inkcap.base import vocabulary
from inkcap.base.errors import BadRequest, CheckpointMismatch, CheckpointUnreadable
from inkcap.chat import tokens
from inkcap.chat.tokens import CONTROL_IDS, CONTROL_NAMES, ORDINARY, PADDED, VOCAB, Tokenizer, read_rank_file

BYTES = {bytes((byte,)): byte for byte in range(256)}


def test_control_tokens_are_the_official_ones(oracle):
    assert {name: oracle.tokenizer.encode_special(name) for name in oracle.tokenizer.special_tokens()} == CONTROL_IDS
    assert len(CONTROL_NAMES) == 60


def test_ids_equal_the_official_tokenizer_on_random_text(tokenizer, oracle):
    rng = random.Random(1)
    pieces = [
        *"aZ1 \n\t'\r/!éß中あ한😀\u00a0\u2028\u3000\x00\x1f\u0301",
        "'ll",
        "   ",
        "\n\n",
        "1234",
        "<|end_message|>",
        "The ",
    ]
    for _ in range(3000):
        text = "".join(rng.choices(pieces, k=rng.randrange(30)))
        assert tokenizer.encode_text(text) == oracle.tokenizer.encode_ordinary(text), text


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_text_survives_and_never_holds_a_control_token(tokenizer, text):
    ids = tokenizer.encode_text(text)
    assert tokenizer.decode(ids) == text
    assert all(token < ORDINARY for token in ids)


@pytest.mark.parametrize("name", CONTROL_NAMES.values())
def test_control_spellings_in_text_stay_text(tokenizer, name):
    ids = tokenizer.encode_text(f"a<|{name}|>b")
    assert max(ids) < ORDINARY
    assert tokenizer.decode(ids) == f"a<|{name}|>b"


def test_end_message_in_text_is_as_published(tokenizer):
    assert tokenizer.encode_text("a<|end_message|>b") == [64, 27, 91, 419, 13968, 91, 29, 65]


def test_lone_surrogate_is_refused_with_its_place(tokenizer):
    with pytest.raises(BadRequest, match=r"character 2 of the text is U\+D800") as caught:
        tokenizer.encode_text("ab\ud800", "messages[0].content")
    assert caught.value.param == "messages[0].content"


@pytest.mark.parametrize(("blank", "end"), [(" ", ""), (" ", "x"), ("\t", "!"), ("\t", "\n"), (" \u3000", "\x1c")])
def test_a_million_blanks_encode_and_decode(tokenizer, blank, end):
    text = "say\n" + blank * (1_000_000 // len(blank)) + end
    assert tokenizer.decode(tokenizer.encode_text(text)) == text


def test_ten_megabytes_of_one_character_encode(tokenizer):
    text = "1" * 10_000_000
    assert tokenizer.decode(tokenizer.encode_text(text)) == text


def test_cutting_long_blanks_out_changes_no_id(tokenizer, monkeypatch):
    whole = tokenizer._encoding.encode_ordinary
    monkeypatch.setattr(tokens, "LONG_BLANKS", 4)
    monkeypatch.setattr(tokens, "_PROBE", 1)
    monkeypatch.setattr(tokens, "_LONG_RUN", tokens.long_run_pattern(4))
    rng = random.Random(2)
    pieces = [
        "     ",
        "    ",
        "\t\t\t\t\t\t",
        " ",
        "\n",
        "\r\n",
        "a",
        "Ab",
        "!",
        "/",
        "1",
        "'s",
        "\u3000" * 5,
        "\x85",
        "\x1c",
        "中",
    ]
    cut = 0
    for _ in range(5000):
        text = "".join(rng.choices(pieces, k=rng.randrange(1, 12)))
        cut += tokens._LONG_RUN.search(text) is not None
        assert tokenizer.encode_text(text) == whole(text), repr(text)
    assert cut > 2000


def test_decoding_shows_or_skips_control_tokens(tokenizer):
    ids = [tokens.MODEL, tokens.TEXT, 13225, tokens.END_MESSAGE]
    assert tokenizer.decode(ids) == "<|message_model|><|content_text|>Hello<|end_message|>"
    assert tokenizer.decode(ids, skip_special=True) == "Hello"
    assert tokenizer.token_text(tokens.TEXT) == "<|content_text|>"
    assert tokenizer.token_text(VOCAB) == tokenizer.token_text(-1) == tokenizer.token_text(PADDED) == "\ufffd"


@pytest.mark.parametrize("token", [-1, VOCAB, 10**9])
def test_decoding_an_id_that_does_not_exist_is_refused(tokenizer, token):
    with pytest.raises(BadRequest, match=f"token id {token} does not exist; ids go from 0 to 200057"):
        tokenizer.decode([13225, token])


def test_a_small_vocabulary_is_enough_for_tests():
    small = Tokenizer(BYTES | {b"ab": 256})
    assert small.encode_text("xab") == [120, 256]
    assert small.token_text(tokens.TEXT) == "<|content_text|>"


# Loading


@pytest.fixture(scope="module")
def json_file(rank_file) -> dict:
    letter = {byte: letter for letter, byte in vocabulary._bytes_by_letter().items()}
    ranks = read_rank_file(rank_file)
    vocab = {"".join([letter[byte] for byte in piece]): token for piece, token in ranks.items()}
    added = [{"id": token, "content": f"<|{name}|>", "special": True} for token, name in CONTROL_NAMES.items()]
    added[tokens.XML - ORDINARY]["content"] = "<|unused_200024|>"
    return {"version": "1.0", "added_tokens": added, "model": {"type": "BPE", "vocab": vocab, "merges": []}}


def write(directory: Path, file: dict) -> Path:
    (directory / "tokenizer.json").write_bytes(msgspec.json.encode(file))
    return directory


def test_both_files_of_a_checkpoint_give_the_same_tokenizer(tmp_path, rank_file, json_file, monkeypatch):
    monkeypatch.setattr(socket, "socket", None)  # nothing may be fetched
    from_json = Tokenizer.load(write(tmp_path, json_file))
    (tmp_path / "tiktoken").mkdir()
    (tmp_path / "tiktoken" / "tokenizer.model").write_bytes(rank_file.read_bytes())
    (tmp_path / "tokenizer.json").write_text("not read")
    from_ranks = Tokenizer.load(tmp_path)
    assert from_json.token_bytes == from_ranks.token_bytes
    text = "Grüße, 世界! 12345 \n"
    assert from_json.encode_text(text) == from_ranks.encode_text(text)


def test_no_tokenizer_names_both_places(tmp_path):
    with pytest.raises(CheckpointUnreadable, match=re.escape(str(tmp_path / "tiktoken" / "tokenizer.model"))) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda content: content[:1_000_003], CheckpointUnreadable, "line 63354 is not 'base64 id'"),
        (lambda content: b"{}", CheckpointUnreadable, "line 1 is not"),
        (lambda content: content[: content.rindex(b"\n", 0, -1)], CheckpointMismatch, "has 199997 ordinary tokens"),
        (lambda content: b"", CheckpointMismatch, "has 0 ordinary tokens"),
        (lambda content: content.replace(b"IQ== 0\n", b"IQ== 199998\n"), CheckpointMismatch, "the last of id 199998"),
        (lambda content: content.replace(b"IQ== 0\n", b"ISEhISEhIQ== 0\n"), CheckpointMismatch, "single bytes"),
    ],
)
def test_a_damaged_rank_file_is_one_clear_error(tmp_path, rank_file, damage, error, message):
    (tmp_path / "tiktoken").mkdir()
    (tmp_path / "tiktoken" / "tokenizer.model").write_bytes(damage(rank_file.read_bytes()))
    with pytest.raises(error, match=message):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda file: file["added_tokens"].pop(8), CheckpointMismatch, "control token 200006 None"),
        (lambda file: file["added_tokens"][8].update(content="<eos>"), CheckpointMismatch, "200006 '<eos>'"),
        (lambda file: file["model"].pop("vocab"), CheckpointUnreadable, "not a byte-level BPE tokenizer"),
        (lambda file: file["model"]["vocab"].update({"▁word": 5}), CheckpointMismatch, "not spelled in byte-level"),
        (lambda file: file["model"]["vocab"].pop("Hello"), CheckpointMismatch, "has 199997 ordinary tokens"),
    ],
)
def test_a_foreign_tokenizer_json_is_one_clear_error(tmp_path, json_file, change, error, message):
    file = msgspec.json.decode(msgspec.json.encode(json_file))
    change(file)
    with pytest.raises(error, match=message):
        Tokenizer.load(write(tmp_path, file))
