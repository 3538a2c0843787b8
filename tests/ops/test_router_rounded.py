"""Routing that leaves the row rounded, in the interpreter, against the references; and its cases of more launches."""

import numpy as np
import pytest
import torch
from ops.test_quantize_triton import same

from inkcap.ops.letters import BOXES
from inkcap.ops.quantize.ref import Rounding
from inkcap.ops.router import rounded
from inkcap.ops.router.ref import route_sigmoid_rounded
from inkcap.ops.router.rounded import route_sigmoid_rounded_triton
from inkcap.ops.values import Normed

WAYS = {"rows": Rounding(16), "factor": Rounding(16, torch.tensor(0.01)), "powers": Rounding(32)}


@pytest.fixture(autouse=True)
def quiet():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with np.errstate(all="ignore"):
        yield


class Counted:
    """A kernel that notes its launches."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        self.launches.append(grid)
        return self.kernel[grid]


def agree(tokens, experts, length, how, normed=True):
    rows = Normed(torch.randn(tokens, length), torch.rand(length), 1e-6)
    if normed:
        rows.normed = rows.rows
    weight, bias = torch.randn(experts, length) / length**0.5, torch.randn(experts) / 8
    route, own = route_sigmoid_rounded_triton(rows, weight, bias, how, top_k=3, route_scale=2.0)
    want, plain = route_sigmoid_rounded.reference(rows, weight, bias, how, top_k=3, route_scale=2.0)
    assert torch.equal(route.choice, want.choice)
    torch.testing.assert_close(route.weights, want.weights)
    assert route.gammas.shape == (tokens, 0)
    same([own], [plain])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("experts", "length"), [(5, 96), (9, 544), (50, 4608)])
def test_one_launch(way, experts, length, monkeypatch):
    """Twice: what programs post must be gone again."""
    launches, kernel = [], rounded.route_row_rounded
    monkeypatch.setattr(rounded, "route_row_rounded", Counted(kernel, launches))
    for _ in range(2):
        agree(1, experts, length, WAYS[way])
    assert len(launches) == 2
    assert BOXES
    assert all((box == key[-1]).all() for key, box in BOXES.items())


@pytest.mark.parametrize(
    "case", [{"tokens": 3}, {"normed": False}, {"experts": 3, "length": 320}, {"tokens": 0}], ids=str
)
def test_separate_launches(case):
    """More tokens, a norm to be done first, or more parts of the row than programs."""
    agree(**{"tokens": 1, "experts": 7, "length": 96, "how": WAYS["rows"], "normed": True} | case)


def test_columns_must_fill_blocks():
    with pytest.raises(ValueError, match="do not divide"):
        agree(1, 9, 40, WAYS["rows"])
