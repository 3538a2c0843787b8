"""The stream leaves a write undone until the next read, and does it once, in the writer's batch."""

import torch

from inkcap.layers.norm import RMSNorm
from inkcap.layers.stream import ResidualStream

CPU = torch.device("cpu")


class Adds:
    """Stands in for a sublayer's end: adds its rows and writes down what it was given."""

    def __init__(self):
        self.calls = []

    def settle(self, rows, residual, conv, batch):
        self.calls.append((conv, batch))
        return residual + rows, residual.new_full((len(residual),), 7.0)


def test_reads_see_all_writes_and_each_is_settled_once():
    stream, out, norm = ResidualStream(torch.zeros(2, 3)), Adds(), RMSNorm(3, 1e-6, CPU)
    norm.slots()["weight"].fill(torch.ones(3))
    assert stream.read(norm).squares is None
    stream.write(torch.ones(2, 3), out, "conv a", "batch a")
    assert out.calls == []
    stream.write(torch.ones(2, 3), out, "conv b", "batch b")
    assert out.calls == [("conv a", "batch a")]
    rows = stream.read(norm)
    assert torch.equal(rows.rows, torch.full((2, 3), 2.0))
    assert torch.equal(rows.squares, torch.full((2,), 7.0))
    assert torch.allclose(rows.tensor(), torch.ones(2, 3))
    assert torch.equal(stream.read(norm).rows, rows.rows)
    assert out.calls == [("conv a", "batch a"), ("conv b", "batch b")]


def test_tensors_for_another_stage_are_settled():
    stream, out = ResidualStream(torch.zeros(1, 2)), Adds()
    stream.write(torch.ones(1, 2), out, "conv", "batch")
    (hidden,) = stream.tensors()
    assert torch.equal(hidden, torch.ones(1, 2))
    assert len(out.calls) == 1
