"""TOML files and command-line flags to the configuration tree. An unknown key names the nearest known one."""

import argparse
import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from inkcap.base.config import (
    RULES,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedConfig,
    ServerConfig,
    environment_defaults,
)
from inkcap.base.errors import ConfigInvalid

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "cache": CacheConfig,
    "sched": SchedConfig,
    "server": ServerConfig,
}
BYTE_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
COUNT_UNITS = {"k": 1000, "K": 1 << 10, "m": 1000**2, "M": 1 << 20, "g": 1000**3, "G": 1 << 30}  # as vLLM reads them


def parse_bytes(text: str) -> int:
    """`4GiB`, `500MB` or a plain number of bytes. Raises ConfigInvalid."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if not found:
        raise ConfigInvalid(f"{text!r} is no size; write bytes, or a number with kB, MB, GB, KiB, MiB or GiB")
    return int(float(found[1]) * BYTE_UNITS[found[2] or ""])


def add_flags(parser: argparse.ArgumentParser, sections: tuple[str, ...] = tuple(SECTIONS)) -> None:
    """Add one flag for each field of `sections`, and --config and --ops."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with the sections " + ", ".join(SECTIONS))
    parser.add_argument("--ops", metavar="OP=NAME", action="append", default=[], help="replace one op's implementation")
    for section in sections:
        group = parser.add_argument_group(section)
        hints = get_type_hints(SECTIONS[section])
        for item in fields(SECTIONS[section]):
            if not item.metadata:
                continue
            flag = item.metadata["flag"] or "--" + item.name.replace("_", "-")
            kind, dest = _plain(hints[item.name]), f"{section}.{item.name}"
            common: dict[str, Any] = {"dest": dest, "help": item.metadata["help"], "default": None}
            if kind is bool:
                group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
            elif get_origin(kind) is tuple:
                group.add_argument(flag, nargs="+", metavar="NAME", **common)
            else:
                group.add_argument(flag, metavar=(item.metadata["unit"] or kind.__name__).upper(), **common)


def config_from_flags(arguments: argparse.Namespace) -> EngineConfig:
    """Environment, then the TOML file, then flags, later ones winning. Raises ConfigInvalid."""
    tree: dict[str, dict[str, Any]] = {name: {} for name in [*SECTIONS, "ops"]}
    for name, values in environment_defaults().items():
        tree[name].update(values)
    for name, values in (_read_toml(Path(arguments.config)) if arguments.config else {}).items():
        tree[name].update(values)
    for key, value in vars(arguments).items():
        section, dot, name = key.partition(".")
        if dot and value is not None:
            tree[section][name] = value
    for pair in arguments.ops:
        name, sign, value = pair.partition("=")
        if not (name and sign and value):
            raise ConfigInvalid(f"--ops {pair!r}: write OP=NAME, like sconv=ref")
        tree["ops"][name] = value
    return config_from_tree(tree)


def config_from_tree(tree: Mapping[str, Mapping[str, Any]]) -> EngineConfig:
    """Build and check the tree from plain values; strings are converted. Raises ConfigInvalid."""
    _known(tree, [*SECTIONS, "ops"], "section")
    parts: dict[str, Any] = {}
    for section, kind in SECTIONS.items():
        values = tree.get(section, {})
        hints = get_type_hints(kind)
        _known(values, hints, f"key in [{section}]")
        if section == "model" and "path" not in values:
            raise ConfigInvalid("no model: give a directory or a hub id")
        converted = {name: _convert(f"{section}.{name}", value, hints[name]) for name, value in values.items()}
        parts[section] = kind(**converted)
        _check(section, parts[section])
    return EngineConfig(**parts, ops={name: str(value) for name, value in tree.get("ops", {}).items()})


def _check(section: str, part: object) -> None:
    for item in fields(part):  # pyright: ignore[reportArgumentType]
        value = part.__dict__[item.name]
        rule = item.metadata.get("check")
        if rule and not RULES[rule][0](value):
            raise ConfigInvalid(f"{section}.{item.name} is {value!r}; it must be {RULES[rule][1]}")


def _read_toml(path: Path) -> dict[str, dict[str, Any]]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigInvalid(f"configuration file {path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigInvalid(f"configuration file {path} cannot be read: {error}") from None


def _known(values: Mapping[str, Any], known: Any, what: str) -> None:
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, list(known), 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
            raise ConfigInvalid(f"unknown {what}: {name!r}{hint}")


def _plain(hint: Any) -> Any:
    """`int` of `int | None`."""
    if get_origin(hint) is UnionType:
        return next(kind for kind in get_args(hint) if kind is not type(None))
    return hint


def _convert(name: str, value: Any, hint: Any) -> Any:
    kind = _plain(hint)
    optional = kind is not hint
    if value is None and optional:
        return None
    if get_origin(kind) is tuple:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
            raise ConfigInvalid(f"{name} is {value!r}; it must be a list of strings")
        return tuple(items)
    if isinstance(value, str) and kind is not str:
        return _from_text(name, value, kind)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigInvalid(f"{name} is {value!r}; it must be {kind.__name__}")
    return value


def _from_text(name: str, text: str, kind: Any) -> Any:
    if kind is int and name.endswith("_bytes"):
        return parse_bytes(text)
    if kind is int and (found := re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG])", text)):
        return int(float(found[1]) * COUNT_UNITS[found[2]])
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    raise ConfigInvalid(f"{name} is {text!r}; it must be {kind.__name__}")
