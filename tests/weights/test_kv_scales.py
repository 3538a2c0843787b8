"""Scales of the cache's codes from a file: what it may hold, on one rank of several, and what is refused."""

import json

import pytest
import torch

from inkcap.base.errors import ConfigInvalid
from inkcap.parallel.slot import Slot
from inkcap.weights.kv_scales import read_kv_scales


@pytest.fixture
def slots():
    """Heads 2 and 3 of four."""
    names = ("layers.0.attention.k_scale", "layers.0.attention.v_scale")
    return {name: Slot(torch.full((2,), 8.0), (4,), 0, 2) for name in names}


def write(tmp_path, content):
    path = tmp_path / "scales.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_scales_are_raised_to_powers_of_two_and_shared_out(slots, tmp_path):
    found = {"layers.0.attention.v_scale": [1, 1, 0.25, 0.26]}
    assert read_kv_scales(write(tmp_path, found), slots) == 1
    assert slots["layers.0.attention.v_scale"].target.tolist() == [0.25, 0.5]
    assert slots["layers.0.attention.k_scale"].target.tolist() == [8.0, 8.0]  # as the weights gave it
    assert read_kv_scales(write(tmp_path, {"layers.0.attention.k_scale": 0.1}), slots) == 1
    assert slots["layers.0.attention.k_scale"].target.tolist() == [0.125, 0.125]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "no JSON object"),
        ({}, "no JSON object"),
        (
            {"layers.9.attention.v_scale": 1},
            r"'layers\.9\.attention\.v_scale', which this model has not; names are like",
        ),
        ({"layers.0.attention.v_scale": [1, 2]}, "2 numbers .* there are 4 kv heads"),
        ({"layers.0.attention.v_scale": 0}, "0 for layers.* above 0"),
        ({"layers.0.attention.v_scale": "1"}, "'1' for layers.* above 0"),
        ({"layers.0.attention.v_scale": True}, "True for layers.* above 0"),
    ],
)
def test_what_is_wrong_is_named(content, said, slots, tmp_path):
    with pytest.raises(ConfigInvalid, match=said):
        read_kv_scales(write(tmp_path, content), slots)


def test_a_missing_file_is_named(slots, tmp_path):
    with pytest.raises(ConfigInvalid, match=r"nowhere\.json cannot be read"):
        read_kv_scales(tmp_path / "nowhere.json", slots)
