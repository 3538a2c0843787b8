"""One rank of test_numerics.py: a prompt with reference numerics, on this rank's part and on the whole."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from steps import World

import inkcap.ops  # noqa: F401  declares the implementations
from inkcap.base.formats import Numerics
from inkcap.models.registry import load_model
from inkcap.ops.dispatch import bind
from inkcap.parallel.comm import Comm

CPU = torch.device("cpu")


def logits(directory, comm, numerics):
    with torch.inference_mode():
        model = load_model(directory, comm=comm, dtype=torch.float32, device=CPU, progress=False, numerics=numerics)
        return model.head(model.forward(World(model.states).batch([(0, 0, [7 * i % 90 for i in range(40)])])))


torch.set_num_threads(1)
bind(CPU, {})
rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
comm = Comm.join(dist.FileStore(store, size), rank, size, name="tp", device=CPU, timeout_seconds=60)
found = []
for directory in map(Path, sys.argv[4:]):
    whole = logits(directory, Comm.alone(), Numerics.REFERENCE)
    others = {
        "ranks": logits(directory, comm, Numerics.REFERENCE),
        "exact": logits(directory, Comm.alone(), Numerics.W4A16),
    }
    found.append({name: float((other - whole).abs().max() / whole.abs().max()) for name, other in others.items()})
print(json.dumps(found))
