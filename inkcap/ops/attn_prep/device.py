"""What the kernels of attn_prep share: taps over paged inputs, log scaling, stores at slots, as they are or in codes.

A tile is BT consecutive tokens of one head, [BT, D]. The input `back` positions behind token t is of this step when
token t - back is of the same row and so far behind; otherwise it is read from its page, and is zero before position 0.
Pages that are read were complete before this step, and the slots written are those of this step's tokens, so no program
reads what another one writes.
"""

import triton
import triton.language as tl

from inkcap.ops import pdl


@triton.jit
def own(token, live, row, position, row_of, positions, back: tl.constexpr):
    """Which tokens find the input `back` positions behind them in this step."""
    there = live & (token >= back)
    same = tl.load(row_of + token - back, mask=there, other=-1) == row
    return there & same & (tl.load(positions + token - back, mask=there, other=-1) == position - back)


@triton.jit
def old_input(
    plane, table, row, position, wanted, channel, held, s_block, s_token, s_table,
    BLOCK: tl.constexpr, back: tl.constexpr,
):  # fmt: skip
    """Inputs `back` positions behind from their pages: [BT, D] fp32, 0 where not wanted or before position 0."""
    at = position - back
    there = wanted & (at >= 0)
    block = tl.load(table + row.to(tl.int64) * s_table + tl.maximum(at, 0) // BLOCK).to(tl.int64)
    address = block * s_block + (at % BLOCK) * s_token
    return tl.load(plane + address[:, None] + channel[None, :], mask=there[:, None] & held[None, :], other=0.0).to(
        tl.float32
    )


@triton.jit
def tap_of(taps, channel, held, place: tl.constexpr, s_tap, s_back):
    """One tap of each channel, fp32; taps are [channels, W] with strides (s_tap, s_back)."""
    return tl.load(taps + channel * s_tap + place * s_back, mask=held, other=0.0).to(tl.float32)


@triton.jit
def keep(plane, slot, tile, channel, held, s_block, s_token, BLOCK: tl.constexpr):
    """Store a tile at its tokens' slots; tokens with slot -1 are not kept."""
    address = (slot // BLOCK) * s_block + (slot % BLOCK) * s_token
    kept = (slot >= 0)[:, None] & held[None, :]
    tl.store(plane + address[:, None] + channel[None, :], tile.to(plane.dtype.element_ty), mask=kept)


@triton.jit
def convolved(
    x, plane, table, slots, taps, added, row_of, positions, token, live, position, channel, held,
    s_x, s_block, s_token, s_table, s_tap, s_back, s_added, scale,
    W: tl.constexpr, BLOCK: tl.constexpr, ADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The convolution with its state insert; the dependency wait stands inside, and behind it nothing is read but what
    this forward wrote: inputs, and the taps that tokens add ([T, heads, W] by distance, `added` at this head's).

    Older inputs come first, in order, so that a sum does not depend on which of them are this step's. Returns the
    convolved tile in fp32, scaled and rounded to the dtype of x.
    """
    kind = x.dtype.element_ty
    row = tl.load(row_of + token, mask=live, other=0)
    slot = tl.load(slots + token, mask=live, other=-1)
    total = tl.zeros([token.shape[0], channel.shape[0]], tl.float32)
    older, new, weight = (), (), ()
    for back in tl.static_range(W - 1, 0, -1):
        mine = own(token, live, row, position, row_of, positions, back)
        old = old_input(
            plane, table, row, position, live & (mine == 0), channel, held, s_block, s_token, s_table, BLOCK, back
        )  # fmt: skip
        tap = tap_of(taps, channel, held, W - 1 - back, s_tap, s_back)[None, :]
        total += old * tap
        older += (old,)
        new += (mine,)
        weight += (tap,)
    last = 1.0 + tap_of(taps, channel, held, W - 1, s_tap, s_back)[None, :]
    pdl.wait(PDL)
    inside = live[:, None] & held[None, :]
    here = tl.load(x + token.to(tl.int64)[:, None] * s_x + channel[None, :], mask=inside, other=0.0)
    moved = tl.zeros(total.shape, tl.float32)  # what the added taps make of all inputs
    for back in tl.static_range(W - 1, 0, -1):
        earlier = tl.load(
            x + (token - back).to(tl.int64)[:, None] * s_x + channel[None, :],
            mask=new[W - 1 - back][:, None] & held[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        total += earlier * weight[W - 1 - back]
        if ADDED:
            share = tl.load(added + token.to(tl.int64) * s_added + back, mask=live, other=0.0)
            moved += (earlier + older[W - 1 - back]) * share[:, None]
    total += here.to(tl.float32) * last
    if ADDED:
        moved += here.to(tl.float32) * tl.load(added + token.to(tl.int64) * s_added, mask=live, other=0.0)[:, None]
        total += moved
    keep(plane, slot, here, channel, held, s_block, s_token, BLOCK)
    return (total * scale).to(kind).to(tl.float32)


@triton.jit
def put(out, tile, token, live, head, dim, held, HEADS: tl.constexpr, D: tl.constexpr):
    """Store a tile as head `head` of out [T, HEADS, D]."""
    address = (token.to(tl.int64) * HEADS + head) * D
    tl.store(out + address[:, None] + dim[None, :], tile.to(out.dtype.element_ty), mask=live[:, None] & held[None, :])


@triton.jit
def encode(x):
    """fp32 to E4M3, nearest, ties to even, saturating: the codes (uint32) and the numbers they are (fp32)."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000  # three bits behind the leading one
    fixed = size + 16384.0  # whose last bit is worth 2^-9, as that of the smallest codes
    small = size < 0.015625
    number = tl.where(small, fixed - 16384.0, bits.to(tl.float32, bitcast=True))
    code = tl.where(small, fixed.to(tl.uint32, bitcast=True) & 15, (bits >> 20) - 960)
    code = tl.where(x != x, 127, code) | ((x.to(tl.uint32, bitcast=True) >> 31) << 7)
    return code, tl.where(x != x, x, tl.where(x < 0, -number, number))


@triton.jit
def settle(
    out, plane, slot, tile, scale, token, live, head, dim, held, s_block, s_token,
    KV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, kind: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Store a tile of k or v, rounded to `kind`, as head `head` of out and at its tokens' slots; as codes if CODED."""
    if CODED:
        inverse = (0x7F000000 - scale.to(tl.uint32, bitcast=True)).to(tl.float32, bitcast=True)  # of a power of two
        code, number = encode(tile.to(kind).to(tl.float32) * inverse)
        put(out, number, token, live, head, dim, held, KV, D)
        keep(plane, slot, code, dim, held, s_block, s_token, BLOCK)
    else:
        put(out, tile, token, live, head, dim, held, KV, D)
        keep(plane, slot, tile.to(kind), dim, held, s_block, s_token, BLOCK)


@triton.jit
def growth(position, floor, alpha):
    """1 + alpha * ln(max(1, (p + 1) / floor)), fp32."""
    return 1.0 + alpha * tl.log(tl.maximum((position + 1).to(tl.float32) / floor, 1.0))
