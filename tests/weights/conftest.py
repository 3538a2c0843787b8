"""Small safetensors files, sound ones and broken ones."""

import json

import pytest
import torch

from inkcap.weights.writer import Planned, write_file


def raw(header: object, data: bytes) -> bytes:
    """A file with this header, a string taken as it is, and this data."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.fixture
def make_raw():
    return raw


@pytest.fixture
def write_tensors():
    """`write_tensors(file, {name: tensor})`."""

    def write(file, tensors):
        write_file(file, {name: Planned(tuple(t.shape), t.dtype, lambda t=t: t) for name, t in tensors.items()})

    return write


@pytest.fixture
def numbers():
    """Tensors of several dtypes and ranks, one of them with an odd number of bytes before the others."""
    torch.manual_seed(0)
    return {
        "odd": torch.arange(3, dtype=torch.uint8),
        "half": torch.randn(6, 5, 4).to(torch.bfloat16),
        "full": torch.randn(7, 3),
        "vector": torch.randn(9).to(torch.float16),
        "one": torch.tensor([2.5]),
        "empty": torch.empty(0, 3),
        "long": torch.arange(4),
    }
