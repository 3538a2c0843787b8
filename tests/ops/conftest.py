"""Runs a test once with the references and once with what a CPU is given."""

import pytest
import torch

import inkcap.ops  # noqa: F401  declares the implementations
from inkcap.ops.dispatch import OPS, bind

CPU = torch.device("cpu")


@pytest.fixture(params=["ref", "bound"])
def ops(request):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    bind(CPU, dict.fromkeys(OPS, "ref") if request.param == "ref" else {})
    yield request.param
    bind(CPU)
