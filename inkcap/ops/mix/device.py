"""The mixture of one token's sources by one query, in a program that holds whole rows.

Blocks are finished long before they are mixed, so all sources but the last two, of which one may be a block just
closed, are read before the dependency wait. A kernel that does so triggers after its wait: what it waited for is
complete when anything behind it starts.
"""

import triton
import triton.language as tl

from inkcap.ops import pdl

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
def weighed(sources, query, token, at, held, eps, C: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr):
    """Sum of the sources' rows [BLOCK] by exp(score - top) / rms, the sum of these exps, top, and each source's score
    and 1 / rms. The dependency wait stands inside."""
    acc = tl.zeros(at.shape, tl.float32)
    top = -float("inf")
    total = 0.0
    kept = ()
    for i in tl.static_range(EARLY):
        x = tl.load(sources[i] + token * C + at, mask=held, other=0.0).to(tl.float32)
        z, factor = score(x, query, eps, C)
        higher = tl.maximum(top, z)
        shrink, p = tl.exp(top - higher), tl.exp(z - higher)
        acc = acc * shrink + x * (p * factor)
        total = total * shrink + p
        top = higher
        kept += ((z, factor),)
    pdl.wait(PDL)
    pdl.trigger(PDL)
    late = ()
    for i in tl.static_range(EARLY, len(sources)):  # all loads before the first sum
        late += (tl.load(sources[i] + token * C + at, mask=held, other=0.0).to(tl.float32),)
    for i in tl.static_range(len(sources) - EARLY):
        z, factor = score(late[i], query, eps, C)
        higher = tl.maximum(top, z)
        shrink, p = tl.exp(top - higher), tl.exp(z - higher)
        acc = acc * shrink + late[i] * (p * factor)
        total = total * shrink + p
        top = higher
        kept += ((z, factor),)
    return acc, total, top, kept
