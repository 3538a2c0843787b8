"""Copies of cache blocks on a GPU: all sources into a buffer, then from it to the targets, so that they may overlap.

Moves 4 bytes for each byte copied. Blocks are copied in the widest words that divide them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops.blocks.ref import copy_blocks

WORDS = 2048  # of a program


@triton.jit
def copy_rows_kernel(
    target, source, to, of, words, s_target, s_source, TO: tl.constexpr, OF: tl.constexpr, N: tl.constexpr
):
    """target[to[i]] = source[of[i]] for the program's i and N words; without TO or OF the index is i itself."""
    i = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * N + tl.arange(0, N)
    here = tl.load(of + i) if OF else i
    there = tl.load(to + i) if TO else i
    x = tl.load(source + here * s_source + at, mask=at < words)
    tl.store(target + there * s_target + at, x, mask=at < words)


@copy_blocks.implement("triton", when=lambda device: device.type == "cuda", tokenwise=True)
def copy_blocks_triton(arena: Tensor, source: Tensor, target: Tensor) -> None:
    """`copy_blocks` of the reference; blocks are contiguous, whatever lies between them."""
    moves = len(source)
    if moves == 0:
        return
    rows = arena.flatten(1).view(torch.uint8)
    assert rows.data_ptr() == arena.data_ptr(), f"blocks of strides {arena.stride()} are not contiguous"
    size = rows.shape[1]
    for word in (torch.int64, torch.int32, torch.int16):
        if size % word.itemsize == 0 and rows.stride(0) % word.itemsize == 0 and rows.data_ptr() % word.itemsize == 0:
            rows = rows.view(word)
            break
    words = rows.shape[1]
    held = rows.new_empty(moves, words)
    grid = (moves, triton.cdiv(words, WORDS))
    copy_rows_kernel[grid](held, rows, target, source, words, words, rows.stride(0), False, True, WORDS, num_warps=8)
    copy_rows_kernel[grid](rows, held, target, source, words, rows.stride(0), words, True, False, WORDS, num_warps=8)
