"""Device functions that decode NVFP4 and MXFP8 in registers: int32 words of codes to numbers, scales to fp32.

A word is eight E2M1 or four E4M3 codes, lowest bits first. The bits of a code, moved to where bf16 has its sign and the
low end of its exponent, are the code's value times 2^-126 (E2M1) or 2^-120 (E4M3), subnormal codes included; a product
with a power of two undoes that exactly. A block of columns under one scale is 16 codes (E2M1) or 32 (E4M3).
"""

import triton
import triton.language as tl

# four bf16 pairs (k, k + 4) of a word of E2M1 codes, times a pair of scales; fma with -0 exists since Ampere, mul not.
# A code times 2^6 + 2^12 has its number and, from the second term, its sign where bf16 wants them
PAIRS_TIMES_SCALE = tl.constexpr("""{
.reg .b32 a, b, z;
mov.b32 z, 0x80008000; shr.u32 b, $4, 8;
and.b32 a, $4, 0x000F000F; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81C081C0; fma.rn.bf16x2 $0, a, $5, z;
and.b32 a, $4, 0x00F000F0; mul.lo.u32 a, a, 0x0104; and.b32 a, a, 0x81C081C0; fma.rn.bf16x2 $1, a, $5, z;
and.b32 a, b, 0x000F000F; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81C081C0; fma.rn.bf16x2 $2, a, $5, z;
and.b32 a, b, 0x00F000F0; mul.lo.u32 a, a, 0x0104; and.b32 a, a, 0x81C081C0; fma.rn.bf16x2 $3, a, $5, z;
}""")
# two bf16 pairs (k, k + 2) of a word of E4M3 codes, made whole by 2^120, times a pair of scales
E4M3_PAIRS_TIMES_SCALE = tl.constexpr("""{
.reg .b32 a, b, c, z;
mov.b32 z, 0x80008000;
mov.b32 c, 0x7B807B80;
shl.b32 a, $2, 4; and.b32 a, a, 0x07F007F0; shl.b32 b, $2, 8; lop3.b32 a, a, b, z, 0xF8;
fma.rn.bf16x2 a, a, c, z; fma.rn.bf16x2 $0, a, $3, z;
shr.u32 a, $2, 4; and.b32 a, a, 0x07F007F0; lop3.b32 a, a, $2, z, 0xF8;
fma.rn.bf16x2 a, a, c, z; fma.rn.bf16x2 $1, a, $3, z;
}""")


@triton.jit
def moved(w, LEFT: tl.constexpr, SIGN_LEFT: tl.constexpr, NUMBER: tl.constexpr):
    """The bits of two codes of a word (int32) at the places of a bf16 pair: NUMBER masks them after a shift."""
    bits = w.to(tl.uint32, bitcast=True)
    if LEFT >= 0:
        number = bits << LEFT
    else:
        number = bits >> (-LEFT)
    return (number & NUMBER) | ((bits << SIGN_LEFT) & 0x80008000)


