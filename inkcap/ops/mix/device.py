"""The mixture of one token's sources by one query, in a program that holds whole rows, in chunks.

Blocks are finished long before they are mixed, so all sources but the last `late` ones are read and summed before the
dependency wait: first halves of experts trigger after theirs, so whatever was written before the last of them is
complete. Behind the wait one reduction makes the inner products of what is left, of which scores, softmax and the
mixture's own norm are arithmetic of single numbers.
"""

import triton
import triton.language as tl

LATE = 2  # sources at most that may have been written just now
# of a thread: a program must find room beside those of the kernel before, or nothing is early; what is spilled for it,
# of early rows, is spilled before the wait
REGISTERS = 128
LANES = 128  # channels of a warp in one chunk: four of a lane, 16 bytes in fp32
# The mixture's square is a sum of products, which lose as many bits as they cancel. Where less than this part of the
# squares of its terms is left, it is summed again from the mixture itself.
LEFT = tl.constexpr(1 / 16)
PREFETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")
NEVER = tl.constexpr("{.reg .pred p; setp.lt.f32 p, $1, 0f00000000; @p trap; mov.b32 $0, $1;}")


def shape(channels: int) -> tuple[int, int]:
    """(warps, channels of a chunk) of a program, whose lanes have four channels of a chunk each."""
    warps = min(4, triton.next_power_of_2(triton.cdiv(channels, LANES)))
    return warps, warps * LANES


