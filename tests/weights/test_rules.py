"""weights/rules.py: each kind of rule on whole tensors and on parts."""

import pytest
import torch

from inkcap.parallel.slot import Slot
from inkcap.weights.rules import Table, halves, pair, same

GATE = torch.arange(24.0).view(2, 4, 3)
UP = 100 + GATE
TURNS = torch.stack([GATE, UP], 2).flatten(1, 2)  # [2, 8, 3]: g0 u0 g1 u1 ...


def filled(table, slot, sources):
    """The slot after its pieces were copied from `sources`."""
    slot.target.fill_(float("nan"))
    for piece in table.pieces({"layers.12.w": slot})["layers.12.w"]:
        assert tuple(sources[piece.source].shape) == piece.shape
        piece.target.copy_(sources[piece.source][piece.index])
    return slot.target


SLOTS = [(None, 0, 0), (0, 1, 1), (1, 2, 4), (1, 4, 4), (2, 1, 2)]  # dim, start, size along it


def slot_of(dim, start, size):
    shape = list(TURNS.shape)
    if dim is not None:
        shape[dim] = size
    return Slot(torch.empty(shape), tuple(TURNS.shape), dim, start)


@pytest.mark.parametrize("part", SLOTS)
@pytest.mark.parametrize(
    ("rule", "sources"),
    [
        (same("layers.{n}.w", "block.{n}.w13"), {"block.12.w13": TURNS}),
        (pair("layers.{n}.w", "b.{n}.gate", "b.{n}.up", dim=1), {"b.12.gate": GATE, "b.12.up": UP}),
        (halves("layers.{n}.w", "b.{n}.both", dim=1), {"b.12.both": torch.cat([GATE, UP], 1)}),
    ],
)
def test_every_rule_gives_the_same_part(rule, sources, part):
    slot = slot_of(*part)
    assert torch.equal(filled(Table("t", (rule,)), slot, sources), slot.part(TURNS))


def test_a_part_that_splits_a_pair_is_our_bug():
    table = Table("t", (halves("layers.{n}.w", "b.{n}", dim=1),))
    with pytest.raises(AssertionError, match="splits a pair"):
        table.pieces({"layers.0.w": slot_of(1, 1, 4)})


def test_every_slot_needs_one_rule():
    table = Table("t", (same("layers.{n}.w", "a.{n}"), same("layers.{n}.w", "b.{n}"), same("x.w", "y")))
    slot = Slot(torch.empty(1), (1,))
    with pytest.raises(AssertionError, match=r"0 rules for slot norm\.weight"):
        table.pieces({"norm.weight": slot})
    with pytest.raises(AssertionError, match=r"2 rules for slot layers\.3\.w"):
        table.pieces({"layers.3.w": slot})
    with pytest.raises(AssertionError, match="0 rules for slot xxw"):
        table.pieces({"xxw": slot})


def test_a_renamed_table_keeps_everything_else():
    table = Table("t", (same("x", "model.x"), pair("y", "model.a", "lm.b"))).renamed("u", "model.", "deep.", ("z.",))
    assert [rule.sources for rule in table.rules] == [("deep.x",), ("deep.a", "lm.b")]
    assert table.unskipped(["z.1", "q", "deep.x"]) == ["deep.x", "q"]
