"""weights/writer.py: shards of about equal size, in the order given, and the same bytes again."""

import json

import pytest
import torch

from inkcap.weights.headers import INDEX
from inkcap.weights.reader import Checkpoint
from inkcap.weights.writer import Planned, write_file, write_shards


def planned(count):
    tensors = {f"t{i}": torch.full((i + 1, 2), float(i)) for i in range(count)}
    return {name: Planned(tuple(t.shape), t.dtype, lambda t=t: t) for name, t in tensors.items()}


@pytest.mark.parametrize("shards", [1, 3, 5])
def test_shards_hold_everything_once(tmp_path, shards):
    write_shards(tmp_path, planned(10), shards)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == shards
    checkpoint = Checkpoint(tmp_path)
    checkpoint.open(checkpoint.files)
    for i in range(10):
        target = torch.empty(i + 1, 2)
        checkpoint.read(f"t{i}", (slice(0, i + 1), slice(0, 2)), target)
        assert (target == i).all()
    assert json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"] == 8 * sum(range(1, 11))
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) - min(sizes) < 400


def test_the_same_bytes_again(tmp_path):
    for name in ("a", "b"):
        write_file(tmp_path / name, planned(4))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_tensor_that_is_not_as_planned_is_our_bug(tmp_path):
    with pytest.raises(AssertionError, match="x is not as planned"):
        write_file(tmp_path / "a", {"x": Planned((2,), torch.float32, lambda: torch.zeros(3))})
