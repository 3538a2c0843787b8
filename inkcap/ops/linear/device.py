"""Device functions of products with one row: every weight of a program's rows is asked for before anything else.

A program owns a few rows of the matrix and multiplies them in fp32 on the CUDA cores; many small programs with all
loads in flight stream weights faster than few large ones. K is cut into at most four chunks, see `chunks`.
"""

import functools

import triton
import triton.language as tl

MOST = 2048  # elements of a row in one chunk


@functools.cache  # of few sizes, and a step asks more than a hundred times
def chunks(size: int) -> tuple[int, int]:
    """(length of a chunk, number of chunks) for rows of `size`; (0, 0) when they are too long for this way.

    Chunks are powers of two, at most four of them, of which as little as possible lies behind the row.
    """
    ways = [(length, triton.cdiv(size, length)) for length in (MOST >> i for i in range(MOST.bit_length()))]
    ways = [(length, number) for length, number in ways if number <= 4]
    return min(ways, key=lambda way: (way[0] * way[1], way[1]), default=(0, 0))


@triton.jit
def fetch(w, at, part: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """One chunk of weight rows. w: [rows, BK] pointers to the first chunk; at: [BK]."""
    if K % BK == 0:
        out = tl.load(w + part * BK, eviction_policy="evict_first")
    else:
        out = tl.load(w + part * BK, mask=(part * BK + at < K)[None, :], other=0.0, eviction_policy="evict_first")
    return out


@triton.jit
def operand(x, norm, at, part: tl.constexpr, NORMED: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """One chunk of the row, fp32: (the row, the row times the norm's weights)."""
    k = part * BK + at
    if K % BK == 0:
        own = tl.load(x + k).to(tl.float32)
        scaled = own
        if NORMED:
            scaled = own * tl.load(norm + k)
    else:
        own = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        scaled = own
        if NORMED:
            scaled = own * tl.load(norm + k, mask=k < K, other=0.0)
    return own, scaled


@triton.jit
def fetch_all(w, K: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr):
    """All chunks of a program's weight rows, what does not exist repeated. w: [rows, 1] pointers to their starts."""
    at = tl.arange(0, BK)
    wp = w + at[None, :]
    w0 = fetch(wp, at, 0, K, BK)
    w1, w2, w3 = w0, w0, w0
    if CHUNKS > 1:
        w1 = fetch(wp, at, 1, K, BK)
    if CHUNKS > 2:
        w2 = fetch(wp, at, 2, K, BK)
    if CHUNKS > 3:
        w3 = fetch(wp, at, 3, K, BK)
    return w0, w1, w2, w3


@triton.jit
def multiply(
    w0, w1, w2, w3, x, norm, eps,
    NORMED: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Fetched weight rows times the row x [K], RMS-normed where NORMED: fp32 [rows]. 1/rms multiplies the sum."""
    return multiply_and_norm(w0, w1, w2, w3, x, norm, eps, NORMED, K, BK, CHUNKS)[0]


@triton.jit
def multiply_and_norm(
    w0, w1, w2, w3, x, norm, eps,
    NORMED: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """`multiply` and the row's 1/rms, 1 where it is not normed."""
    at = tl.arange(0, BK)
    own, scaled = operand(x, norm, at, 0, NORMED, K, BK)
    total = w0.to(tl.float32) * scaled[None, :]
    squares = own * own
    if CHUNKS > 1:
        own, scaled = operand(x, norm, at, 1, NORMED, K, BK)
        total += w1.to(tl.float32) * scaled[None, :]
        squares += own * own
    if CHUNKS > 2:
        own, scaled = operand(x, norm, at, 2, NORMED, K, BK)
        total += w2.to(tl.float32) * scaled[None, :]
        squares += own * own
    if CHUNKS > 3:
        own, scaled = operand(x, norm, at, 3, NORMED, K, BK)
        total += w3.to(tl.float32) * scaled[None, :]
        squares += own * own
    out = tl.sum(total, 1)
    scale = 1.0
    if NORMED:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        out *= scale
    return out, scale
