"""Reads the fields of a checkpoint's JSON files. Every error names file, field, value and what is allowed."""

from collections.abc import Mapping
from dataclasses import dataclass

from inkcap.base.errors import CheckpointMismatch

ABSENT = object()


@dataclass(frozen=True)
class Fields:
    """One JSON object of a checkpoint. `where` names it in errors: `config.json: text_config`.

    A field may have several spellings; those present must agree. Nothing has a default here: a field that may be left
    out is asked for with `has` first. Every reader raises CheckpointMismatch.
    """

    values: Mapping[str, object]
    where: str

    def has(self, *names: str) -> bool:
        """Whether one of the spellings is present, be it as null."""
        return any(name in self.values for name in names)

    def wrong(self, name: str, allowed: str) -> CheckpointMismatch:
        """The error for a field whose value is not allowed."""
        return CheckpointMismatch(f"{self.where}.{name} is {self.values.get(name)!r}; allowed: {allowed}")

    def block(self, name: str) -> "Fields":
        """A field that is itself an object."""
        value = self.values.get(name)
        if not isinstance(value, Mapping):
            raise self.wrong(name, "a JSON object")
        return Fields(value, f"{self.where}.{name}" if ":" in self.where else f"{self.where}: {name}")

    def spelled(self, *names: str) -> str:
        """The spelling in use; the others, where present, must say the same."""
        present = [name for name in names if name in self.values]
        if not present:
            raise CheckpointMismatch(f"{self.where} has no {' or '.join(names)}, which this engine needs")
        for name in present[1:]:
            if self.values[name] != self.values[present[0]]:
                raise self.wrong(name, f"{self.values[present[0]]!r}, the value of {present[0]}")
        return present[0]

    def integer(self, *names: str, least: int = 1, most: int | None = None) -> int:
        """An integer in [least, most]; 8.0 is one, true is not."""
        name = self.spelled(*names)
        value = self.values[name]
        allowed = f"an integer of {least} or more" if most is None else f"an integer from {least} to {most}"
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
            raise self.wrong(name, allowed)
        if value < least or (most is not None and value > most):
            raise self.wrong(name, allowed)
        return int(value)

    def number(self, *names: str, above: float = 0.0) -> float:
        """A finite number greater than `above`."""
        name = self.spelled(*names)
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < float("inf"):
            raise self.wrong(name, f"a number greater than {above:g}")
        return float(value)

    def null(self, *names: str) -> bool:
        """Whether the field is absent or null."""
        return not self.has(*names) or self.values[self.spelled(*names)] is None

    def indices(self, name: str, below: int) -> tuple[int, ...]:
        """A list of different integers in [0, below), in rising order whatever the file's."""
        value = self.values.get(name)
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < below for item in value):
            raise self.wrong(name, f"a list of integers from 0 to {below - 1}")
        if len(set(value)) != len(value):
            raise self.wrong(name, "a list without repetitions")
        return tuple(sorted(value))

    def choices(self, name: str, allowed: tuple[str, ...], count: int) -> tuple[str, ...]:
        """A list of `count` strings, each one of `allowed`."""
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) != count or not all(item in allowed for item in value):
            raise self.wrong(name, f"a list of {count} strings, each {' or '.join(map(repr, allowed))}")
        return tuple(value)

    def only(self, name: str, supported: object) -> None:
        """Refuse a setting that is present with another value than the one this engine implements."""
        value = self.values.get(name, ABSENT)
        if value is not ABSENT and (value != supported or isinstance(value, bool) != isinstance(supported, bool)):
            raise CheckpointMismatch(f"{self.where}.{name} is {value!r}; this engine implements {supported!r} only")
