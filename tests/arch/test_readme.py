import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def load():
    spec = importlib.util.spec_from_file_location("readme", ROOT / "scripts/readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_says_what_the_registry_and_pyproject_say():
    text = (ROOT / "README.md").read_text()
    assert load().written(text) == text, "run scripts/readme.py"


def test_every_dependency_has_its_reason_in_the_readme():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = load().dependencies()
    for requirement in project["dependencies"]:
        name = requirement.split(">")[0].split("=")[0].split(";")[0].strip()
        assert f"| {name} | running |" in table, f"{name} has no reason beside it in pyproject.toml"


def test_a_stale_part_and_a_missing_marker_are_seen():
    module = load()
    text = (ROOT / "README.md").read_text()
    assert module.written(text.replace("InklingForCausalLM", "Nothing")) == text
    with pytest.raises(ValueError, match="once each"):
        module.written("no markers")


def test_the_readme_keeps_its_promised_parts():
    text = (ROOT / "README.md").read_text()
    for part in ("scripts/serve", "scripts/test", "## What is supported", "## Measured", "docs/architecture.md"):
        assert part in text
    assert not re.search(r"@[A-Z]+@", text), "a part was left to be filled in"
