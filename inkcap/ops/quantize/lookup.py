"""Decoding on a CPU by one table lookup a byte: the scale byte and the code byte together are a 16-bit index.

A table holds the products already rounded to the wanted dtype, so the bits are those of the reference. As many threads
as torch has work on different rows.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from inkcap.ops.quantize import ref

PASS_BYTES = 1 << 15  # codes of one pass: their indices, the table and the output stay in the second-level cache
TABLE_ENTRIES = 1 << 16
T = TypeVar("T")
WHOLE = {2: np.uint16, 4: np.uint32, 8: np.uint64}  # an integer of so many bytes
FOUR_UPPER = np.uint64(0x0100_0100_0100_0100)  # times a byte: it is the upper one of four 16-bit numbers


@ref.nvfp4_decode.implement("lookup", when=lambda device: device.type == "cpu")
def nvfp4_decode(
    codes: Tensor, scales: Tensor, factor: Tensor, dtype: torch.dtype = torch.float32, out: Tensor | None = None
) -> Tensor:
    """As ref.nvfp4_decode, on a CPU. A factor with fewer bytes than its table has entries goes to the reference."""
    if codes.numel() < TABLE_ENTRIES * max(1, factor.numel()):
        return ref.nvfp4_decode.reference(codes, scales, factor, dtype, out)
    every = torch.arange(256, dtype=torch.uint8)
    pairs = ref.e2m1_values(torch.stack((every & 15, every >> 4), -1))  # [256, 2], low nibble first
    exact = every.view(torch.float8_e4m3fn).float()[:, None, None] * pairs  # [scale, code, 2]
    if out is None:
        out = torch.empty(*codes.shape[:-1], 2 * codes.shape[-1], dtype=dtype)
    parts = (factor.numel(), -1)
    per_factor = zip(
        factor.flatten().float(), scales.reshape(parts), codes.reshape(parts), out.view(parts), strict=True
    )

    def decode(part: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        value, part_scales, part_codes, part_out = part
        high = part_scales.view(torch.uint8)
        table = (exact[: int(high.numpy().max()) + 1] * value).to(dtype)  # scales are positive: half of it at most
        gather(table, high, part_codes, part_out)

    on_threads(decode, per_factor)
    return out


@ref.mxfp8_decode.implement("lookup", when=lambda device: device.type == "cpu")
def mxfp8_decode(
    codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32, out: Tensor | None = None
) -> Tensor:
    """As ref.mxfp8_decode, on a CPU. Fewer codes than the table has entries go to the reference."""
    if codes.numel() < TABLE_ENTRIES:
        return ref.mxfp8_decode.reference(codes, scales, dtype, out)
    every = torch.arange(256, dtype=torch.uint8)
    table = (ref.e8m0(every)[:, None] * every.view(torch.float8_e4m3fn).float()).to(dtype)  # [scale, code]
    if out is None:
        out = torch.empty(codes.shape, dtype=dtype)
    parts = (codes.shape[:-2].numel(), -1)  # matrices
    per_matrix = zip(scales.reshape(parts), codes.view(torch.uint8).reshape(parts), out.view(parts), strict=True)
    on_threads(lambda part: gather(table[..., None], *part), per_matrix)
    return out


def on_threads(work: Callable[[T], None], parts: Iterable[T]) -> None:
    """Do all parts. numpy lets other threads run while it copies."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for _ in pool.map(work, parts):
            pass


def gather(table: Tensor, scales: Tensor, codes: Tensor, out: Tensor) -> None:
    """`out`, flat, from table [scale, code, values of a byte], scales and codes, both uint8 and flat.

    Goes from the front to the back, so that codes may stand in the last bytes of `out`.
    """
    values = table.contiguous().view(torch.uint8).numpy().view(WHOLE[table.shape[-1] * table.element_size()]).ravel()
    low, high, target = codes.numpy(), scales.numpy(), out.view(torch.uint8).numpy().view(values.dtype)
    block = len(low) // len(high)  # codes under a scale: whole words
    words = np.empty((PASS_BYTES // block, block // 4), np.uint64)  # of four indices
    for start in range(0, len(low), PASS_BYTES):
        here = slice(start, min(start + PASS_BYTES, len(low)))
        scale = high[start // block : here.stop // block] * FOUR_UPPER
        for column in range(words.shape[1]):
            words[: len(scale), column] = scale
        indices = words[: len(scale)].view(np.uint16).ravel()
        indices |= low[here]
        np.take(values, indices, out=target[here], mode="clip")
