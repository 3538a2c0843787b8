"""What the attention kernels share: tiles of keys from pages or from this step, bias by distance, running softmax.

A program has BM rows of one kv head: BQ queries of one sequence times its G query heads (row m is query m // G, head
m % G). Keys come in tiles of BN: older ones from pages, tile t holding positions t * BN ..; this step's from k and v,
tile u holding positions first + u * BN ... Logits are kept times log2(e). Keys a row cannot see get -1e30: what such a
tile adds is wiped out by the first key the row does see, and every row sees itself.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
HIDDEN = tl.constexpr(-1.0e30)


@triton.jit
def sequence_of(starts, tile, sequences, BQ: tl.constexpr, RP: tl.constexpr):
    """The sequence whose tile this is: i owns ids starts[i] // BQ + i and on, at least as many as it has tiles."""
    i = tl.arange(0, RP)
    base = tl.load(starts + i, mask=i < sequences, other=0) // BQ + i
    return tl.sum(((base <= tile) & (i < sequences)).to(tl.int32), 0) - 1


@triton.jit
def growth(position, floor, alpha):
    """1 + alpha * ln(max(1, (p + 1) / floor)), fp32."""
    return 1.0 + alpha * tl.log(tl.maximum((position + 1).to(tl.float32) / floor, 1.0))


