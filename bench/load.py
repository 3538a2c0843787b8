"""Loading speed and peak memory: one process, files in the page cache, memory that is new.

    python bench/load.py [--format bf16 nvfp4 mxfp8] [--dtype bfloat16 float32] [--threads 2] [--rounds 3]

The checkpoint is random, a second-generation model of half a billion weights in experts. Each round loads it in a
process of its own through models/registry.py, so that memory is new and the peak is that of loading. Beside it stands
the floor: reading the same bytes into new memory, then writing as many zeros as decoding makes bytes, in one thread.
`stored` counts the bytes of the files, `kept` those of parameters;
the peak is over the process before loading and over what is kept. The best of the rounds counts. Prints a JSON line
per format and dtype.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from math import prod
from pathlib import Path

import torch

import inkcap.ops  # noqa: F401  declares the implementations
from inkcap.base.formats import WeightFormat
from inkcap.layers.formats import Stored
from inkcap.models.families import find_entry
from inkcap.models.inkling2.demo import DemoShape
from inkcap.models.registry import MODELS, build, load_model
from inkcap.ops.dispatch import bind
from inkcap.parallel.comm import Comm
from inkcap.weights.headers import INDEX
from inkcap.weights.writer import Planned, write_shards

SHAPE = DemoShape(
    hidden=1024,
    layers=4,
    full_every=4,
    block=4,
    heads=8,
    kv_heads=4,
    head_dim=128,
    expert_width=512,
    experts=80,
    chosen=8,
    vocabulary=8000,
    padded_vocabulary=8192,
    max_length=1024,
)
FORMATS = {"bf16": WeightFormat.DENSE, "nvfp4": WeightFormat.NVFP4, "mxfp8": WeightFormat.MXFP8}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CPU = torch.device("cpu")


def write(directory: Path, form: WeightFormat) -> None:
    """A checkpoint of SHAPE with experts in that format. Its values mean nothing, but can be decoded."""
    entry, config = find_entry(SHAPE.config()), SHAPE.config()
    text = entry.generation.read(config)
    stored = {layer: Stored(form, form) for layer in range(SHAPE.layers)}
    model = build(entry, text, Comm.alone(), torch.bfloat16, torch.device("meta"), stored)
    (table,) = MODELS[entry.family][1]
    tensors = {}
    for found in table.pieces(model.slots()).values():
        for piece in found:
            tensors[piece.source] = Planned(piece.shape, piece.target.dtype, lambda piece=piece: make(piece))
    write_shards(directory, tensors, 4)
    (directory / "config.json").write_text(json.dumps(config))


def make(piece) -> torch.Tensor:
    """Codes of all kinds; scales that are neither negative nor NaN; small numbers."""
    shape, dtype = piece.shape, piece.target.dtype
    if dtype.itemsize > 1:
        return torch.full(shape, 0.01, dtype=dtype) if prod(shape) < 1 << 20 else torch.randn(shape).to(dtype)
    low, high = (0x28, 0x70) if piece.source.endswith("_scale") else (0, 0x7F)
    return torch.randint(low, high, shape, dtype=torch.uint8).view(dtype)


def resident(line: str) -> int:
    """Bytes of this process in memory: now (VmRSS), or at most so far (VmHWM; ru_maxrss counts its parent too)."""
    text = Path("/proc/self/status").read_text()
    return next(int(found.split()[1]) * 1024 for found in text.splitlines() if found.startswith(line))


def load_once(directory: Path, dtype: str, threads: int) -> dict[str, float]:
    """Load in this process, which has loaded nothing yet."""
    torch.set_num_threads(threads)
    bind(CPU, {})
    before = resident("VmRSS")
    began = time.perf_counter()
    with torch.inference_mode():
        model = load_model(directory, comm=Comm.alone(), dtype=DTYPES[dtype], device=CPU, progress=False)
    seconds = time.perf_counter() - began
    del model
    return {"seconds": seconds, "peak": resident("VmHWM") - before}


def floor(directory: Path, made: int) -> float:
    """Seconds to read the files into new memory and to write `made` bytes of zeros into more of it."""
    began, held = time.perf_counter(), []
    for file in directory.glob("*.safetensors"):
        memory = torch.empty(file.stat().st_size, dtype=torch.uint8)
        with file.open("rb", buffering=0) as opened:
            at = 0
            while at < len(memory):
                at += opened.readinto(memory.numpy()[at:].data)
        held.append(memory)
    held.append(torch.empty(made, dtype=torch.uint8).zero_())
    return time.perf_counter() - began


def kept_bytes(form: WeightFormat, dtype: str) -> tuple[int, int]:
    """Bytes of all parameters once loaded, and of those that decoding makes."""
    dense = build(
        find_entry(SHAPE.config()),
        find_entry(SHAPE.config()).generation.read(SHAPE.config()),
        Comm.alone(),
        DTYPES[dtype],
        torch.device("meta"),
        {},
    )
    sizes = {name: slot.target.numel() * slot.target.element_size() for name, slot in dense.slots().items()}
    experts = sum(size for name, size in sizes.items() if ".mlp.experts." in name)
    return sum(sizes.values()), 0 if form is WeightFormat.DENSE else experts


def measure(directory: Path, name: str, dtype: str, threads: int, rounds: int) -> dict[str, object]:
    """Figures of one format and dtype."""
    words = [sys.executable, __file__, "--child", str(directory), "--dtype", dtype, "--threads", str(threads)]
    runs = [json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout) for _ in range(rounds)]
    kept, made = kept_bytes(FORMATS[name], dtype)
    stored = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    best = min(run["seconds"] for run in runs)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    least = min(floor(directory, made) for _ in range(rounds))
    return {
        "bench": "load",
        "format": name,
        "dtype": dtype,
        "stored_gb": round(stored / 1e9, 3),
        "kept_gb": round(kept / 1e9, 3),
        "seconds": round(best, 3),
        "stored_gb_per_second": round(stored / best / 1e9, 2),
        "kept_gb_per_second": round(kept / best / 1e9, 2),
        "floor_stored_gb_per_second": round(stored / least / 1e9, 2),
        "peak_over_kept_gib": round((max(run["peak"] for run in runs) - kept) / 2**30, 3),
        "threads": threads,
        "load": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "commit": commit.stdout.strip(),
    }


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=["bf16", "nvfp4", "mxfp8"])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="where checkpoints are written and found again; default: nowhere")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(load_once(options.child, options.dtype[0], options.threads)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.format:
            directory = (options.keep or Path(scratch)) / name
            directory.mkdir(parents=True, exist_ok=True)
            if not (directory / INDEX).exists():
                write(directory, FORMATS[name])
            for dtype in options.dtype:
                print(json.dumps(measure(directory, name, dtype, options.threads, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
