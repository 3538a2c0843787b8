"""Products of several inputs with their own rows of one matrix. One row each: one launch for all. A few rows: one for
their parts, and another that sums these.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.linear.device import chunks, fetch_all, multiply
from inkcap.ops.linear.few import each_in_parts, sum_parts
from inkcap.ops.linear.ref import project_each
from inkcap.ops.linear.triton import FEW, project_triton, streams, tile
from inkcap.ops.values import Normed


@triton.jit
def project_rows(
    xs, norms, w, y, eps, tiles, starts, stops, w_stride,
    NORMED: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Input i has the tiles from tiles[i] on, and rows starts[i] .. stops[i] of w."""
    pdl.trigger(PDL)
    own = tl.program_id(0)
    x, norm, first, start, stop = xs[0], norms[0], tiles[0], starts[0], stops[0]
    for i in tl.static_range(1, len(xs)):
        if own >= tiles[i]:
            x, norm, first, start, stop = xs[i], norms[i], tiles[i], starts[i], stops[i]
    n = start + (own - first) * BN + tl.arange(0, BN)
    held = tl.minimum(n, stop - 1)
    w0, w1, w2, w3 = fetch_all(w + held[:, None].to(tl.int64) * w_stride, K, BK, CHUNKS)
    pdl.wait(PDL)
    out = multiply(w0, w1, w2, w3, x, norm, eps, NORMED, K, BK, CHUNKS)
    tl.store(y + n, out.to(y.dtype.element_ty), mask=n < stop)


@project_each.implement("triton", when=lambda device: device.type == "cuda")
def project_each_triton(inputs: Sequence[Normed], weight: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """`project_each` of the reference. One row is normed without rounding the normed row in between."""
    first = inputs[0]
    if not all(streams(rows.rows, weight) for rows in inputs):
        if 1 < len(first.rows) <= FEW and weight.stride(1) == 1 and first.dtype == weight.dtype:
            xs = [rows.tensor() for rows in inputs]
            if all(x.is_contiguous() for x in xs):
                return sum_parts(each_in_parts(xs, weight, widths), first.dtype).split_with_sizes(list(widths), 1)
        parts = weight.split_with_sizes(list(widths))
        return tuple(project_triton(rows, part) for rows, part in zip(inputs, parts, strict=True))
    (rows, length), on = weight.shape, pdl.supported(weight.device)
    (bn, warps), (bk, number) = tile(rows, length), chunks(length)
    ends = [sum(widths[: i + 1]) for i in range(len(widths))]
    tiles = [0]
    for width in widths:
        tiles.append(tiles[-1] + triton.cdiv(width, bn))
    normed = [each.normed for each in inputs]
    done = all(each is not None for each in normed)
    xs = tuple(normed) if done else tuple(each.rows for each in inputs)
    assert done or all(each is None for each in normed), "some inputs are normed and others are not"
    out = torch.empty(1, rows, dtype=first.dtype, device=weight.device)
    project_rows[(tiles[-1],)](
        xs, tuple(each.weight for each in inputs), weight, out, first.eps,
        tuple(tiles[:-1]), tuple(end - width for end, width in zip(ends, widths, strict=True)), tuple(ends),
        weight.stride(0), not done, length, bk, number, bn, on,
        num_warps=warps, **pdl.launch(on),
    )  # fmt: skip
    return out.split_with_sizes(list(widths), 1)
