"""Rounding and encoding on a GPU with the codes of the references, bit for bit.

Every operation is one of the references', in their order: divisions round to nearest, nothing is contracted, subnormals
stay, and errors are summed column by column. So a thread owns a block of NVFP4, whose halves are two tiles of one
layout. All is done with magnitudes; signs come back at the end.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkcap.ops import pdl
from inkcap.ops.quantize.ref import (
    E2M1_MAX,
    MXFP8_BLOCK,
    NVFP4_BLOCK,
    Rounding,
    check_columns,
    mxfp8_encode,
    nvfp4_encode,
    nvfp4_encode_four_over_six,
    round_rows,
)

# columns of a program of one warp by kind, where there are many rows; 8,192 rows of 2,304 columns, us on an H200:
# 256 139 90 90, 512 177 57 50, 1024 208 64 31
COLUMNS = (512, 256, 1024)
SHORT, FEW = 64, 512  # columns of a program where there are at most so many rows: a step waits for one program
READ = tl.constexpr(1024)  # columns that are read at once for a row's maximum
BY_FACTOR, BY_ROW, BY_POWER = (tl.constexpr(kind) for kind in range(3))  # NVFP4, Four-over-Six, MXFP8
SMALL, LARGE = tl.constexpr(2.0**-80), tl.constexpr(2.0**80)  # rows' maxima with no subnormal or infinity on the way
MOST = tl.constexpr(3.4028234663852886e38)  # fp32's largest


@triton.jit
def magnitude(x):
    """|x|, fp32."""
    return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def largest(size, AXIS: tl.constexpr):
    """The largest of magnitudes, sought among their bits, so that NaN is larger than everything."""
    return tl.max(size.to(tl.int32, bitcast=True), AXIS).to(tl.float32, bitcast=True)


@triton.jit
def larger(size, other):
    """The larger of two magnitudes each, in the same way."""
    return tl.maximum(size.to(tl.int32, bitcast=True), other.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def signed(size, x):
    """`size` with the sign of x."""
    bits = size.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def quotient(x, y):
    """x / y to the nearest fp32."""
    x, y = tl.broadcast(x, y)
    return tl.div_rn(x, y)


@triton.jit
def finite(x):
    """x, but fp32's largest number in place of infinity; NaN stays."""
    return tl.where(x > MOST, MOST, x)


