"""Tiles and splits of attention, from shapes alone: token and sequence counts, and the longest a sequence may be.

Numbers were measured on an H200 (132 SMs) with 8 query heads on 1 kv head of 128 channels, bf16, keys in pages of 64.
"""

from dataclasses import dataclass

KEYS = 64  # keys of a tile; a page
ROWS = 64  # most rows of a tile: 8 queries of 8 heads cost no more than one where keys are many
FEW = 16  # queries of a sequence that are split over keys whatever the rest of the step is
PROGRAMS = 264  # two a processor
CODED = 396  # three, of one query over codes in words: these take half the shared memory
REGISTERS = 168  # of a thread, with which three fit
NEAR = 2.5  # tiles of codes without bias in the time of one with it


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

    8K queries behind nothing / 24K, us, 8 heads on 1: near 64 383 / 1825, near 32 419 / 1879; stages 3 and 2 near 354 /
    1894. Within windows, 24 heads on 8, 1024 keys: near 64 with stages 3 and 2 717, with 1 and 1 840, near 32 1028.
    """
    if bytes_ > 2:  # shared memory holds no more than one tile
        return Tiling(ROWS, 4, KEYS // 2, (1, 1, 1, 1))
    return Tiling(ROWS, 4, KEYS, (5, 3, 1, 1) if window is None else (5, 3, 3, 2))


@dataclass(frozen=True, slots=True)
class Octets:
    """How tiles of the kernel for many queries are made of groups of eight rows, and the bank shifted for them."""

    number: int  # most octets of queries that a tile touches, as a power of 2
    spare: int  # ids of tiles of a sequence beyond what its rows fill
    zero: int  # from this distance of the first query and key on no key of a tile has a bias
    pitch: int  # of the shifted bank


def octets(rows: int, group: int, extent: int) -> Octets:
    """For tiles of `rows` rows, and `group` query heads of a kv head.

    A sequence of n tokens has ceil(ceil(n / 8) * group * 8 / rows) tiles; sequence i owns the ids from
    starts[i] * group // rows + i * spare on.
    """
    tiles = rows // 8
    touched = max((tiles * (tile + 1) - 1) // group - tiles * tile // group + 1 for tile in range(group))
    number = 1 << (touched - 1).bit_length()
    zero = -(-(extent + KEYS) // 16) * 16
    return Octets(number, 2 + 7 * group // rows, zero, -(-(zero + 8 * number + 16 + KEYS) // 64) * 64)


def stages(plan: Splits, early: bool, bytes_: int, roomy: bool, coded: bool = False) -> tuple[int, int]:
    """Pipeline depths of far and near tiles. Triton divides them over two dependent loads: 7 is three tiles in flight.

    Where shared memory is `roomy`; a whole step with one query, ms: depth 5 1.313 at 131K and 1.794 at 1M, depth 7
    1.303 and 1.731. Other numbers of programs are no better.
    """
    if early or bytes_ > 2:
        return 1, 1
    if plan.queries > 1:
        return 5, 1
    return 7 if roomy and not coded else 5, 5


def plan(
    tokens: int,
    sequences: int,
    widest: int,
    reach: int,
    group: int,
    kv_heads: int,
    extent: int,
    window: int | None,
    coded: bool = False,
) -> Splits:
    """Splits for sequences of up to `widest` queries and up to `reach` tokens in all; `coded`: see `CODED`."""
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
        least = 2 if widest == 1 else 1
        return Splits(rows, queries, tiles, 0, _divide(close, max(least, 2 * PROGRAMS // programs)))
    if coded:
        return Splits(rows, queries, tiles, *_balanced(far_tiles, close, max(CODED // programs, 2)))
    least = 4 if programs < PROGRAMS // 2 else 2 if programs < PROGRAMS else 1
    far = min(far_tiles, max(PROGRAMS // programs, least))
    share = -(-far_tiles // far)
    near = close if close * programs <= PROGRAMS // 8 else _divide(close, -(-close * 3 // 2 // share))
    if near < far and far + near > PROGRAMS // programs and close * 8 > share * near:
        far -= near  # else some would begin when others end; but not where near ones end soon
    return Splits(rows, queries, tiles, far, near)


def fixed(group: int, kv_heads: int, extent: int, window: int | None) -> Splits:
    """Splits of one query whatever the step has besides; the number of tiles is left out."""
    rows, queries = rows_of(1, group, ROWS)
    close = ((window or extent) + KEYS - 3) // KEYS + 1  # as `near_tiles` of the longest sequence: one a program
    return Splits(rows, queries, 0, 0 if window else max(FEW, PROGRAMS // 2 // kv_heads), close)


def channels(total: int, size: int) -> int:
    """Channels of a program that combines `total` splits of a head with `size`."""
    return 32 if total > 64 else min(64, size)


def _balanced(far_tiles: int, close: int, programs: int) -> tuple[int, int]:
    """Programs of far and of near tiles of codes, such that the longest of them ends soonest."""

    def longest(near: int) -> tuple[float, int]:
        return max(-(-far_tiles // min(far_tiles, programs - near)), NEAR * -(-close // near)), near

    near = min(map(longest, range(1, min(close, programs - 1) + 1)))[1]
    return min(far_tiles, programs - near), near


def _divide(tiles: int, programs: int) -> int:
    """Programs that have work when `tiles` are shared evenly by up to `programs`."""
    programs = max(1, min(tiles, programs))
    return -(-tiles // -(-tiles // programs))
