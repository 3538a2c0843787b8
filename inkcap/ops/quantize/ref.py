"""NVFP4 and MXFP8, encode and decode: the meaning of the bytes, in plain PyTorch.

NVFP4: two E2M1 codes a byte (even column in the low nibble), one E4M3 scale per 16 columns, one FP32 factor outside.
MXFP8: one E4M3 code a byte, one power of two (UE8M0) per 32 columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from inkcap.ops.dispatch import op

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # value of each code
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9  # the smallest positive E4M3
NVFP4_BLOCK = 16  # columns under one scale
MXFP8_BLOCK = 32
FOUR_OVER_SIX_LIMIT = 256.0  # largest block scale aimed at, so that 1.5 times as much is still an E4M3
FLOAT_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Rounding:
    """How a publisher's kernels round what they multiply with a matrix in codes."""

    block: int  # NVFP4_BLOCK or MXFP8_BLOCK
    factor: Tensor | None = None  # [] fp32 of NVFP4; None: Four-over-Six with a factor for each row
    limit: float = FOUR_OVER_SIX_LIMIT

    @property
    def by_row(self) -> bool:
        """Whether a row's largest magnitude matters."""
        return self.block == NVFP4_BLOCK and self.factor is None


def leading(factor: Tensor, like: Tensor) -> Tensor:
    """`factor`, which belongs to the first dimensions of `like`, shaped to broadcast over the rest."""
    return factor.float().reshape(*factor.shape, *(1,) * (like.dim() - factor.dim()))


def check_columns(x: Tensor, size: int) -> None:
    """Raises ValueError unless the columns of x [..., K] divide into blocks of `size`."""
    if x.shape[-1] == 0 or x.shape[-1] % size:
        raise ValueError(f"{x.shape[-1]} columns do not divide into blocks of {size}; pad them with zeros")


def blocks_of(x: Tensor, size: int) -> Tensor:
    """x [..., K] as fp32 [..., K / size, size]. Raises ValueError unless K is a multiple of `size`."""
    check_columns(x, size)
    return x.float().unflatten(-1, (-1, size))


def e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3, ties to even, saturating at 448; NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def e8m0(scales: Tensor) -> Tensor:
    """The fp32 value 2^(byte - 127) of UE8M0 bytes; byte 255 is NaN."""
    table = torch.arange(256, dtype=torch.int32, device=scales.device) << 23
    table[0], table[255] = 0x00400000, 0x7FC00000  # 2^-127 is a subnormal; the pattern of infinity means NaN here
    return table.view(torch.float32)[scales.int()]