@triton.jit
def to_e4m3(size):
    """The nearest E4M3 of magnitudes: three bits behind the first; below 2^-6 steps of 2^-9. NaN stays."""
    size = tl.where(size > 448.0, 448.0, size)
    bits = size.to(tl.int32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    return tl.where(size < 0.015625, (size + 16384.0) - 16384.0, normal.to(tl.float32, bitcast=True))


@triton.jit
def e4m3_byte(value):
    """The byte of an E4M3."""
    bits, size = value.to(tl.int32, bitcast=True), magnitude(value)
    byte = tl.where(size < 0.015625, (size * 512.0).to(tl.int32), ((bits & 0x7FFFFFFF) >> 20) - 960)
    byte = tl.where(size == size, byte, 127)
    return (byte | ((bits >> 24) & 128)).to(tl.uint8)


@triton.jit
def to_e2m1(size):
    """The nearest E2M1 of magnitudes, as the addition of a large number rounds: steps of 1/2, 1 and 2. NaN gives 0."""
    size = tl.where(size > 6.0, 6.0, size)
    large = tl.where(size < 2.0, 4194304.0, tl.where(size < 4.0, 8388608.0, 16777216.0))
    return tl.where(size == size, (size + large) - large, 0.0)


@triton.jit
def e2m1_pairs(value, NB: tl.constexpr):
    """The codes of E2M1s [NB, 8], two in a byte: [NB, 4]."""
    bits, size = value.to(tl.int32, bitcast=True), magnitude(value)
    code = tl.where(size < 1.0, (size * 2.0).to(tl.int32), ((bits & 0x7FFFFFFF) >> 22) - 252) | ((bits >> 28) & 8)
    low, high = tl.split(tl.reshape(code, [NB, 4, 2]))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def added(total, x, NB: tl.constexpr):
    """total [NB] plus the columns of x [NB, 8], one after another."""
    even, odd = tl.split(tl.reshape(x, [NB, 4, 2]))
    c04, c26 = tl.split(tl.reshape(even, [NB, 2, 2]))
    c15, c37 = tl.split(tl.reshape(odd, [NB, 2, 2]))
    c0, c4 = tl.split(c04)
    c2, c6 = tl.split(c26)
    c1, c5 = tl.split(c15)
    c3, c7 = tl.split(c37)
    return total + c0 + c1 + c2 + c3 + c4 + c5 + c6 + c7


@triton.jit
def meant(q, scale, peak, span, USUAL: tl.constexpr):
    """q * scale * peak / span of E2M1s q [NB, 8], rounded as in that order.

    In the USUAL range a power of two in q may as well come last, so that there are two quotients for a block: one for
    1, 2, 4 and 1/2, one for 1.5, 3 and 6.
    """
    if USUAL:
        odd = quotient(1.5 * scale * peak, span)[:, None]
        even = quotient(scale * peak, span)[:, None]
        bits = q.to(tl.int32, bitcast=True)
        out = tl.where((bits & 0x400000) == 0, even, odd) * (bits & 0x7F800000).to(tl.float32, bitcast=True)
    else:
        out = quotient(q * scale[:, None] * peak[:, None], span[:, None])
    return out


@triton.jit
def candidate(low, high, wanted, decode, peak, span, NB: tl.constexpr, USUAL: tl.constexpr):
    """E2M1s of both halves of blocks under the scale next to `wanted` [NB], that scale, and the sum of errors."""
    scale = to_e4m3(wanted)
    step = finite(quotient(tl.full([NB], 1.0, tl.float32), scale * decode))[:, None]
    q_low, q_high = to_e2m1(low * step), to_e2m1(high * step)
    total = added(tl.zeros([NB], tl.float32), magnitude(meant(q_low, scale, peak, span, USUAL) - low), NB)
    total = added(total, magnitude(meant(q_high, scale, peak, span, USUAL) - high), NB)
    return q_low, q_high, scale, total


@triton.jit
def by_row(low, high, block_peak, peak, span, NB: tl.constexpr, USUAL: tl.constexpr):
    """`nvfp4_encode_four_over_six` of magnitudes under the row's `peak`: E2M1s, scales, factor, empty blocks."""
    peak, span = tl.zeros([NB], tl.float32) + peak, tl.zeros([NB], tl.float32) + span
    encode = finite(quotient(span, peak))
    decode = tl.where(peak == 0.0, 0.0, quotient(tl.full([NB], 1.0, tl.float32), encode))
    for_six = quotient(block_peak, tl.full([NB], 6.0, tl.float32)) * encode
    low6, high6, scale6, error6 = candidate(low, high, for_six, decode, peak, span, NB, USUAL)
    low4, high4, scale4, error4 = candidate(low, high, 1.5 * for_six, decode, peak, span, NB, USUAL)
    four = error4 < error6
    empty = (block_peak == 0.0) | (peak == 0.0)
    scale = tl.where(empty, 0.0, tl.where(four, scale4, scale6))
    return tl.where(four[:, None], low4, low6), tl.where(four[:, None], high4, high6), scale, decode, empty


@triton.jit
def by_factor(low, high, block_peak, factor, floor):
    """`nvfp4_encode` of magnitudes under a factor [NB]: E2M1s, scales, empty blocks."""
    wanted = quotient(block_peak, 6.0 * factor)
    wanted = tl.where(wanted < floor, floor, wanted)
    scale = to_e4m3(tl.where(block_peak > 0.0, wanted, block_peak))
    step = (scale * factor)[:, None]
    return to_e2m1(quotient(low, step)), to_e2m1(quotient(high, step)), scale, scale * factor == 0.0


@triton.jit
def of_power(byte):
    """2^(byte - 127) of int32, NaN for 255."""
    bits = tl.where(byte == 0, 0x400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def peak_of(x, K: tl.constexpr):
    """The largest magnitude of a row."""
    at = tl.arange(0, READ)
    size = magnitude(tl.load(x + at, mask=at < K, other=0.0).to(tl.float32))
    for first in tl.static_range(READ, K, READ):
        size = larger(size, magnitude(tl.load(x + first + at, mask=first + at < K, other=0.0).to(tl.float32)))
    return largest(size, 0)


@triton.jit
def nvfp4_part(
    x, outer, y, scales, factors, number, span, floor,
    KIND: tl.constexpr, GIVEN: tl.constexpr, CODES: tl.constexpr, K: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """Part `number` of a row, NB blocks: their codes and scales, and the row's factor; or what they mean.

    outer: the factor, or the row's largest magnitude; where nothing is GIVEN, it is sought.
    """
    block = number * NB + tl.arange(0, NB)
    half = block[:, None] * 16 + tl.arange(0, 8)[None, :]
    low = tl.load(x + half, mask=half < K, other=0.0).to(tl.float32)
    high = tl.load(x + half + 8, mask=half < K, other=0.0).to(tl.float32)
    own = tl.load(outer).to(tl.float32) if GIVEN else peak_of(x, K)
    size_low, size_high = magnitude(low), magnitude(high)
    block_peak = largest(larger(size_low, size_high), 1)
    if KIND == BY_ROW:
        if (own > SMALL) & (own < LARGE):
            q_low, q_high, scale, factor, empty = by_row(size_low, size_high, block_peak, own, span, NB, True)
        else:
            q_low, q_high, scale, factor, empty = by_row(size_low, size_high, block_peak, own, span, NB, False)
        if CODES and number == 0:
            tl.store(factors + tl.arange(0, NB) * 0, factor)
    else:
        factor = tl.zeros([NB], tl.float32) + own
        q_low, q_high, scale, empty = by_factor(size_low, size_high, block_peak, factor, floor)
    q_low = tl.where(empty[:, None], 0.0, signed(q_low, low))
    q_high = tl.where(empty[:, None], 0.0, signed(q_high, high))
    if CODES:
        byte = block[:, None] * 8 + tl.arange(0, 4)[None, :]
        tl.store(y + byte, e2m1_pairs(q_low, NB), mask=byte < K // 2)
        tl.store(y + byte + 4, e2m1_pairs(q_high, NB), mask=byte < K // 2)
        tl.store(scales + block, e4m3_byte(scale), mask=block < K // 16)
    else:
        means = q_low * scale[:, None] * factor[:, None]
        tl.store(y + half, means.to(y.dtype.element_ty), mask=half < K)
        means = q_high * scale[:, None] * factor[:, None]
        tl.store(y + half + 8, means.to(y.dtype.element_ty), mask=half < K)


@triton.jit
def mxfp8_part(x, y, scales, number, CODES: tl.constexpr, K: tl.constexpr, NB: tl.constexpr):
    """The same in MXFP8."""
    block = number * NB + tl.arange(0, NB)
    at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    own = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
    bits = largest(magnitude(own), 1).to(tl.int32, bitcast=True)
    byte = tl.maximum((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32), 0)  # 448 = 1.75 * 2^8
    byte = tl.where(bits < 0x7F800000, byte, 255)
    inverse = of_power(tl.where(byte == 255, 255, 254 - byte))
    code = signed(to_e4m3(magnitude(own) * inverse[:, None]), own)
    if CODES:
        tl.store(y + at, e4m3_byte(code), mask=at < K)
        tl.store(scales + block, byte.to(tl.uint8), mask=block < K // 32)
    else:
        tl.store(y + at, (code * of_power(byte)[:, None]).to(y.dtype.element_ty), mask=at < K)


@triton.jit
def round_part(
    x, outer, y, number, span, KIND: tl.constexpr, GIVEN: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Part `number` of a row, COLUMNS long, rounded into y."""
    if KIND == BY_POWER:
        mxfp8_part(x, y, y, number, False, K, COLUMNS // 32)
    else:
        nvfp4_part(x, outer, y, y, y, number, span, 0.0, KIND, GIVEN, False, K, COLUMNS // 16)


@triton.jit(do_not_specialize=["per"])
def round_kernel(
    x, outer, y, x_stride, span, per,
    KIND: tl.constexpr, GIVEN: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of a row rounded. `outer` has one entry for `per` rows."""
    row = tl.program_id(0).to(tl.int64)
    pdl.wait(PDL)
    pdl.trigger(PDL)  # behind the wait: the next kernel may read early what was written before the last one
    round_part(x + row * x_stride, outer + row // per, y + row * K, tl.program_id(1), span, KIND, GIVEN, K, COLUMNS)


@triton.jit(do_not_specialize=["per"])
def encode_kernel(
    x, outer, y, scales, factors, x_stride, span, floor, per, KIND: tl.constexpr, K: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The codes and scales of one part of a row, and factors where they are made here; `per` as above."""
    row = tl.program_id(0).to(tl.int64)
    pdl.wait(PDL)
    pdl.trigger(PDL)
    x += row * x_stride
    if KIND == BY_POWER:
        mxfp8_part(x, y + row * K, scales + row * (K // 32), tl.program_id(1), True, K, COLUMNS // 32)
    else:
        nvfp4_part(
            x, outer + row // per, y + row * (K // 2), scales + row * (K // 16), factors + row // per,
            tl.program_id(1), span, floor, KIND, True, True, K, COLUMNS // 16,
        )  # fmt: skip


def rows_of(x: Tensor) -> Tensor:
    """x [..., K] as rows whose elements lie side by side."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def kind_of(how: Rounding) -> int:
    """How kernels call it."""
    return (BY_POWER if how.block == MXFP8_BLOCK else BY_FACTOR if how.factor is not None else BY_ROW).value


@round_rows.implement("triton", when=lambda device: device.type == "cuda", tokenwise=True)
def round_rows_triton(x: Tensor, how: Rounding, amax: Tensor | None = None) -> Tensor:
    """`round_rows` of the reference."""
    check_columns(x, how.block)
    out, rows, on = torch.empty(x.shape, dtype=x.dtype, device=x.device), rows_of(x), pdl.supported(x.device)
    number, columns = rows.shape
    outer = amax if how.factor is None else how.factor
    if number:
        part = COLUMNS[kind_of(how)] if number > FEW else SHORT
        round_kernel[(number, triton.cdiv(columns, part))](
            rows, rows if outer is None else outer.contiguous(), out, rows.stride(0), E2M1_MAX * how.limit,
            number if outer is None else number // outer.numel(),
            kind_of(how), outer is not None, columns, part, on,
            num_warps=1, enable_fp_fusion=False, **pdl.launch(on),
        )  # fmt: skip
    return out


def encode(
    x: Tensor, kind: int, codes: Tensor, scales: Tensor, outer: Tensor, factors: Tensor, span: float, floor: float
) -> None:
    """Fill codes, scales and, by rows, factors. `outer`: as many as there are factors."""
    rows, on = rows_of(x), pdl.supported(x.device)
    number, columns = rows.shape
    if number:
        part = COLUMNS[kind]
        encode_kernel[(number, triton.cdiv(columns, part))](
            rows, outer, codes.view(torch.uint8), scales.view(torch.uint8), factors, rows.stride(0), span, floor,
            number // outer.numel(), kind, columns, part, on,
            num_warps=1, enable_fp_fusion=False, **pdl.launch(on),
        )  # fmt: skip


def places(x: Tensor) -> tuple[Tensor, Tensor]:
    """For NVFP4's codes and scales of x."""
    check_columns(x, NVFP4_BLOCK)
    *first, columns = x.shape
    codes = torch.empty(*first, columns // 2, dtype=torch.uint8, device=x.device)
    return codes, torch.empty(*first, columns // NVFP4_BLOCK, dtype=torch.float8_e4m3fn, device=x.device)


@nvfp4_encode.implement("triton", when=lambda device: device.type == "cuda", tokenwise=True)
def nvfp4_encode_triton(x: Tensor, factor: Tensor, floor: float = 0.0) -> tuple[Tensor, Tensor]:
    """`nvfp4_encode` of the reference."""
    codes, scales = places(x)
    outer = factor.float().contiguous()
    encode(x, BY_FACTOR.value, codes, scales, outer, outer, 0.0, floor)
    return codes, scales


@nvfp4_encode_four_over_six.implement("triton", when=lambda device: device.type == "cuda", tokenwise=True)
def nvfp4_encode_four_over_six_triton(x: Tensor, amax: Tensor, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    """`nvfp4_encode_four_over_six` of the reference."""
    codes, scales = places(x)
    factors = torch.empty(amax.shape, dtype=torch.float32, device=x.device)
    encode(x, BY_ROW.value, codes, scales, amax.contiguous(), factors, E2M1_MAX * limit, 0.0)
    return codes, scales, factors


@mxfp8_encode.implement("triton", when=lambda device: device.type == "cuda", tokenwise=True)
def mxfp8_encode_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """`mxfp8_encode` of the reference."""
    check_columns(x, MXFP8_BLOCK)
    *first, columns = x.shape
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(*first, columns // MXFP8_BLOCK, dtype=torch.uint8, device=x.device)
    encode(x, BY_POWER.value, codes, scales, scales, scales, 0.0, 0.0)
    return codes, scales
