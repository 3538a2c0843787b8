"""One rank of test_sharded_loading.py: loads its part, compares it with the whole, and runs a prompt."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from steps import World

import inkcap.ops  # noqa: F401  declares the implementations
from inkcap.models.inkling.config import InklingConfig
from inkcap.models.inkling.model import Inkling
from inkcap.models.inkling.weights import TABLES
from inkcap.ops.dispatch import bind
from inkcap.parallel.comm import Comm
from inkcap.weights.load import load
from inkcap.weights.reader import Checkpoint

CPU = torch.device("cpu")


def stored_bytes(name, slot):
    """Of a slot's part, in the demo's dtypes."""
    return slot.target.numel() * (4 if name.endswith(("router.bias", "router.global_scale")) else 2)


def compare(directory, comm):
    """This rank's part of the checkpoint beside all of it."""
    config = InklingConfig.from_json(json.loads((directory / "config.json").read_text()))
    prompt = [7 * i % config.unpadded_vocab_size for i in range(70)]
    models, loaded, logits = {}, {}, {}
    for name, group in (("whole", Comm.alone()), ("part", comm)):
        model = models[name] = Inkling(config, group, torch.float32, CPU)
        loaded[name] = load(Checkpoint(directory), model.slots(), TABLES, progress=False).bytes_read
        logits[name] = model.head(model.forward(World(model.states).batch([(0, 0, prompt)])))
    whole, part = models["whole"].slots(), models["part"].slots()
    return {
        "different": [
            name for name in whole if not torch.equal(part[name].part(whole[name].target), part[name].target)
        ],
        "split": {name: [slot.start, slot.stop] for name, slot in part.items() if slot.dim is not None},
        "bytes": loaded,
        "wanted_bytes": {
            name: sum(stored_bytes(*item) for item in model.slots().items()) for name, model in models.items()
        },
        "error": float((logits["part"] - logits["whole"]).abs().max() / logits["whole"].abs().max()),
    }


torch.set_num_threads(1)
bind(CPU, {})
rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
comm = Comm.join(dist.FileStore(store, size), rank, size, name="tp", device=CPU, timeout_seconds=60)
print(json.dumps([compare(Path(directory), comm) for directory in sys.argv[4:]]))
