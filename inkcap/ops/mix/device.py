"""The mixture of one token's sources by one query, in a program that holds whole rows.

Blocks are finished long before they are mixed, so all sources but the last two, of which one may be a block just
closed, are read before the dependency wait: first halves of experts trigger after theirs, so whatever was written
before the last of them is complete.
"""

import triton
import triton.language as tl

LATE = 2  # sources that may have been written just now


@triton.jit
def both(a, b, c, d):
    return a + c, b + d


@triton.jit
def score(x, query, eps, C: tl.constexpr):
    """(score of a source's row, its 1 / rms)."""
    squares, product = tl.reduce((x * x, x * query), 0, both)
    factor = tl.rsqrt(squares / C + eps)
    return product * factor * (C**-0.5), factor


@triton.jit
def added(x, state, query, eps, C: tl.constexpr):
    """A sum's state behind one more source's row: sum of rows by exp(score - top) / rms, sum of these exps, top."""
    acc, total, top = state
    z, factor = score(x, query, eps, C)
    higher = tl.maximum(top, z)
    shrink, p = tl.exp(top - higher), tl.exp(z - higher)
    return (acc * shrink + x * (p * factor), total * shrink + p, higher), (z, factor)


@triton.jit
def begun(sources, query, token, at, held, eps, C: tl.constexpr, EARLY: tl.constexpr):
    """The sum over the first sources, before the dependency wait; and each one's score and 1 / rms."""
    state = (tl.zeros(at.shape, tl.float32), 0.0, -float("inf"))
    kept = ()
    for i in tl.static_range(EARLY):
        x = tl.load(sources[i] + token * C + at, mask=held, other=0.0).to(tl.float32)
        state, own = added(x, state, query, eps, C)
        kept += (own,)
    return state, kept


@triton.jit
def fetched(sources, token, at, held, C: tl.constexpr, EARLY: tl.constexpr):
    """Rows of the other sources, behind the wait: all loads before the first sum."""
    late = ()
    for i in tl.static_range(EARLY, len(sources)):
        late += (tl.load(sources[i] + token * C + at, mask=held, other=0.0).to(tl.float32),)
    return late


@triton.jit
def ended(late, state, kept, query, eps, C: tl.constexpr):
    """The sum over all sources, and each one's score and 1 / rms."""
    for i in tl.static_range(len(late)):
        state, own = added(late[i], state, query, eps, C)
        kept += (own,)
    return state, kept
