"""Writes a checkpoint with the widths of one rank of eight of Inkling, to start a server on one GPU.

    python bench/rank_checkpoint.py DIRECTORY [--layers 20] [--weights nvfp4]
    inkcap serve DIRECTORY

Random weights of a size that keeps activations near one, made on the GPU where there is one. All of the vocabulary is
there, which a rank would hold an eighth of: a server needs a tokenizer. With 20 layers and experts in NVFP4 the files
take 25 GB. Answers mean nothing and never end by themselves.
"""

import argparse
import time
from pathlib import Path

import torch
from shapes import fill

from inkcap.base.formats import WeightFormat
from inkcap.layers.formats import Stored
from inkcap.models.demo import write_checkpoint
from inkcap.models.families import find_entry
from inkcap.models.inkling.config import InklingConfig
from inkcap.models.inkling.demo import DemoShape
from inkcap.models.inkling.weights import PUBLISHED
from inkcap.models.registry import build
from inkcap.parallel.comm import Comm
from inkcap.weights.rules import Piece
from inkcap.weights.writer import Planned

FORMATS = {"bf16": WeightFormat.DENSE, "nvfp4": WeightFormat.NVFP4_SCALE2}
RANK = DemoShape(
    hidden=6144,
    layers=20,
    global_every=6,
    heads=8,
    kv_heads=1,
    local_kv_heads=2,
    head_dim=128,
    window=512,
    d_rel=16,
    extent=1024,
    floor=128_000,
    dense_width=3072,
    expert_width=384,
    experts=256,
    chosen=6,
    max_length=1 << 20,
    shards=8,
)


def planned(piece: Piece) -> Planned:
    """A whole tensor, brought to the host when its turn comes."""
    assert piece.shape == tuple(piece.target.shape), f"{piece.source} is held in parts"
    return Planned(piece.shape, piece.target.dtype, lambda: piece.target.cpu())


def write(directory: Path, shape: DemoShape, weights: str) -> int:
    """A checkpoint in published names; bytes of its tensors. Raises as `write_checkpoint`."""
    declared = shape.config()
    entry = find_entry(declared)
    text = entry.generation.read(declared)
    assert isinstance(text, InklingConfig), "the shape is one of the first generation"
    stored = Stored(FORMATS[weights], FORMATS[weights])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = {n: stored for n in range(shape.layers) if not text.dense(n)}
    model = build(entry, text, Comm.alone(), torch.bfloat16, device, layers)
    fill(model, shape.hidden, shape.expert_width, text.route_scale, device)
    pieces = [piece for found in PUBLISHED.pieces(model.slots()).values() for piece in found]
    tensors = {piece.source: planned(piece) for piece in pieces}
    write_checkpoint(directory, 0, declared, tensors, shape.shards, tokenizer_length=shape.max_length)
    return sum(tensor.size for tensor in tensors.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=RANK.layers)
    parser.add_argument("--weights", choices=FORMATS, default="nvfp4")
    args = parser.parse_args()
    begin = time.perf_counter()
    shape = DemoShape(**{**vars(RANK), "layers": args.layers})
    size = write(args.directory, shape, args.weights)
    print(f"{args.directory}: {size / 1e9:.1f} GB in {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
