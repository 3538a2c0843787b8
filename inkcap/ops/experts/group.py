"""Uses of experts in order of expert, and the tiles that grouped products work through, all on the device.

A use is (token, place among its choices), numbered token * K + place. A tile is up to `width` uses of one expert. There
are at most min(experts, uses) + uses // width tiles, so launches need no count from the device.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.values import Routed

PAIRWISE = 2048  # uses: up to here each use counts all before it; beyond, those of its piece, after a count of pieces
COMPARED = 32  # uses at once
PIECE, PART = 512, 256  # uses of a program that counts, of one that finds their places


@dataclass(frozen=True, slots=True)
class Tiles:
    """What one width makes of a routing. Tiles beyond the last have expert -1."""

    order: Tensor  # [uses] int32, by expert, then by number
    expert: Tensor  # [most] int32
    start: Tensor  # [most] int32, into `order`
    stop: Tensor  # [most] int32
    number: Tensor  # [1] int32: tiles that there are
    width: int


@triton.jit
def lay_out(first, count, expert, start, stop, number, most, BE: tl.constexpr, WIDTH: tl.constexpr):
    """Write the tiles of all experts, larger ones first; first and count: [BE], where each one's uses begin and how
    many they are. Programs that take tiles in turn then end at about the same time."""
    e = tl.arange(0, BE)
    full, rest = count // WIDTH, count % WIDTH
    last = tl.cumsum(full, 0)
    for k in range(tl.max(full, 0)):
        at, begin = last - full + k, first + k * WIDTH
        tl.store(expert + at, e, mask=k < full)
        tl.store(start + at, begin, mask=k < full)
        tl.store(stop + at, begin + WIDTH, mask=k < full)
    made = tl.max(last, 0)
    quarters = (rest * 4 + WIDTH - 1) // WIDTH
    for less in tl.static_range(4):
        mine = (quarters == 4 - less).to(tl.int32)
        last = tl.cumsum(mine, 0)
        at = made + last - 1
        tl.store(expert + at, e, mask=mine > 0)
        tl.store(start + at, first + full * WIDTH, mask=mine > 0)
        tl.store(stop + at, first + count, mask=mine > 0)
        made += tl.max(last, 0)
    tl.store(number, made)
    for unused in range(made, most, BE):
        tl.store(expert + unused + e, -1, mask=unused + e < most)


@triton.jit(do_not_specialize=["uses", "most"])
def group_pairwise(
    choice, order, expert, start, stop, number, uses, most,
    E: tl.constexpr, BE: tl.constexpr, BU: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program 0 counts and lays out the tiles, each other program finds the places of BU uses."""
    pdl.wait(PDL)
    pdl.trigger(PDL)
    u = tl.arange(0, BU)
    if tl.program_id(0) == 0:
        e = tl.arange(0, BE)
        count = tl.zeros([BE], tl.int32)
        for other in range(0, uses, BU):
            chosen = tl.load(choice + other + u, mask=other + u < uses, other=-1).to(tl.int32)
            count += tl.sum((chosen[None, :] == e[:, None]).to(tl.int32), 1)
        lay_out(tl.cumsum(count, 0) - count, count, expert, start, stop, number, most, BE, WIDTH)
    else:
        mine = (tl.program_id(0) - 1) * BU + u
        own = tl.load(choice + mine, mask=mine < uses, other=0).to(tl.int32)
        place = tl.zeros([BU], tl.int32)
        for other in range(0, uses, BU):
            them = other + u
            chosen = tl.load(choice + them, mask=them < uses, other=E).to(tl.int32)
            before = chosen[None, :] < own[:, None]
            before |= (chosen[None, :] == own[:, None]) & (them[None, :] < mine[:, None])
            place += tl.sum(before.to(tl.int32), 1)
        tl.store(order + place, mine, mask=mine < uses)


