"""The kernels of the activations: the references' tests, run with them under the interpreter."""

import pytest
import torch
from ops import test_act

from inkcap.ops.act.ref import swiglu
from inkcap.ops.act.triton import swiglu_capped_triton, swiglu_triton


@pytest.fixture(autouse=True)
def ops(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(test_act, "swiglu", swiglu_triton)
    monkeypatch.setattr(test_act, "swiglu_capped", swiglu_capped_triton)


@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (2, 5, 6), (0, 4)])
@pytest.mark.parametrize("scaled", [False, True])
def test_swiglu_reads_gate_and_up_side_by_side(shape, scaled):
    test_act.test_swiglu_reads_gate_and_up_side_by_side(shape, scaled)


def test_capped_gate_is_capped_outside_its_sigmoid():
    test_act.test_capped_gate_is_capped_outside_its_sigmoid()


def test_more_units_than_one_program_has():
    x, scale = torch.randn(2, 5000)[:, 1:4801].half(), torch.rand(2)
    torch.testing.assert_close(swiglu_triton(x, scale), swiglu.reference(x, scale))
