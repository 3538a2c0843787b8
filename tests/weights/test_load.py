"""weights/load.py: one report, progress, and nothing read before everything fits."""

import sys

import pytest
import torch

from inkcap.base.errors import CheckpointMismatch
from inkcap.parallel.slot import Slot
from inkcap.weights.headers import SINGLE
from inkcap.weights.load import SHOWN, load
from inkcap.weights.reader import Checkpoint
from inkcap.weights.rules import Table, pair, same

TABLES = (
    Table("plain", (same("a.{n}", "plain.{n}"), same("b", "plain.b")), skipped=("tower.",)),
    Table("split", (pair("a.{n}", "gate.{n}", "up.{n}"), same("b", "split.b"))),
)


def slots(layers=2, dtype=torch.float32):
    return {
        **{f"a.{n}": Slot(torch.full((4, 3), float("nan"), dtype=dtype), (4, 3)) for n in range(layers)},
        "b": Slot(torch.full((2,), float("nan")), (2,)),
    }


@pytest.fixture
def save(tmp_path, write_tensors):
    def save(tensors):
        write_tensors(tmp_path / SINGLE, tensors)
        return Checkpoint(tmp_path)

    return save


def test_all_slots_are_filled_whatever_the_names(save):
    whole = torch.randn(2, 4, 3)
    b = torch.randn(2)
    plain = {"plain.0": whole[0], "plain.1": whole[1], "plain.b": b, "tower.x": torch.zeros(1000)}
    split = {f"{name}.{n}": whole[n, at::2] for n in range(2) for at, name in enumerate(("gate", "up"))}
    for tensors in (plain, {**split, "split.b": b}):
        wanted = slots()
        loaded = load(save(tensors), wanted, TABLES)
        assert torch.equal(wanted["a.0"].target, whole[0])
        assert torch.equal(wanted["a.1"].target, whole[1])
        assert torch.equal(wanted["b"].target, b)
        assert loaded.bytes_read == 4 * (24 + 2)  # the tower is not touched


def test_floats_are_converted_once(save):
    whole = torch.randn(4, 3, dtype=torch.float64)
    wanted = slots(1, torch.bfloat16)
    load(save({"plain.0": whole, "plain.b": torch.ones(2, dtype=torch.float16)}), wanted, TABLES)
    assert torch.equal(wanted["a.0"].target, whole.to(torch.bfloat16))


def test_one_report_of_everything(save):
    checkpoint = save(
        {
            "plain.0": torch.zeros(3, 4),
            "plain.2": torch.zeros(4, 3),
            "plain.3": torch.zeros(4, 3, dtype=torch.uint8),
            "other": torch.zeros(1),
        }
    )
    wanted = slots(4)
    del wanted["a.2"]
    with pytest.raises(CheckpointMismatch) as caught:
        load(checkpoint, wanted, TABLES)
    assert str(caught.value).splitlines()[1:] == [
        "  2 missing:",
        "    plain.1",
        "    plain.b",
        "  2 spare (in the checkpoint, wanted by nothing):",
        "    other",
        "    plain.2",
        "  1 of another shape:",
        "    plain.0 is [3, 4], wanted [4, 3]",
        "  1 of another dtype:",
        "    plain.3 is U8, wanted BF16, F16 or F32",
    ]
    assert all(slot.target.isnan().all() for slot in wanted.values())


def test_a_long_report_is_cut(save):
    with pytest.raises(CheckpointMismatch, match=rf"{100} missing:(.|\n)*and {100 - SHOWN} more"):
        load(save({"plain.b": torch.zeros(2)}), slots(100), TABLES)


def test_names_of_no_table(save):
    with pytest.raises(CheckpointMismatch, match=r"\(transformer\.h, \.\.\.\) in none of the known ways: plain, split"):
        load(save({"transformer.h": torch.zeros(1)}), slots(), TABLES)


@pytest.mark.parametrize(
    ("terminal", "wanted", "shown"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_the_progress_bar_is_for_terminals(save, terminal, wanted, shown, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    checkpoint = save({"plain.0": torch.zeros(4, 3), "plain.b": torch.zeros(2)})
    load(checkpoint, slots(1), TABLES, progress=wanted)
    captured = capsys.readouterr()
    assert ("loading" in captured.err and "B/s" in captured.err) == shown
    assert not captured.out
