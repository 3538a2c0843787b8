"""What one visit of one layer keeps between steps, as declared by a model. No torch: dtypes are names."""

from dataclasses import dataclass
from math import prod

ALIGNMENT = 16  # bytes: what one vector load takes
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1, "int8": 1}


@dataclass(frozen=True)
class Plane:
    """One tensor of state: [blocks, block, *shape] in the arena."""

    name: str
    shape: tuple[int, ...]  # per token, on one rank
    dtype: str  # "bfloat16", "float32", "float8_e4m3fn"


@dataclass(frozen=True)
class LayerState:
    """State of one visit in one cache group. A visit may declare several, one per group."""

    group: str  # "full", "window", "sconv"
    visit: int
    planes: tuple[Plane, ...]
    window: int | None  # tokens, the token itself included; None: everything before it
    block: int  # tokens in one block
    reads_own_step: bool


def plane_bytes(plane: Plane, block: int) -> int:
    """Bytes that one block of `plane` takes in the arena, padding included."""
    size = block * prod(plane.shape) * ITEM_BYTES[plane.dtype]
    return -(-size // ALIGNMENT) * ALIGNMENT