@triton.jit(do_not_specialize=["uses"])
def count_pieces(
    choice, counts, uses, BE: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """How often each of a program's PIECE uses has each expert: counts [programs, BE]."""
    pdl.wait(PDL)
    pdl.trigger(PDL)
    at = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    chosen = tl.load(choice + at, mask=at < uses, other=0).to(tl.int32)
    count = tl.histogram(chosen, BE, mask=at < uses)
    tl.store(counts + tl.program_id(0) * BE + tl.arange(0, BE), count)


@triton.jit(do_not_specialize=["uses", "most"])
def group_counted(
    choice, counts, order, expert, start, stop, number, uses, most,
    BE: tl.constexpr, PIECE: tl.constexpr, BC: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program finds the places of a part of a piece's uses, BC of them; the first one lays out the tiles too."""
    pdl.wait(PDL)
    pdl.trigger(PDL)
    PARTS: tl.constexpr = PIECE // BC
    e, u, pieces = tl.arange(0, BE), tl.arange(0, BC), tl.num_programs(0) // PARTS
    piece, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    mine = tl.program_id(0) * BC + u
    own = tl.load(choice + mine, mask=mine < uses, other=0).to(tl.int32)
    earlier = piece * PIECE + tl.arange(0, PIECE)
    counted = earlier < tl.minimum(piece * PIECE + part * BC, uses)
    before = tl.histogram(tl.load(choice + earlier, mask=counted, other=0).to(tl.int32), BE, mask=counted)
    count = tl.zeros([BE], tl.int32)
    for some in range(0, pieces, 16):
        other = some + tl.arange(0, 16)[:, None]
        each = tl.load(counts + other * BE + e[None, :], mask=other < pieces, other=0)
        count += tl.sum(each, 0)
        before += tl.sum(tl.where(other < piece, each, 0), 0)
    first = tl.cumsum(count, 0) - count
    if tl.program_id(0) == 0:
        lay_out(first, count, expert, start, stop, number, most, BE, WIDTH)
    place = tl.gather(before + first, own, 0)
    same = (own[None, :] == own[:, None]) & (mine < uses)[None, :]
    place += tl.sum((same & (u[None, :] < u[:, None])).to(tl.int32), 1)
    tl.store(order + place, mine, mask=mine < uses)


def width_of(uses: int, experts: int) -> int:
    """Uses of a tile, from how many an expert has on average."""
    mean = uses / experts
    return 16 if mean <= 12 else 32 if mean <= 24 else 64 if mean <= 48 else 128


def tiles(route: Routed, experts: int, width: int) -> Tiles:
    """The tiles of a routing, made once for all products of the same width."""
    found = route.memo.get((Tiles, width))
    if found is not None:
        return found  # pyright: ignore[reportReturnType]  # a memo has no types
    uses, device = route.choice.numel(), route.choice.device
    most = min(experts, uses) + uses // width
    on, block = pdl.supported(device), triton.next_power_of_2(experts)
    # each list begins at 16 bytes: for other places Triton would compile other kernels
    listed = torch.empty(3, triton.cdiv(most, 4) * 4, dtype=torch.int32, device=device)[:, :most]
    order, number = (torch.empty(n, dtype=torch.int32, device=device) for n in (uses, 1))
    if uses <= PAIRWISE:
        group_pairwise[(1 + triton.cdiv(uses, COMPARED),)](
            route.choice, order, *listed, number, uses, most, experts, block, COMPARED, width, on,
            num_warps=8, **pdl.launch(on),
        )  # fmt: skip
    else:
        pieces = triton.cdiv(uses, PIECE)
        counts = torch.empty(pieces, block, dtype=torch.int32, device=device)
        count_pieces[(pieces,)](route.choice, counts, uses, block, PIECE, on, num_warps=4, **pdl.launch(on))
        group_counted[(pieces * (PIECE // PART),)](
            route.choice, counts, order, *listed, number, uses, most, block, PIECE, PART, width, on,
            num_warps=4, **pdl.launch(on),
        )  # fmt: skip
    made = Tiles(order, listed[0], listed[1], listed[2], number, width)
    route.memo[Tiles, width] = made
    return made
