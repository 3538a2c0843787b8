"""base/checkpoint.py and base/fields.py: made-up directories and a made-up hub cache."""

import json
import subprocess
import sys

import pytest

from inkcap.base import checkpoint
from inkcap.base.checkpoint import (
    choose_generation_defaults,
    find_checkpoint,
    read_config,
    read_eos_ids,
    read_generation_defaults,
)
from inkcap.base.errors import CheckpointMismatch, CheckpointUnreadable, ConfigInvalid, InkcapError, ModelNotFound
from inkcap.base.fields import Fields

OLD, NEW = "1" * 40, "2" * 40


@pytest.fixture
def hub(tmp_path):
    """A hub cache with two revisions of one model; `main` is the newer, `v1` the older."""
    folder = tmp_path / "hub" / "models--lab--Small"
    for commit in (OLD, NEW):
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "config.json").write_text(json.dumps({"commit": commit}))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(NEW)
    (folder / "refs" / "v1").write_text(OLD)
    return tmp_path / "hub"


def test_a_directory_is_taken_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert find_checkpoint(str(tmp_path)) == tmp_path


def test_a_revision_of_a_directory_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigInvalid, match=r"revision 'v1' was given, but .* is a directory"):
        find_checkpoint(str(tmp_path), revision="v1")


def test_a_directory_without_config_is_no_checkpoint(tmp_path):
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelNotFound, match=r"no config\.json.*weights\.bin"):
        find_checkpoint(str(tmp_path))


@pytest.mark.parametrize(("revision", "commit"), [(None, NEW), ("main", NEW), ("v1", OLD), (OLD, OLD)])
def test_a_hub_id_is_found_in_the_cache(hub, revision, commit):
    assert read_config(find_checkpoint("lab/Small", revision=revision, cache=hub)) == {"commit": commit}


def test_the_cache_of_the_environment_is_used(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    assert find_checkpoint("lab/Small").name == NEW


def test_an_unknown_revision_names_those_there_are(hub):
    with pytest.raises(ModelNotFound) as caught:
        find_checkpoint("lab/Small", revision="v2", cache=hub)
    message = str(caught.value)
    assert "not revision v2; it has main, v1" in message
    assert OLD in message
    assert "--download" in message


def test_an_unknown_model_lists_every_place_searched(hub, tmp_path):
    with pytest.raises(ModelNotFound) as caught:
        find_checkpoint("lab/Large", cache=hub)
    message = str(caught.value)
    assert "lab/Large: there is none" in message
    assert f"hub cache {hub}: the model is not in it" in message
    assert "hub: not asked" in message
    with pytest.raises(ModelNotFound, match="nowhere: there is none"):
        find_checkpoint("lab/Large", cache=tmp_path / "nowhere")


@pytest.mark.parametrize("path", ["/no/such/place", "./here", "a/b/c", "lab/..", "~/models"])
def test_a_path_is_not_looked_up_in_the_hub(path, hub):
    with pytest.raises(ModelNotFound, match="not looked up"):
        find_checkpoint(path, cache=hub)


def test_the_network_is_asked_only_on_request(hub, monkeypatch):
    asked = []

    def fake(model, **options):
        asked.append((model, options["revision"], options["local_files_only"]))
        raise ConnectionError("the hub is far away")

    monkeypatch.setattr(checkpoint.huggingface_hub, "snapshot_download", fake)
    with pytest.raises(ModelNotFound, match="not asked"):
        find_checkpoint("lab/Large", cache=hub)
    with pytest.raises(ModelNotFound, match="hub: the hub is far away"):
        find_checkpoint("lab/Large", revision="v1", download=True, cache=hub)
    assert asked == [("lab/Large", None, True), ("lab/Large", "v1", False)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"config\.json is missing"),
        ("{", "not readable as JSON"),
        ("[1]", "no JSON object but a list"),
        ('{"a": 1, "a": 2}', "'a' appears twice"),
        ("[" * 100_000, "not readable as JSON"),
        (b"\xff\xfe\x00", "not readable as JSON"),
    ],
)
def test_a_bad_config_gives_one_clear_error(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointUnreadable, match=message):
        read_config(tmp_path)


