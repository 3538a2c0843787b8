"""Tiles and splits of attention, from shapes alone: token and sequence counts, and the longest a sequence may be.

Numbers were measured on an H200 (132 SMs) with 8 query heads on 1 kv head of 128 channels, bf16, keys in pages of 64.
"""

from dataclasses import dataclass

KEYS = 64  # keys of a tile; a page
ROWS = 64  # most rows of a tile: 8 queries of 8 heads cost no more than one where keys are many
FEW = 16  # queries of a sequence that are split over keys whatever the rest of the step is
PROGRAMS = 264  # two a processor
DEEPEST = 256  # product of queries and states that is worth unrolling


@dataclass(frozen=True, slots=True)
class Splits:
    """How a step's few-query sequences are laid out."""

    rows: int  # of a tile
    queries: int  # of a tile
    tiles: int  # bound
    far: int  # programs of tiles beyond the bias
    near: int  # programs of the other tiles

    @property
    def total(self) -> int:
        """Programs of a tile and kv head."""
        return self.far + self.near


def rows_of(widest: int, group: int, most: int) -> tuple[int, int]:
    """Rows, about `most` of them, and queries of a tile for sequences of up to `widest` queries with `group` heads."""
    rows = 16
    while rows < max(min(widest * group, most), group):
        rows *= 2
    return rows, 1 if widest == 1 else rows // group


def bound(tokens: int, sequences: int, queries: int) -> int:
    """Ids of query tiles: sequence i owns those from starts[i] // queries + i on, at most this many."""
    return -(-tokens // queries) + sequences - 1


def whole(tokens: int, sequences: int, widest: int, group: int, kv_heads: int) -> bool:
    """Whether all sequences are split over keys: there are too few tiles of queries to fill the GPU otherwise."""
    if widest <= FEW:
        return True
    _, queries = rows_of(widest, group, ROWS)
    return (tokens // queries) * kv_heads < PROGRAMS // 2 and sequences * 4 <= PROGRAMS


def near_tiles(reach: int, extent: int, window: int | None) -> int:
    """Most tiles of pages with bias or edges that one query of a sequence of `reach` tokens sees."""
    pages = -(-max(reach - 1, 0) // KEYS)
    return min(pages, ((window or extent) + KEYS - 3) // KEYS + 1)


def all_tiles(reach: int, window: int | None) -> int:
    """Most tiles of pages that one query of a sequence of `reach` tokens sees."""
    return -(-max(reach - 1, 0) // KEYS) if window is None else near_tiles(reach, window, window)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the kernel for many queries is compiled. Stages are pipeline depths of its kinds of tiles."""

    rows: int
    warps: int
    near: int  # keys of a tile with bias
    stages: tuple[int, int, int, int]  # pages without bias, this step's keys without it, pages with bias, keys with it


def tiling(window: int | None, bytes_: int) -> Tiling:
    """For full attention or within a window, and elements of so many bytes; measured for two.

    8K queries, us: near 64 425, near 32 434-462; within the window near 32 168, near 64 176; 128 rows 485 and 264.
    """
    if bytes_ > 2:  # shared memory holds no more than one tile
        return Tiling(ROWS, 4, KEYS // 2, (1, 1, 1, 1))
    return Tiling(ROWS, 4, KEYS if window is None else KEYS // 2, (5, 3, 1, 1))


@dataclass(frozen=True, slots=True)
class Shift:
    """The bank shifted for each query of a tile; `pitch` 0: not done, since the product would be too deep."""

    depth: int
    zero: int
    pitch: int


def shift(queries: int, states: int, extent: int) -> Shift:
    """For tiles of `queries` queries and padded `states`; at distance `zero` and beyond no key of a tile has a bias."""
    side = 1 << (queries - 1).bit_length()
    if side * states > DEEPEST:
        return Shift(states, 0, 0)
    zero = -(-(extent + KEYS) // 16) * 16
    return Shift(side * states, zero, -(-(zero + side + 8 + KEYS) // 64) * 64)


def stages(plan: Splits, early: bool, bytes_: int, roomy: bool) -> tuple[int, int]:
    """Pipeline depths of far and near tiles. Triton divides them over two dependent loads: 7 is three tiles in flight.

    Where shared memory is `roomy`; a whole step with one query, ms: depth 5 1.313 at 131K and 1.794 at 1M, depth 7
    1.303 and 1.731. Other numbers of programs are no better.
    """
    if early or bytes_ > 2:
        return 1, 1
    if plan.queries > 1:
        return 5, 1
    return 7 if roomy else 5, 5


def plan(
    tokens: int,
    sequences: int,
    widest: int,
    reach: int,
    group: int,
    kv_heads: int,
    extent: int,
    window: int | None,
) -> Splits:
    """Splits for sequences of up to `widest` queries and up to `reach` tokens in all."""
    rows, queries = rows_of(widest, group, ROWS)
    tiles = sequences if widest == 1 else bound(tokens, sequences, queries)
    own = 0 if widest == 1 else -(-widest // KEYS)
    pages = -(-max(reach - 1, 0) // KEYS)
    close = max(1, near_tiles(reach, extent, window) + own)
    far_tiles = 0 if window is not None or reach <= extent else -(-(reach - extent) // KEYS)
    programs = tiles * kv_heads
    if widest == 1 and window is None and pages * programs <= PROGRAMS:  # a tile each, with bias or without
        return Splits(rows, queries, tiles, 0, max(1, pages))
    if far_tiles <= 0:
        return Splits(rows, queries, tiles, 0, _divide(close, max(1, 2 * PROGRAMS // programs)))
    least = 4 if programs < PROGRAMS // 2 else 2 if programs < PROGRAMS else 1
    far = min(far_tiles, max(PROGRAMS // programs, least))
    share = -(-far_tiles // far)
    near = close if close * programs <= PROGRAMS // 8 else _divide(close, -(-close * 3 // 2 // share))
    if tiles == 1 and near < far and far + near > PROGRAMS // programs and close * 8 > share * near:
        far -= near  # else some would begin when others end; but not where near ones end soon
    return Splits(rows, queries, tiles, far, near)


def fixed(group: int, kv_heads: int, extent: int, window: int | None) -> Splits:
    """Splits of one query whatever the step has besides; the number of tiles is left out."""
    rows, queries = rows_of(1, group, ROWS)
    close = ((window or extent) + KEYS - 3) // KEYS + 1  # as `near_tiles` of the longest sequence
    return Splits(rows, queries, 0, 0 if window else max(FEW, PROGRAMS // kv_heads), -(-close // 2))


def channels(total: int, size: int) -> int:
    """Channels of a program that combines `total` splits of a head with `size`."""
    return 32 if total > 64 else min(64, size)


def _divide(tiles: int, programs: int) -> int:
    """Programs that have work when `tiles` are shared evenly by up to `programs`."""
    programs = max(1, min(tiles, programs))
    return -(-tiles // -(-tiles // programs))