@triton.jit
def loaded(row, at, C: tl.constexpr, BK: tl.constexpr):
    """A row [C] in chunks of BK, as it is stored; zeros behind its end."""
    out = ()
    for j in tl.static_range((C + BK - 1) // BK):
        if (j + 1) * BK <= C:
            out += (tl.load(row + j * BK + at),)
        else:
            out += (tl.load(row + j * BK + at, mask=j * BK + at < C, other=0.0),)
    return out


@triton.jit
def announced(row, C: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr):
    """Have a row [C] in fp32 come to the L2 cache; there are BK / 4 lanes or more."""
    if PDL:
        for j in tl.static_range((C + BK * 8 - 1) // (BK * 8)):
            line = row + tl.minimum((j * (BK // 4) + tl.arange(0, BK // 4)) * 32, C - 1)
            tl.inline_asm_elementwise(PREFETCH, "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def stored(row, chunks, at, C: tl.constexpr, BK: tl.constexpr):
    """Write a row in chunks."""
    for j in tl.static_range((C + BK - 1) // BK):
        value = chunks[j].to(row.dtype.element_ty)
        if (j + 1) * BK <= C:
            tl.store(row + j * BK + at, value)
        else:
            tl.store(row + j * BK + at, value, mask=j * BK + at < C)


@triton.jit
def product(a, b):
    """What is left to sum of the inner product of two rows: [BK]."""
    out = a[0].to(tl.float32) * b[0].to(tl.float32)
    for j in tl.static_range(1, len(a)):
        out += a[j].to(tl.float32) * b[j].to(tl.float32)
    return out


@triton.jit
def paired(level):
    """Every two tensors as one with a new last axis; what lacks a second one is repeated."""
    out = ()
    for i in tl.static_range((len(level) + 1) // 2):
        if 2 * i + 1 < len(level):
            out += (tl.join(level[2 * i], level[2 * i + 1]),)
        else:
            out += (tl.join(level[2 * i], level[2 * i]),)
    return out


@triton.jit
def parted(level):
    """The reverse of `paired`."""
    out = ()
    for i in tl.static_range(len(level)):
        one, other = tl.split(level[i])
        out += (one, other)
    return out


@triton.jit
def sums(values):
    """The sum of each of up to 32 tensors [BK], in one reduction; as many numbers or more."""
    level = values
    for _ in tl.static_range(5):
        if len(level) > 1:
            level = paired(level)
    total = (tl.sum(level[0], 0),)
    for _ in tl.static_range(5):
        if len(total) < len(values):
            total = parted(total)
    return total


@triton.jit
def settled(x, PDL: tl.constexpr):
    """x >= 0, and what it is made of, in place before the dependency wait: without an effect, of a trap that no sum of
    squares meets, the compiler puts all of it behind the wait."""
    if PDL:
        x = tl.inline_asm_elementwise(NEVER, "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1)
    return x


@triton.jit
def begun(sources, query, token, at, eps, C: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr):
    """The sum over the first sources, before the dependency wait: (row in chunks, its squares [BK], sum of exps, top,
    each source's score and 1 / rms). Without any, the row is the query, which is multiplied by zero."""
    acc, total, top, kept = query, 0.0, -float("inf"), ()
    if EARLY:
        rows, values = (), ()
        for i in tl.static_range(EARLY):
            rows += (loaded(sources[i] + token * C, at, C, BK),)
        for i in tl.static_range(EARLY):
            values += (product(rows[i], rows[i]), product(rows[i], query))
        inner = sums(values)
        for i in tl.static_range(EARLY):
            factor = tl.rsqrt(inner[2 * i] / C + eps)
            kept += ((inner[2 * i + 1] * factor * (C**-0.5), factor),)
            top = tl.maximum(top, kept[i][0])
        acc = ()
        for i in tl.static_range(EARLY):
            total += tl.exp(kept[i][0] - top)
        for j in tl.static_range(len(query)):
            part = rows[0][j].to(tl.float32) * (tl.exp(kept[0][0] - top) * kept[0][1])
            for i in tl.static_range(1, EARLY):
                part += rows[i][j].to(tl.float32) * (tl.exp(kept[i][0] - top) * kept[i][1])
            acc += (part,)
    return acc, settled(product(acc, acc), PDL), total, top, kept


@triton.jit
def fetched(sources, token, at, C: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr):
    """Rows of the other sources, behind the wait: all loads before the first sum."""
    late = ()
    for i in tl.static_range(EARLY, len(sources)):
        late += (loaded(sources[i] + token * C, at, C, BK),)
    return late


@triton.jit
def mixed(acc, of_acc, late, of_late):
    """The mixture in chunks, fp32: `of_acc` times the early sum and `of_late` times the other rows."""
    out = ()
    for j in tl.static_range(len(acc)):
        part = acc[j].to(tl.float32) * of_acc
        for i in tl.static_range(len(late)):
            part += late[i][j].to(tl.float32) * of_late[i]
        out += (part,)
    return out


@triton.jit
def compared(late, state, query, EARLY: tl.constexpr):
    """What is left to sum of the inner products that `ended` takes: tensors [BK]."""
    n: tl.constexpr = len(late)
    values = ()
    for i in tl.static_range(n):
        values += (product(late[i], late[i]), product(late[i], query))
    if EARLY:
        values += (state[1],)
        for i in tl.static_range(n):
            values += (product(state[0], late[i]),)
    if n == 2:
        values += (product(late[0], late[1]),)
    return values


@triton.jit
def ended(inner, late, state, eps, C: tl.constexpr, EARLY: tl.constexpr):
    """(what `mixed` multiplies the early sum with, and the late rows; sum of the mixture's squares; sum of exps and top
    of all scores; each source's score and 1 / rms); inner: sums of what `compared` leaves."""
    acc, _, total, top, kept = state
    n: tl.constexpr = len(late)
    higher = top
    for i in tl.static_range(n):
        factor = tl.rsqrt(inner[2 * i] / C + eps)
        kept += ((inner[2 * i + 1] * factor * (C**-0.5), factor),)
        higher = tl.maximum(higher, kept[EARLY + i][0])
    shrink = tl.exp(top - higher)
    total *= shrink
    for i in tl.static_range(n):
        total += tl.exp(kept[EARLY + i][0] - higher)
    of_acc = shrink / total
    of_late = ()
    for i in tl.static_range(n):
        of_late += (tl.exp(kept[EARLY + i][0] - higher) / total * kept[EARLY + i][1],)
    terms, crossed = 0.0, 0.0
    for i in tl.static_range(n):
        terms += of_late[i] * of_late[i] * inner[2 * i]
        if EARLY:
            crossed += of_late[i] * of_acc * inner[2 * n + 1 + i]
    if EARLY:
        terms += of_acc * of_acc * inner[2 * n]
    if n == 2:
        crossed += of_late[0] * of_late[1] * inner[7 if EARLY else 4]
    squares = terms + 2.0 * crossed
    if squares < LEFT * terms:
        again = mixed(acc, of_acc, late, of_late)
        squares = tl.sum(product(again, again), 0)
    return of_acc, of_late, squares, total, higher, kept


@triton.jit
def scaled(values, factor):
    """Each of some numbers, or of a row's chunks, times a number."""
    out = ()
    for i in tl.static_range(len(values)):
        out += (values[i] * factor,)
    return out


@triton.jit
def weighted(row, weight):
    """A row in chunks times the norm's weights."""
    out = ()
    for j in tl.static_range(len(row)):
        out += (row[j] * weight[j],)
    return out