@triton.jit
def low(pair):
    """The first of a pair of bf16 (uint32) as fp32."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def high(pair):
    """The second."""
    return (pair & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def laid_out(a0, b0, a1, b1, a2, b2, a3, b3):
    """[.., words] of the codes (i, i + 4) of each word to [.., words, 2, 2, 2], which in order are the codes 0 to 7."""
    even = tl.join(tl.join(a0, b0), tl.join(a2, b2))
    odd = tl.join(tl.join(a1, b1), tl.join(a3, b3))
    return tl.join(even, odd)


@triton.jit
def raw(w, BITS: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr):
    """Words [ROWS, LENGTH * BITS / 32] to codes [ROWS, LENGTH] in fp32, times 2^-126 or 2^-120."""
    if BITS == 4:
        p0, p1 = moved(w, 6, 12, 0x01C001C0), moved(w, 2, 8, 0x01C001C0)
        p2, p3 = moved(w, -2, 4, 0x01C001C0), moved(w, -6, 0, 0x01C001C0)
        out = laid_out(low(p0), high(p0), low(p1), high(p1), low(p2), high(p2), low(p3), high(p3))
    else:
        p0, p1 = moved(w, 4, 8, 0x07F007F0), moved(w, -4, 0, 0x07F007F0)
        out = tl.join(tl.join(low(p0), high(p0)), tl.join(low(p1), high(p1)))
    return tl.reshape(out, [ROWS, LENGTH])


@triton.jit
def scale_of(s, BITS: tl.constexpr):
    """Bytes of scales to fp32: E4M3, of which there are no negative ones, or UE8M0."""
    bits = s.to(tl.uint32)
    if BITS == 4:
        out = (bits << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    else:
        bits = tl.where(bits == 0, 0x00400000, tl.where(bits == 255, 0x7FC00000, bits << 23))
        out = bits.to(tl.float32, bitcast=True)
    return out


@triton.jit
def times_blocks(w, s, x, BITS: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr):
    """Words and scales of rows times a row x [LENGTH] in fp32: [ROWS, blocks] sums under one scale each.

    The codes are not made whole: results lack a factor 2^126 or 2^120, of which x may bring a part.
    """
    BLOCK: tl.constexpr = 16 if BITS == 4 else 32
    products = raw(w, BITS, ROWS, LENGTH) * x
    return tl.sum(tl.reshape(products, [ROWS, LENGTH // BLOCK, BLOCK]), 2) * scale_of(s, BITS)


@triton.jit
def half(pair, dtype: tl.constexpr, HIGH: tl.constexpr):
    """One of a pair of bf16 in an int32."""
    if HIGH:
        pair = pair >> 16
    return (pair & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def tile(w, s, dtype: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr):
    """Words [ROWS, LENGTH * BITS / 32] and scales [ROWS, LENGTH / block] to the weights [ROWS, LENGTH] in `dtype`.

    In bf16, NVFP4 comes times 2^-16: code times scale is exact there. `unit` gives what is to be made up for.
    """
    BLOCK: tl.constexpr = 16 if BITS == 4 else 32
    WORDS: tl.constexpr = BLOCK * BITS // 32  # of a block
    if dtype == tl.bfloat16:
        scale = scale_of(s, BITS)
        if BITS == 4:
            scale *= 1.298074214633707e33  # 2^110
        bits = scale.to(tl.uint32, bitcast=True)  # a bf16: its low half is empty
        both = ((bits >> 16) | bits).to(tl.int32, bitcast=True)
        both = tl.broadcast_to(both[:, :, None], [ROWS, LENGTH // BLOCK, WORDS])
        words = tl.reshape(w, [ROWS, LENGTH // BLOCK, WORDS])
        if BITS == 4:
            p0, p1, p2, p3 = tl.inline_asm_elementwise(
                PAIRS_TIMES_SCALE, "=r,=r,=r,=r,r,r", [words, both],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
            )  # fmt: skip
            out = laid_out(
                half(p0, dtype, False), half(p0, dtype, True), half(p1, dtype, False), half(p1, dtype, True),
                half(p2, dtype, False), half(p2, dtype, True), half(p3, dtype, False), half(p3, dtype, True),
            )  # fmt: skip
        else:
            p0, p1 = tl.inline_asm_elementwise(
                E4M3_PAIRS_TIMES_SCALE, "=r,=r,r,r", [words, both],
                dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
            )  # fmt: skip
            first = tl.join(half(p0, dtype, False), half(p0, dtype, True))
            out = tl.join(first, tl.join(half(p1, dtype, False), half(p1, dtype, True)))
        out = tl.reshape(out, [ROWS, LENGTH])
    else:
        whole = raw(w, BITS, ROWS, LENGTH) * (8.507059173023462e37 if BITS == 4 else 1.329227995784916e36)
        scale = scale_of(s, BITS)
        out = tl.reshape(whole, [ROWS, LENGTH // BLOCK, BLOCK]) * scale[:, :, None]
        out = tl.reshape(out, [ROWS, LENGTH]).to(dtype)
    return out


@triton.jit
def unit(dtype: tl.constexpr, BITS: tl.constexpr):
    """What products with a `tile` are to be multiplied by."""
    out: tl.constexpr = 65536.0 if dtype == tl.bfloat16 and BITS == 4 else 1.0
    return out
