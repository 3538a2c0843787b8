"""Streams a checkpoint into a model's slots, after comparing all of it with what the model wants."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from tqdm import tqdm

from inkcap.base.errors import CheckpointMismatch
from inkcap.base.log import logger
from inkcap.parallel.slot import Slot
from inkcap.weights.reader import DTYPES, Checkpoint
from inkcap.weights.rules import Piece, Table

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHOWN = 20  # names per kind of mismatch
READERS = 8  # threads at most: one brings about 3 GB/s from the page cache to a GPU, two fill new memory twice as fast
PART_BYTES = 64 << 20  # of a piece that one of them reads at a time


@dataclass(frozen=True)
class Loaded:
    """What loading took."""

    tensors: int
    bytes_read: int  # of this rank
    seconds: float


@dataclass
class Mismatch:
    """Everything in which a checkpoint and a model differ; one error tells it all."""

    missing: list[str] = field(default_factory=list)
    spare: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    mistyped: list[str] = field(default_factory=list)

    def check(self, directory: Path) -> None:
        """Raise CheckpointMismatch if there is anything to tell."""
        kinds = {
            "missing": self.missing,
            "spare (in the checkpoint, wanted by nothing)": self.spare,
            "of another shape": self.misshapen,
            "of another dtype": self.mistyped,
        }
        lines = [f"the tensors in {directory} do not fit its config.json"]
        for kind, names in kinds.items():
            if names:
                lines.append(f"  {len(names)} {kind}:")
                lines += [f"    {name}" for name in sorted(names)[:SHOWN]]
                lines += [f"    and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
        if len(lines) > 1:
            raise CheckpointMismatch("\n".join(lines))


def choose_table(checkpoint: Checkpoint, tables: Sequence[Table]) -> Table:
    """The table whose names the checkpoint uses most. Raises CheckpointMismatch when it uses none of any."""

    def known(table: Table) -> int:
        first = {source.replace("{n}", "0") for rule in table.rules for source in rule.sources}
        return len(first & checkpoint.files.keys())

    best = max(tables, key=known)
    if not known(best):
        some = ", ".join(sorted(checkpoint.files)[:3])
        names = ", ".join(table.name for table in tables)
        where = checkpoint.directory
        raise CheckpointMismatch(f"{where} names its tensors ({some}, ...) in none of the known ways: {names}")
    return best


def check(checkpoint: Checkpoint, slots: Mapping[str, Slot], tables: Sequence[Table]) -> list[Piece]:
    """What to read for the slots, in the order of the files, once it is known to be there.

    Targets may be on paper. Raises CheckpointMismatch with one report of all missing, spare, misshapen and mistyped
    tensors, and CheckpointUnreadable.
    """
    table = choose_table(checkpoint, tables)
    pieces = [piece for found in table.pieces(slots).values() for piece in found]
    compare(checkpoint, pieces, table).check(checkpoint.directory)
    return sorted(pieces, key=lambda piece: (checkpoint.files[piece.source], checkpoint.stored(piece.source).start))


def readers() -> ThreadPoolExecutor:
    """Threads to read a checkpoint with."""
    return ThreadPoolExecutor(min(READERS, len(os.sched_getaffinity(0))))


def load(
    checkpoint: Checkpoint, slots: Mapping[str, Slot], tables: Sequence[Table], *, progress: bool = True
) -> Loaded:
    """Fill every slot with its part of the checkpoint, reading in the order of the files, in several threads.

    `progress` shows a bar on stderr where that is a terminal. Raises as `check`, before anything is read.
    """
    began = time.perf_counter()
    pieces = check(checkpoint, slots, tables)
    parts = [part for piece in pieces for part in _parts(checkpoint, piece)]
    sizes = [_stored_bytes(checkpoint, part) for part in parts]
    with (
        tqdm(
            total=sum(sizes),
            unit="B",
            unit_scale=True,
            desc="loading",
            disable=None if progress else True,
            mininterval=0.2,
        ) as bar,
        readers() as pool,
    ):
        read = pool.map(lambda part: checkpoint.read(part.source, part.index, part.target), parts)
        for size, _ in zip(sizes, read, strict=True):
            bar.update(size)
    done = Loaded(len(pieces), sum(sizes), time.perf_counter() - began)
    logger.info(
        "loaded %d tensors, %.3f GB in %.2f s (%.2f GB/s)",
        done.tensors,
        done.bytes_read / 1e9,
        done.seconds,
        done.bytes_read / 1e9 / done.seconds,
    )
    return done


def compare(checkpoint: Checkpoint, pieces: Sequence[Piece], table: Table) -> Mismatch:
    """Every difference between what the pieces want and what the checkpoint's headers say."""
    found = Mismatch()
    wanted = {piece.source: piece for piece in pieces}
    found.missing = [name for name in wanted if name not in checkpoint.files]
    found.spare = [name for name in table.unskipped(checkpoint.files) if name not in wanted]
    present = [name for name in wanted if name in checkpoint.files]
    checkpoint.open(present)
    for name in present:
        piece, stored = wanted[name], checkpoint.stored(name)
        if stored.shape != piece.shape:
            found.misshapen.append(f"{name} is {list(stored.shape)}, wanted {list(piece.shape)}")
        dtype = DTYPES[stored.dtype]
        if dtype != piece.target.dtype and not (dtype in FLOATS and piece.target.dtype in FLOATS):
            found.mistyped.append(f"{name} is {stored.dtype}, wanted BF16, F16 or F32")
    return found


def _parts(checkpoint: Checkpoint, piece: Piece) -> Iterator[Piece]:
    """Some rows of a piece at a time, so that the largest piece keeps all readers busy."""
    if not piece.index:
        yield piece
        return
    first, *others = piece.index
    rows = len(piece.target)
    step = max(1, rows * PART_BYTES // max(1, _stored_bytes(checkpoint, piece)))
    for row in range(0, rows, step):
        cut = slice(first.start + row, first.start + min(row + step, rows))
        yield replace(piece, index=(cut, *others), target=piece.target[row : row + step])


def _stored_bytes(checkpoint: Checkpoint, piece: Piece) -> int:
    return piece.target.numel() * DTYPES[checkpoint.stored(piece.source).dtype].itemsize
