import argparse
from dataclasses import fields

import pytest

from inkcap.base.config import EngineConfig, ModelConfig, SchedConfig
from inkcap.base.errors import ConfigInvalid
from inkcap.base.flags import SECTIONS, add_flags, config_from_flags, config_from_tree, parse_bytes


def parse(*words: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    parser.add_argument("model.path")
    add_flags(parser)
    return config_from_flags(parser.parse_args(["folder", *words]))


def test_no_flags_give_the_defaults():
    assert parse() == EngineConfig(model=ModelConfig(path="folder"))


def test_flags_set_their_fields_with_the_right_types():
    config = parse(
        "--port=9", "--cache-memory=2GiB", "--no-prefix-caching", "--served-model-name", "a", "b", "--drain-seconds=2",
        "--max-model-len=77", "--tensor-parallel-size=2", "--ops=sconv=ref",
    )  # fmt: skip
    assert (config.server.port, config.cache.memory_bytes, config.cache.prefix) == (9, 2 << 30, False)
    assert (config.model.served_names, config.server.drain_seconds) == (("a", "b"), 2.0)
    assert (config.model.max_length, config.parallel.tp, config.ops) == (77, 2, {"sconv": "ref"})


def test_flags_win_over_the_file_and_the_file_over_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "inkcap.toml"
    file.write_text('[server]\nport = 1\nhost = "0.0.0.0"\napi_key = "file"\n')
    monkeypatch.setenv("INKCAP_API_KEY", "environment")
    assert parse().server.api_key == "environment"
    config = parse(f"--config={file}", "--port=2")
    assert (config.server.port, config.server.host, config.server.api_key) == (2, "0.0.0.0", "file")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"servr": {}}, "did you mean 'server'"),
        ({"server": {"prot": 1}}, "did you mean 'port'"),
        ({"server": {"port": 70000}}, "server.port is 70000; it must be 0 to 65535"),
        ({"server": {"port": True}}, "server.port is True; it must be int"),
        ({"server": {"port": "x"}}, "server.port is 'x'; it must be int"),
        ({"sched": {"rows": 0}}, "sched.rows is 0; it must be 1 or more"),
        ({"cache": {"keep_every": 100}}, "multiple of 64"),
        ({"cache": {"memory_bytes": "lots"}}, "'lots' is no size"),
        ({"model": {"dtype": "int8", "path": "m"}}, "auto, bfloat16 or float32"),
        ({"server": {"cors_origins": [1]}}, "list of strings"),
    ],
)
def test_bad_values_name_the_field_the_value_and_the_limit(tree, message):
    with pytest.raises(ConfigInvalid, match=message):
        config_from_tree({"model": {"path": "m"}, **tree})


def test_a_missing_or_broken_file_is_one_clear_error(tmp_path):
    with pytest.raises(ConfigInvalid, match="does not exist"):
        parse(f"--config={tmp_path}/none.toml")
    (tmp_path / "bad.toml").write_text("[server")
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        parse(f"--config={tmp_path}/bad.toml")


def test_environment_ops_are_checked(monkeypatch):
    monkeypatch.setenv("INKCAP_OPS", "sconv=ref,norm=triton")
    assert parse().ops == {"sconv": "ref", "norm": "triton"}
    monkeypatch.setenv("INKCAP_OPS", "sconv")
    with pytest.raises(ConfigInvalid, match="name=implementation"):
        parse()


def test_sizes():
    assert [parse_bytes(t) for t in ("10", "1k", "1KiB", "1.5 GB", "2gib")] == [10, 1000, 1024, 1_500_000_000, 2 << 30]


def test_every_field_has_help_and_every_flag_is_its_own():
    parser = argparse.ArgumentParser()
    add_flags(parser)  # argparse refuses two flags of one name
    for section in SECTIONS.values():
        assert all(item.metadata["help"] for item in fields(section) if item.name != "path")


def test_steps_left_open_are_filled_by_the_device():
    asked = SchedConfig(step_tokens=512, chunk=64)
    assert (asked.on("cpu"), asked.on("cuda")) == (asked, asked)
    left = SchedConfig()
    assert [(at.step_tokens, at.chunk) for at in (left.on("cpu"), left.on("cuda"))] == [(2048, 1024), (8192, 8192)]
    small = SchedConfig(step_tokens=256)
    assert [(at.step_tokens, at.chunk) for at in (small.on("cpu"), small.on("cuda"))] == [(256, 256), (256, 256)]