@triton.jit
def decoded(x, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """Codes (uint8, E4M3) as numbers of `dtype`, exact in fp16; anything else as it is. NATIVE: the device converts."""
    if x.dtype == tl.uint8:
        if NATIVE:
            y = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:  # the bits of a code, moved, are its number times 2^-8
            bits = x.to(tl.uint16)
            y = (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.float16, bitcast=True) * 256.0
            y = tl.where((bits & 127) == 127, float("nan"), y)
        x = y.to(dtype)
    return x


# a pair of words of two codes each: fp16 pairs of the first ones and of the second ones
HALVES = tl.constexpr("""{
.reg .b32 t;
.reg .b16 a, b;
prmt.b32 t, $2, 0, 0x3120;
mov.b32 {a, b}, t;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
}""")


@triton.jit
def halves(x, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """Words (int16) of two codes to the numbers of the first and of the second ones."""
    if NATIVE:
        first, second = tl.inline_asm_elementwise(
            HALVES, "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
        first, second = first.to(dtype), second.to(dtype)
    else:
        first = decoded((x & 255).to(tl.uint8), dtype, False)
        second = decoded(((x >> 8) & 255).to(tl.uint8), dtype, False)
    return first, second


@triton.jit
def paged(
    k_plane, v_plane, table, t, low, high, rn, rd, s_block, s_token,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Keys and values [BN, DP] of tile t. With EDGE only positions low .. high are read, the others are 0."""
    at = t * BN + rn
    if BLOCK % BN == 0:
        page = tl.load(table + t * BN // BLOCK).to(tl.int64)
        offset = page * s_block + (t * BN % BLOCK) * s_token
        address = offset + (rn * s_token)[:, None] + rd[None, :]
    else:
        held = tl.maximum(tl.minimum(at, high - 1), 0)
        address = tl.load(table + held // BLOCK).to(tl.int64) * s_block + (at % BLOCK) * s_token
        address = address[:, None] + rd[None, :]
    if EDGE or BLOCK % BN != 0:
        seen = ((at >= low) & (at < high))[:, None] & (rd < D)[None, :]
        k = tl.load(k_plane + address, mask=seen, other=0.0)
        v = tl.load(v_plane + address, mask=seen, other=0.0)
    elif D != DP:
        k = tl.load(k_plane + address, mask=(rd < D)[None, :], other=0.0)
        v = tl.load(v_plane + address, mask=(rd < D)[None, :], other=0.0)
    else:
        k = tl.load(k_plane + address)
        v = tl.load(v_plane + address)
    return k, v


@triton.jit
def fresh(
    k_own, v_own, u, count, rn, rd, s_own,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Keys and values [BN, DP] of this step's tile u; only the sequence's `count` tokens are read."""
    at = u * BN + rn
    address = at.to(tl.int64)[:, None] * s_own + rd[None, :]
    if EDGE:
        seen = (at < count)[:, None] & (rd < D)[None, :]
        k = tl.load(k_own + address, mask=seen, other=0.0)
        v = tl.load(v_own + address, mask=seen, other=0.0)
    elif D != DP:
        k = tl.load(k_own + address, mask=(rd < D)[None, :], other=0.0)
        v = tl.load(v_own + address, mask=(rd < D)[None, :], other=0.0)
    else:
        k = tl.load(k_own + address)
        v = tl.load(v_own + address)
    return k, v


@triton.jit
def bank(bias, distance, state, STATES: tl.constexpr, EXTENT: tl.constexpr):
    """Columns of the bias [STATES, EXTENT] at these distances; 0 outside."""
    there = ((distance >= 0) & (distance < EXTENT))[None, :] & (state < STATES)[:, None]
    return tl.load(bias + state[:, None] * EXTENT + distance[None, :], mask=there, other=0.0)


@triton.jit
def sheared(
    r, bias, nearest, query, rn, state,
    BN: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, EXTENT: tl.constexpr,
):  # fmt: skip
    """Bias [BM, BN] of rows whose queries differ; `nearest` is the distance of the first query to the last key.

    One product gives each row's bias at all distances that the tile spans, of which it takes those of its keys.
    """
    across = bank(bias, nearest + tl.arange(0, WIDTH), state, STATES, EXTENT)
    all_of = tl.dot(r, across, input_precision="ieee").to(r.dtype)
    return tl.gather(all_of, query[:, None] + (BN - 1 - rn)[None, :], 1).to(tl.float32)


# rows g and g + 8 of a fragment, of which four lanes hold eight columns, shifted by g columns: from pairs of 16-bit
# numbers of these columns and of the eight before them
SHIFT = tl.constexpr("""{
.reg .b32 lane, t, g, e, f, a, b, x, y, s;
.reg .pred p, q, odd;
mov.u32 lane, %laneid;
and.b32 t, lane, 3;
shr.u32 g, lane, 2;
shr.u32 e, g, 1;
and.b32 f, g, 1;
setp.ne.u32 odd, f, 0;
selp.b32 s, 0x5432, 0x7654, odd;
add.u32 f, t, e;
setp.lt.u32 p, f, 4;
setp.lt.u32 q, f, 3;
sub.u32 a, t, e;
sub.u32 b, a, 1;
and.b32 a, a, 3;
and.b32 b, b, 3;
and.b32 g, lane, 28;
or.b32 a, a, g;
or.b32 b, b, g;
selp.b32 x, $2, $4, p; selp.b32 y, $2, $4, q;
shfl.sync.idx.b32 x, x, a, 31, -1; shfl.sync.idx.b32 y, y, b, 31, -1;
prmt.b32 $0, y, x, s;
selp.b32 x, $3, $5, p; selp.b32 y, $3, $5, q;
shfl.sync.idx.b32 x, x, a, 31, -1; shfl.sync.idx.b32 y, y, b, 31, -1;
prmt.b32 $1, y, x, s;
}""")


@triton.jit
def octets(
    spread, table, distance, rn,
    SP: tl.constexpr, BN: tl.constexpr, ZERO: tl.constexpr, PITCH: tl.constexpr, SHUFFLED: tl.constexpr,
):  # fmt: skip
    """Bias [BM, BN], rounded, of rows in groups of eight queries of a head; `distance`: of the first query and key.

    Two products over octets of queries and states give each row's bias as if it were its group's first query, at these
    keys and at the eight before them: shifted by its place in the group that is its own. `spread` [BM, octets * SP] has
    each row's states at its octet's place; table [octets * 8, SP, PITCH] holds at [n, c, x] the bias of state c at
    distance n + ZERO + 8 - x. The part of the distance below 8 is taken by rows, so that columns start at multiples of
    8: 16 bytes. From distance ZERO on the tile is 0, whatever the distance. SHUFFLED: in registers.
    """
    distance = tl.minimum(distance, ZERO)
    low = distance & 7
    begin = tl.multiple_of(ZERO - (distance - low), 8)
    row = tl.arange(0, spread.shape[1])
    at = table + (((low + row // SP * 8) * SP + row % SP) * PITCH)[:, None] + (begin + rn)[None, :]
    before = tl.dot(spread, tl.load(at), input_precision="ieee").to(spread.dtype)
    here = tl.dot(spread, tl.load(at + 8), input_precision="ieee").to(spread.dtype)
    if SHUFFLED:
        out = tl.inline_asm_elementwise(
            SHIFT, "=r,=r,r,r,r,r", [here, before], dtype=spread.dtype, is_pure=False, pack=4
        )  # fmt: skip
    else:
        column = rn[None, :] - (tl.arange(0, spread.shape[0]) % 8)[:, None]
        out = tl.gather(here, tl.maximum(column, 0), 1)
        out = tl.where(column < 0, tl.gather(before, tl.minimum(column + 8, BN - 1), 1), out)
    return out.to(tl.float32)


@triton.jit
def highest(z, top, dtype: tl.constexpr):
    """What logits are counted from: the largest, or in fp16 2^15 below it, so that small weights keep their bits."""
    most = tl.max(z, 1)
    if dtype == tl.float16:
        most -= 15.0
    return tl.maximum(top, most)


@triton.jit
def fold(z, v, acc, top, total):
    """One tile of logits into the running softmax."""
    higher = highest(z, top, v.dtype)
    p = tl.exp2(z - higher[:, None])
    shrink = tl.exp2(top - higher)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, higher, total


@triton.jit
def far_pages(
    q, acc, top, total, k_plane, v_plane, table, begin, end, rn, rd, s_block, s_token, scale,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr, NATIVE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles that every row sees whole and without bias."""
    for t in tl.range(begin, end, num_stages=STAGES):
        k, v = paged(
            k_plane, v_plane, table, t, 0, end * BN, rn, rd, s_block, s_token, D, DP, BLOCK, BN, False
        )  # fmt: skip
        k, v = decoded(k, q.dtype, NATIVE), decoded(v, q.dtype, NATIVE)
        z = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        acc, top, total = fold(z, v, acc, top, total)
    return acc, top, total


@triton.jit
def far_words(
    first, second, q_first, q_second, top, total, k_plane, v_plane, table, begin, end, rn, word, s_block, s_token,
    scale, BLOCK: tl.constexpr, BN: tl.constexpr, NATIVE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`far_pages` of codes, two channels a word: `first` and `second` are the sums of even and odd channels.

    Words of 16 bits can be turned on their way from shared memory, single codes cannot.
    """
    for t in tl.range(begin, end, num_stages=STAGES):
        page = tl.load(table + t * BN // BLOCK).to(tl.int64)
        address = page * s_block + (t * BN % BLOCK) * s_token + (rn * s_token)[:, None] + word[None, :]
        k_first, k_second = halves(tl.trans(tl.load(k_plane + address)), q_first.dtype, NATIVE)
        v_first, v_second = halves(tl.load(v_plane + address), q_first.dtype, NATIVE)
        z = tl.dot(q_first, k_first, input_precision="ieee")
        z = tl.dot(q_second, k_second, z, input_precision="ieee") * scale
        higher = highest(z, top, q_first.dtype)
        p = tl.exp2(z - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        p = p.to(q_first.dtype)
        first = tl.dot(p, v_first, first * shrink[:, None], input_precision="ieee")
        second = tl.dot(p, v_second, second * shrink[:, None], input_precision="ieee")
        top = higher
    return first, second, top, total


@triton.jit
def near_pages(
    q, r, grown, acc, top, total, k_plane, v_plane, table, bias, begin, end, low, high, position, query, rn, rd, state,
    s_block, s_token, scale,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr, STATES: tl.constexpr,
    EXTENT: tl.constexpr, WINDOW: tl.constexpr, ONE: tl.constexpr, WIDTH: tl.constexpr, SP: tl.constexpr,
    ZERO: tl.constexpr, PITCH: tl.constexpr, NATIVE: tl.constexpr, STAGES: tl.constexpr,
    SHUFFLED: tl.constexpr = False,
):  # fmt: skip
    """Tiles with bias or edges; `position` is that of the first query, `grown` what scales each row's bias.

    With PITCH, r and bias are the operands of `octets`.
    """
    for t in tl.range(begin, end, num_stages=STAGES):
        k, v = paged(
            k_plane, v_plane, table, t, low, high, rn, rd, s_block, s_token, D, DP, BLOCK, BN, True
        )  # fmt: skip
        k, v = decoded(k, q.dtype, NATIVE), decoded(v, q.dtype, NATIVE)
        at = t * BN + rn
        if PITCH:
            z = octets(r, bias, position - t * BN, rn, SP, BN, ZERO, PITCH, SHUFFLED) * (grown / scale)[:, None]
            z = tl.dot(q, tl.trans(k), z, input_precision="ieee") * scale
        else:
            z = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if ONE:
            columns = bank(bias, position - at, state, STATES, EXTENT)
            z += tl.dot(r, columns, input_precision="ieee").to(r.dtype).to(tl.float32) * grown[:, None]
            z = tl.where(((at >= low) & (at < high))[None, :], z, HIDDEN)
        else:
            if not PITCH:
                nearest = position - t * BN - (BN - 1)
                z += sheared(r, bias, nearest, query, rn, state, BN, WIDTH, STATES, EXTENT) * grown[:, None]
            seen = (at < high)[None, :]
            if WINDOW > 0:
                seen = seen & ((position + query)[:, None] - at[None, :] < WINDOW)
            z = tl.where(seen, z, HIDDEN)
        acc, top, total = fold(z, v, acc, top, total)
    return acc, top, total


@triton.jit
def far_own(
    q, acc, top, total, k_own, v_own, begin, end, count, rn, rd, s_own, scale,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """This step's tiles that every row sees whole and without bias."""
    for u in tl.range(begin, end, num_stages=STAGES):
        k, v = fresh(k_own, v_own, u, count, rn, rd, s_own, D, DP, BN, False)
        z = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        acc, top, total = fold(z, v, acc, top, total)
    return acc, top, total


@triton.jit
def near_own(
    q, r, grown, acc, top, total, k_own, v_own, bias, begin, end, count, offset, query, rn, rd, state, s_own, scale,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, STATES: tl.constexpr, EXTENT: tl.constexpr,
    WINDOW: tl.constexpr, WIDTH: tl.constexpr, SP: tl.constexpr, ZERO: tl.constexpr, PITCH: tl.constexpr,
    STAGES: tl.constexpr, SHUFFLED: tl.constexpr = False,
):  # fmt: skip
    """This step's tiles with bias or edges; `offset` counts the sequence's tokens before the first query."""
    for u in tl.range(begin, end, num_stages=STAGES):
        k, v = fresh(k_own, v_own, u, count, rn, rd, s_own, D, DP, BN, True)
        if PITCH:
            z = octets(r, bias, offset - u * BN, rn, SP, BN, ZERO, PITCH, SHUFFLED) * (grown / scale)[:, None]
            z = tl.dot(q, tl.trans(k), z, input_precision="ieee") * scale
        else:
            z = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            nearest = offset - u * BN - (BN - 1)
            z += sheared(r, bias, nearest, query, rn, state, BN, WIDTH, STATES, EXTENT) * grown[:, None]
        distance = (offset + query)[:, None] - (u * BN + rn)[None, :]
        seen = distance >= 0
        if WINDOW > 0:
            seen = seen & (distance < WINDOW)
        acc, top, total = fold(tl.where(seen, z, HIDDEN), v, acc, top, total)
    return acc, top, total


@triton.jit
def finish(acc, top, total, scale, sinks, gate, at, channel, inside, SINKS: tl.constexpr, GATE: tl.constexpr):
    """Rows of sums to outputs: a sink is a key without a value, the gate multiplies by its sigmoid; `scale` of values.

    `sinks` and `gate` point at the first row's; `at` [BM] and `channel` [BM, DP] are offsets of rows in them.
    """
    if SINKS:
        sink = tl.load(sinks + at, mask=tl.max(inside.to(tl.int32), 1) > 0, other=0.0).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.exp2(sink - higher)
        acc = acc * shrink[:, None]
    out = acc / total[:, None] * scale
    if GATE:
        g = tl.load(gate + channel, mask=inside, other=0.0).to(tl.float32)
        out = out / (1.0 + tl.exp2(-g * LOG2E))
    return out
