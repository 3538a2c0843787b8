"""How the names and shapes of a checkpoint become those of a model: a table of rules, one per kind of slot.

    same("layers.{n}.mlp.w2.weight", "model.llm.layers.{n}.mlp.w2_md.weight")   another name
    pair("layers.{n}.mlp.w13.weight", "...gate_proj.weight", "...up_proj.weight")   two tensors, rows taken in turns
    halves("layers.{n}.mlp.experts.w13", "...gate_up_proj", dim=1)   one tensor, its halves taken in turns

`{n}` is a layer's number. Slots (parallel/slot.py) say which part a rank wants; rules carry that over to the sources.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from inkcap.parallel.slot import Slot


@dataclass(frozen=True, slots=True)
class Piece:
    """Fill `target` with the part `index` of the tensor `source`, which must have the shape `shape`."""

    source: str
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    target: Tensor


@dataclass(frozen=True)
class Rule:
    """Where the slots named `slot` come from. `turns`: along `dim`, entries come from gate and up in turns.

    One source in turns has gate in its first half along `dim` and up in its second; two are gate and up. `shift` is the
    number the checkpoint gives to what belongs to layer 0.
    """

    slot: str
    sources: tuple[str, ...]
    turns: bool = False
    dim: int = 0
    shift: int = 0

    def pieces(self, slot: Slot, number: str) -> Iterator[Piece]:
        """What to read for one slot; `number` stands for `{n}`."""
        shifted = str(int(number) + self.shift) if number else ""
        names = [source.replace("{n}", shifted) for source in self.sources]
        index = _index(slot)
        if not self.turns:
            yield Piece(names[0], slot.whole, index, slot.target)
            return
        half = slot.whole[self.dim] // 2
        part = index[self.dim]
        assert slot.whole[self.dim] % 2 == part.start % 2 == part.stop % 2 == 0, f"{self.slot} splits a pair"
        for turn in (0, 1):
            target = slot.target[(slice(None),) * self.dim + (slice(turn, None, 2),)]
            offset = 0 if len(names) == 2 else turn * half
            rows = slice(offset + part.start // 2, offset + part.stop // 2)
            shape = list(slot.whole)
            if len(names) == 2:
                shape[self.dim] = half
            yield Piece(names[turn % len(names)], tuple(shape), _replaced(index, self.dim, rows), target)


def same(slot: str, source: str, shift: int = 0) -> Rule:
    """The slot's tensor stands in the checkpoint under another name, and perhaps under another number."""
    return Rule(slot, (source,), shift=shift)


def pair(slot: str, gate: str, up: str, dim: int = 0) -> Rule:
    """Even entries along `dim` come from `gate`, odd ones from `up`."""
    return Rule(slot, (gate, up), turns=True, dim=dim)


def halves(slot: str, source: str, dim: int) -> Rule:
    """Even entries along `dim` come from the first half of `source`, odd ones from the second."""
    return Rule(slot, (source,), turns=True, dim=dim)


@dataclass(frozen=True)
class Table:
    """The rules of one way to name tensors. `skipped`: beginnings of names that nothing here wants."""

    name: str
    rules: tuple[Rule, ...]
    skipped: tuple[str, ...] = ()

    def renamed(self, name: str, old: str, new: str, skipped: tuple[str, ...]) -> "Table":
        """The same table for sources that begin with `new` where these begin with `old`."""

        def moved(source: str) -> str:
            return new + source.removeprefix(old) if source.startswith(old) else source

        rules = tuple(replace(rule, sources=tuple(map(moved, rule.sources))) for rule in self.rules)
        return Table(name, rules, skipped)

    def pieces(self, slots: Mapping[str, Slot]) -> dict[str, list[Piece]]:
        """What to read for each slot. Every slot must have exactly one rule."""
        compiled = [(re.compile(re.escape(rule.slot).replace(r"\{n\}", r"(\d+)")), rule) for rule in self.rules]
        found: dict[str, list[Piece]] = {}
        for name, slot in slots.items():
            matches = [(match, rule) for pattern, rule in compiled if (match := pattern.fullmatch(name))]
            assert len(matches) == 1, f"table {self.name!r} has {len(matches)} rules for slot {name}, not one"
            match, rule = matches[0]
            found[name] = list(rule.pieces(slot, "".join(match.groups())))
        return found

    def unskipped(self, names: Iterable[str]) -> list[str]:
        """Those names that a model of this table should want, in order."""
        return sorted(name for name in names if not name.startswith(self.skipped))


def _index(slot: Slot) -> tuple[slice, ...]:
    """The slot's part of the whole, one slice per dimension."""
    everything = tuple(slice(0, size) for size in slot.whole)
    return everything if slot.dim is None else _replaced(everything, slot.dim, slice(slot.start, slot.stop))


def _replaced(index: tuple[slice, ...], dim: int, part: slice) -> tuple[slice, ...]:
    return (*index[:dim], part, *index[dim + 1 :])