def e2m1(x: Tensor) -> Tensor:
    """Codes (uint8, 0 to 15) of the nearest E2M1 values, ties to even, saturating at 6. The sign of zero is kept."""
    size = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for bound in (0.25, 1.25, 2.5, 5.0):  # below these ties lies an even code
        code += size > bound
    for bound in (0.75, 1.75, 3.5):  # and above these
        code += size >= bound
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def pack(codes: Tensor) -> Tensor:
    """Codes [..., K] to bytes [..., K / 2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def e2m1_values(codes: Tensor) -> Tensor:
    """The fp32 values of single codes."""
    return torch.tensor(E2M1, device=codes.device)[codes.int()]


@op
def nvfp4_decode(
    codes: Tensor, scales: Tensor, factor: Tensor, dtype: torch.dtype = torch.float32, out: Tensor | None = None
) -> Tensor:
    """E2M1 x E4M3 x factor [..., K], in `out` [..., K] of `dtype` where that is given.

    codes: uint8 [..., K / 2]; scales: float8_e4m3fn [..., K / 16]; factor: fp32, one for each index of the first
    dimensions: [] for a tensor, [E] for experts, [T] for rows. The first product is exact in fp32 (2 and 4 significant
    bits), the second rounds once, `dtype` once more. The codes under one factor may stand at the end of the memory of
    what they become in `out`: nothing is written before it is read.
    """
    values = e2m1_values(torch.stack((codes & 15, codes >> 4), -1).flatten(-2))
    scaled = blocks_of(values, NVFP4_BLOCK) * scales.float()[..., None]
    decoded = (scaled * leading(factor, scaled)).flatten(-2).to(dtype)
    return decoded if out is None else out.copy_(decoded)


@op
def nvfp4_encode(x: Tensor, factor: Tensor, floor: float = 0.0) -> tuple[Tensor, Tensor]:
    """Codes and scales of x [..., K] under a given factor (of the first dimensions, as in nvfp4_decode).

    The scale of a block is E4M3(largest magnitude / 6 / factor). `floor` keeps the scale of a block that is not zero
    from vanishing: weights use E4M3_TINY. A block of zeros, or one whose scale vanishes, gets scale 0 and codes 0.
    """
    blocks = blocks_of(x, NVFP4_BLOCK)
    outer = leading(factor, blocks)
    amax = blocks.abs().amax(-1, keepdim=True)
    scales = e4m3(torch.where(amax > 0, (amax / (E2M1_MAX * outer)).clamp(min=floor), amax))
    step = scales.float() * outer
    codes = e2m1(torch.where(step == 0, 0.0, blocks / step))
    return pack(codes.flatten(-2)), scales.squeeze(-1)


@op
def nvfp4_encode_four_over_six(x: Tensor, amax: Tensor, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and the fp32 decoding factor of x [..., K]; each block's scale aims at 6 or at 4.

    amax: the largest magnitude of x over each index of its first dimensions ([T] for one factor a token). limit: the
    largest block scale aimed at. A block takes the candidate with the smaller sum of absolute errors, summed in column
    order in fp32; equal sums take 6. Source: Four Over Six (adaptive block scaling), rule "mae".
    """
    blocks = blocks_of(x, NVFP4_BLOCK)
    peak = leading(amax, blocks)
    span = E2M1_MAX * limit
    encode = (torch.full_like(peak, span) / peak).clamp(max=FLOAT_MAX)  # number / tensor would round twice
    decode = torch.where(peak == 0, 0.0, 1 / encode)
    block_peak = blocks.abs().amax(-1, keepdim=True)
    for_six = block_peak / E2M1_MAX * encode

    def candidate(wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale = e4m3(wanted)
        codes = e2m1(blocks * (1 / (scale.float() * decode)).clamp(max=FLOAT_MAX))
        errors = (e2m1_values(codes) * scale.float() * peak / span - blocks).abs()
        total = errors[..., 0]
        for column in range(1, NVFP4_BLOCK):
            total = total + errors[..., column]
        return codes, scale, total[..., None]

    codes6, scale6, error6 = candidate(for_six)
    codes4, scale4, error4 = candidate(1.5 * for_six)
    four = error4 < error6
    empty = (block_peak == 0) | (peak == 0)
    codes = torch.where(empty, 0, torch.where(four, codes4, codes6))
    scales = torch.where(empty, 0.0, torch.where(four, scale4.float(), scale6.float())).to(torch.float8_e4m3fn)
    return pack(codes.flatten(-2)), scales.squeeze(-1), decode.reshape(amax.shape)


@op
def mxfp8_decode(
    codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32, out: Tensor | None = None
) -> Tensor:
    """E4M3 x 2^(byte - 127) [..., K], exact in fp32, in `out` [..., K] of `dtype` where that is given.

    codes: float8_e4m3fn [..., K]; scales: uint8 [..., K / 32]. Codes may stand at the end of what their matrix
    [..., R, K] becomes in `out`, as in nvfp4_decode.
    """
    decoded = (blocks_of(codes, MXFP8_BLOCK) * e8m0(scales)[..., None]).flatten(-2).to(dtype)
    return decoded if out is None else out.copy_(decoded)


@op
def mxfp8_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes float8_e4m3fn [..., K] and scale bytes [..., K / 32] of x [..., K].

    A scale is the smallest power of two, not below 2^-127, under which the block's largest magnitude is at most 448:
    nothing saturates. Blocks of zeros get byte 0; a block that is not finite gets byte 255 (NaN).
    """
    blocks = blocks_of(x, MXFP8_BLOCK)
    amax = blocks.abs().amax(-1)
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa * 2^exponent, mantissa in [0.5, 1)
    power = exponent - 9 + (mantissa > 0.875)  # 448 = 0.875 * 2^9
    scales = torch.where(amax == 0, 0, (power + 127).clamp(min=0))
    scales = torch.where(amax.isfinite(), scales, 255).to(torch.uint8)
    return e4m3(blocks / e8m0(scales)[..., None]).flatten(-2), scales


@op
def round_rows(x: Tensor, how: Rounding, amax: Tensor | None = None) -> Tensor:
    """x [..., K] encoded and decoded again: numbers of a format, in the dtype of x.

    amax: largest magnitudes [...] of whole rows, for Four-over-Six where x holds a part of each.
    """
    if how.block == MXFP8_BLOCK:
        return mxfp8_decode(*mxfp8_encode(x), x.dtype)
    if how.factor is not None:
        return nvfp4_decode(*nvfp4_encode(x, how.factor), how.factor, x.dtype)
    peak = x.abs().amax(-1) if amax is None else amax
    return nvfp4_decode(*nvfp4_encode_four_over_six(x, peak, how.limit), x.dtype)
