"""Decoding on a CPU by one table lookup a byte: the scale byte and the code byte together are a 16-bit index.

A table holds the products already rounded to the wanted dtype, so the bits are those of the reference.
"""

import numpy as np
import torch
from torch import Tensor

from inkcap.ops.quantize import ref

PASS_BYTES = 1 << 15  # codes of one pass: their indices, the table and the output stay in the second-level cache
TABLE_ENTRIES = 1 << 16
WHOLE = {2: np.uint16, 4: np.uint32, 8: np.uint64}  # an integer of so many bytes


@ref.nvfp4_decode.implement("lookup", when=lambda device: device.type == "cpu")
def nvfp4_decode(codes: Tensor, scales: Tensor, factor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """As ref.nvfp4_decode, on a CPU. A factor with fewer bytes than its table has entries goes to the reference."""
    if codes.numel() < TABLE_ENTRIES * factor.numel():
        return ref.nvfp4_decode.reference(codes, scales, factor, dtype)
    every = torch.arange(256, dtype=torch.uint8)
    pairs = ref.e2m1_values(torch.stack((every & 15, every >> 4), -1))  # [256, 2], low nibble first
    exact = every.view(torch.float8_e4m3fn).float()[:, None, None] * pairs  # [scale, code, 2]
    out = torch.empty(*codes.shape[:-1], 2 * codes.shape[-1], dtype=dtype)
    parts = (factor.numel(), codes.numel() // codes.shape[-1] // factor.numel(), -1)
    per_factor = zip(
        factor.flatten().float(), scales.reshape(parts), codes.reshape(parts), out.view(parts), strict=True
    )
    for value, part_scales, part_codes, part_out in per_factor:
        gather((exact * value).to(dtype), part_scales.view(torch.uint8), part_codes, part_out)
    return out


@ref.mxfp8_decode.implement("lookup", when=lambda device: device.type == "cpu")
def mxfp8_decode(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """As ref.mxfp8_decode, on a CPU. Fewer codes than the table has entries go to the reference."""
    if codes.numel() < TABLE_ENTRIES:
        return ref.mxfp8_decode.reference(codes, scales, dtype)
    every = torch.arange(256, dtype=torch.uint8)
    table = (ref.e8m0(every)[:, None] * every.view(torch.float8_e4m3fn).float()).to(dtype)  # [scale, code]
    out = torch.empty(codes.shape, dtype=dtype)
    rows = codes.view(torch.uint8).reshape(-1, codes.shape[-1])
    gather(table[..., None], scales.reshape(len(rows), -1), rows, out.view(len(rows), -1))
    return out


def gather(table: Tensor, scales: Tensor, codes: Tensor, out: Tensor) -> None:
    """out [rows, columns] from table [scale, code, values of a byte], scales and codes uint8 [rows, bytes]."""
    values = table.contiguous().view(torch.uint8).numpy().view(WHOLE[table.shape[-1] * table.element_size()]).ravel()
    target = out.view(torch.uint8).numpy().view(values.dtype)
    rows, width = codes.shape
    step = max(1, PASS_BYTES // width)
    for start in range(0, rows, step):
        high = scales[start : start + step].numpy().astype(np.uint16)[..., None] << 8
        low = codes[start : start + step].numpy().reshape(*high.shape[:2], -1)
        np.take(values, (high | low).reshape(-1, width), out=target[start : start + step], mode="clip")