def test_generation_defaults(tmp_path):
    assert read_generation_defaults(tmp_path).stated() == {}
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 100, "eos_token_id": 2}')
    assert read_generation_defaults(tmp_path).stated() == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "max_tokens": 100,
    }
    file.write_text('{"do_sample": false, "top_p": null}')
    assert read_generation_defaults(tmp_path).stated() == {"temperature": 0.0}
    file.write_text('{"temperature": "hot"}')
    with pytest.raises(CheckpointMismatch, match=r"generation_config\.json\.temperature is 'hot'"):
        read_generation_defaults(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        (None, {"eos_token_id": 200006, "text_config": {}}, (200006,)),
        ({"eos_token_id": [200006, 199999]}, {"eos_token_id": 5}, (200006, 199999)),
        ({"bos_token_id": 1, "eos_token_id": 2}, {"text_config": {"bos_token_id": 1, "eos_token_id": 2}}, ()),
        (None, {"text_config": {"eos_token_id": 7}}, (7,)),
        (None, {}, ()),
    ],
)
def test_ids_that_end_a_sequence(tmp_path, generation, config, ids):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_eos_ids(tmp_path) == ids


def test_an_end_that_is_no_id_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(CheckpointMismatch, match="eos_token_id is"):
        read_eos_ids(tmp_path)


def test_numbers_are_checked_not_guessed():
    fields = Fields({"a": 8.0, "b": True, "c": 8.5, "d": None, "e": float("nan"), "f": 3}, "file")
    assert fields.integer("a") == 8
    for name in "bcd":
        with pytest.raises(CheckpointMismatch, match=rf"file\.{name} is .*; allowed: an integer of 1 or more"):
            fields.integer(name)
    with pytest.raises(CheckpointMismatch, match=r"file\.e is nan"):
        fields.integer("e")
    with pytest.raises(CheckpointMismatch, match=r"file\.e is nan"):
        fields.number("e")
    with pytest.raises(CheckpointMismatch, match="an integer from 1 to 2"):
        fields.integer("f", most=2)
    with pytest.raises(CheckpointMismatch, match=r"f is 3; allowed: 8\.0, the value of a"):
        fields.integer("a", "f")
    with pytest.raises(CheckpointMismatch, match="file has no x or y"):
        fields.integer("x", "y")


def test_no_torch():
    code = "import inkcap.base.checkpoint, sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_where_sampling_defaults_come_from(tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    for folder, temperature in ((own, 0.5), (other, 0.7)):
        folder.mkdir()
        (folder / "generation_config.json").write_text(json.dumps({"temperature": temperature, "top_k": 7}))
    assert choose_generation_defaults(own) == {"temperature": 0.5, "top_k": 7}
    assert choose_generation_defaults(own, "vllm") == {}
    assert choose_generation_defaults(own, str(other)) == {"temperature": 0.7, "top_k": 7}
    override = '{"temperature": 0.9, "max_new_tokens": 3}'
    assert choose_generation_defaults(own, override=override) == {"temperature": 0.9, "top_k": 7, "max_tokens": 3}
    assert choose_generation_defaults(own, "vllm", '{"do_sample": false}') == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("source", "override", "said"),
    [
        ("nowhere", "", "has no generation_config.json"),
        ("auto", "{", "is not JSON"),
        ("auto", "[]", "is not a JSON object"),
        ("auto", '{"temprature": 1}', "temprature"),
        ("auto", '{"temperature": "hot"}', "a number"),
    ],
)
def test_sampling_defaults_that_cannot_be(tmp_path, source, override, said):
    with pytest.raises(InkcapError, match=said):
        choose_generation_defaults(tmp_path, source, override)
