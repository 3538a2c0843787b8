"""NVFP4 and MXFP8 against arithmetic written out in NumPy scalars, against other libraries' bytes, and at the edges."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load_file

from inkcap.ops.quantize import lookup, ref

f32 = np.float32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
PEERS = load_file(str(__file__).replace("test_quantize.py", "quantize_peers.st"))


def e4m3_table() -> np.ndarray:
    """The 127 non-negative finite E4M3 values, from the definition of the format."""
    return np.array([(1 + m / 8) * 2.0 ** (e - 7) if e else m * 2.0**-9 for e in range(16) for m in range(8)][:127])


E4M3 = e4m3_table()


def nearest(table: np.ndarray, value: float) -> int:
    """Index of the nearest entry; between two, the even index. Larger values saturate."""
    distance = np.abs(table - np.float64(value))
    best = np.flatnonzero(distance == distance.min())
    return int(best[best % 2 == 0][0]) if len(best) > 1 else int(best[0])


def e4m3_value(x: np.float32) -> np.float32:
    return f32(E4M3[nearest(E4M3, float(min(x, f32(448))))])


def e2m1_value(x: np.float32) -> np.float32:
    return f32(np.copysign(MAGNITUDES[nearest(np.array(MAGNITUDES), min(abs(float(x)), 6.0))], x))


def four_over_six_row(row: np.ndarray, limit: float) -> tuple[np.ndarray, np.float32]:
    """One row by the rule's own text: values E2M1 x E4M3 and the factor, every operation in fp32."""
    amax = f32(np.abs(row).max())
    if amax == 0:
        return np.zeros_like(row), f32(0)
    with np.errstate(all="ignore"):
        encode = min(f32(6 * limit) / amax, np.finfo(f32).max)
        decode = f32(1) / encode
        out = []
        for block in row.reshape(-1, 16):
            peak = f32(np.abs(block).max())
            if peak == 0:
                out.append(np.zeros(16, f32))
                continue
            tries = []
            for wanted in (peak / f32(6) * encode, f32(1.5) * (peak / f32(6) * encode)):
                scale = e4m3_value(wanted)
                step = min(f32(1) / (scale * decode), np.finfo(f32).max)
                codes = [e2m1_value(v * step) for v in block]
                error = f32(0)
                for code, v in zip(codes, block, strict=True):
                    error = error + abs(code * scale * amax / f32(6 * limit) - v)
                tries.append((error, np.array([code * scale for code in codes], f32)))
            out.append(tries[1][1] if tries[1][0] < tries[0][0] else tries[0][1])
    return np.concatenate(out), decode


def rows(columns: int):
    """Rows with zeros, subnormals, ties and a wide range of magnitudes."""
    special = st.sampled_from([0.0, -0.0, 0.25, 0.75, 1.25, 2.5, 3.5, 5.0, 6.0, 448.0, 1e-40, 2.0**-126, 3e30, -1.75])
    usual = st.floats(-100, 100, width=32)
    return arrays(f32, (2, columns), elements=st.one_of(usual, usual, special))


# ---- single numbers


def test_e2m1_rounds_to_nearest_even_and_saturates():
    grid = np.unique(np.concatenate([np.arange(0, 8, 1 / 64), [1e-30, 100.0, 3e38]])).astype(f32)
    near = np.concatenate([grid, np.nextafter(grid, f32(0)), np.nextafter(grid, f32(np.inf))])
    x = np.concatenate([near, -near])
    got = ref.e2m1_values(ref.e2m1(torch.from_numpy(x))).numpy()
    want = np.array([e2m1_value(v) for v in x])
    assert np.array_equal(got, want)
    assert np.array_equal(np.signbit(got), np.signbit(want))


def test_every_bfloat16_rounds_to_the_nearest_e4m3_and_saturates():
    x = torch.arange(0, 0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    want = [E4M3[nearest(E4M3, min(v, 448.0))] for v in x.tolist()]
    assert torch.equal(ref.e4m3(x).float(), torch.tensor(want, dtype=torch.float32))
    assert torch.equal(ref.e4m3(-x).float(), -torch.tensor(want, dtype=torch.float32))
    assert ref.e4m3(torch.tensor([float("nan")])).float().isnan().all()


def test_e8m0_is_exact_for_every_byte():
    got = ref.e8m0(torch.arange(256, dtype=torch.uint8))
    assert got[:255].tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert got[255].isnan()


# ---- decoding


def test_nvfp4_decodes_every_scale_and_code():
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    low, high = torch.arange(16, dtype=torch.uint8), torch.arange(16, dtype=torch.uint8).flip(0)
    codes = (low | (high << 4)).view(2, 8).repeat(127, 1, 1).reshape(127, 16)  # every code, in both nibbles
    factor = torch.tensor([0.1, 3e-5, 7.0])
    got = ref.nvfp4_decode(codes.repeat(3, 1, 1), scales[:, None].repeat(3, 1, 2), factor)
    values = [m if c < 8 else -m for c, m in enumerate(MAGNITUDES * 2)]
    columns = [v for c in range(16) for v in (values[c], values[15 - c])]
    exact = E4M3[:, None] * np.array(columns)
    want = [(exact.astype(f32) * f32(f)) for f in factor]
    assert np.array_equal(got.numpy(), np.stack(want))
    assert torch.equal(
        ref.nvfp4_decode(codes, scales[:, None].repeat(1, 2), torch.tensor(0.1), torch.bfloat16), got[0].bfloat16()
    )


def test_mxfp8_decodes_every_scale_and_code():
    bytes_ = torch.arange(256, dtype=torch.uint8)
    codes = bytes_.view(torch.float8_e4m3fn).repeat(254, 1)
    got = ref.mxfp8_decode(codes, bytes_[:254, None].repeat(1, 8))
    magnitudes = np.concatenate([E4M3, [np.nan]])
    with np.errstate(over="ignore"):
        want = (np.ldexp(np.concatenate([magnitudes, -magnitudes]), np.arange(254)[:, None] - 127)).astype(f32)
    assert np.array_equal(got.numpy(), want, equal_nan=True)
    assert ref.mxfp8_decode(codes[:1], torch.full((1, 8), 255, dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("experts", "rows_", "columns"), [(3, 37, 4256), (2, 2048, 64), (1, 5, 48), (5, 1, 16), (0, 4, 64)]
)
def test_lookup_gives_the_bits_of_the_reference(dtype, experts, rows_, columns):
    draw = torch.Generator().manual_seed(columns)
    codes = torch.randint(0, 256, (experts, rows_, columns // 2), dtype=torch.uint8, generator=draw)
    scales = torch.randint(0, 256, (experts, rows_, columns // 16), dtype=torch.uint8, generator=draw)
    factor = torch.rand(experts, generator=draw)
    args = (codes, scales.view(torch.float8_e4m3fn), factor, dtype)
    whole = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    got, want = lookup.nvfp4_decode(*args), ref.nvfp4_decode(*args)
    assert torch.equal(got.nan_to_num(9e9).view(whole), want.nan_to_num(9e9).view(whole))
    eight = torch.randint(0, 256, (experts, rows_ * 8, columns * 2), dtype=torch.uint8, generator=draw)
    exponents = torch.randint(0, 256, (experts, rows_ * 8, columns // 16), dtype=torch.uint8, generator=draw)
    args = (eight.view(torch.float8_e4m3fn), exponents, dtype)
    got, want = lookup.mxfp8_decode(*args), ref.mxfp8_decode(*args)
    assert torch.equal(got.nan_to_num(9e9).view(whole), want.nan_to_num(9e9).view(whole))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows_", [1, 300])  # the reference; tables
def test_codes_may_stand_at_the_end_of_what_they_become(dtype, rows_):
    draw = torch.Generator().manual_seed(rows_)

    def at_end(codes, columns):
        out = torch.empty(len(codes), rows_, columns, dtype=dtype)
        room = out.flatten(1).view(torch.uint8)[:, -codes[0].numel() :].view(codes.shape)
        return room.copy_(codes), out

    codes = torch.randint(0, 256, (2, rows_, 512), dtype=torch.uint8, generator=draw)
    scales = torch.randint(0, 127, (2, rows_, 64), dtype=torch.uint8, generator=draw).view(torch.float8_e4m3fn)
    factor = torch.rand(2, generator=draw)
    want = ref.nvfp4_decode(codes, scales, factor, dtype)
    room, out = at_end(codes, 1024)
    assert lookup.nvfp4_decode(room, scales, factor, dtype, out) is out
    assert torch.equal(out, want)
    eight = torch.randint(0, 127, (2, rows_, 512), dtype=torch.uint8, generator=draw)
    exponents = torch.randint(100, 140, (2, rows_, 16), dtype=torch.uint8, generator=draw)
    want = ref.mxfp8_decode(eight.view(torch.float8_e4m3fn), exponents, dtype)
    room, out = at_end(eight, 512)
    assert lookup.mxfp8_decode(room.view(torch.float8_e4m3fn), exponents, dtype, out) is out
    assert torch.equal(out, want)


def test_lookup_takes_one_factor_for_a_matrix_and_strided_input():
    codes = torch.arange(256, dtype=torch.uint8).repeat(700, 2)[:, ::2]
    scales = torch.arange(700 * 32).remainder(126).to(torch.uint8).view(700, 32).view(torch.float8_e4m3fn)
    factor = torch.tensor(0.3)
    assert torch.equal(lookup.nvfp4_decode(codes, scales, factor), ref.nvfp4_decode(codes, scales, factor))


# ---- encoding


@settings(max_examples=60, deadline=None)
@given(rows(48), st.floats(2.0**-20, 2.0**10, width=32))
def test_nvfp4_takes_the_nearest_scale_and_codes(x, factor):
    codes, scales = ref.nvfp4_encode(torch.from_numpy(x), torch.tensor(factor))
    for row, packed, row_scales in zip(x, codes, scales, strict=True):
        values = ref.e2m1_values(torch.stack((packed & 15, packed >> 4), -1).flatten()).numpy().reshape(-1, 16)
        for block, got, scale in zip(row.reshape(-1, 16), values, row_scales.float().numpy(), strict=True):
            assert scale == e4m3_value(f32(np.abs(block).max()) / (f32(6) * f32(factor)))
            with np.errstate(over="ignore"):
                want = [e2m1_value(v / (scale * f32(factor))) if scale else f32(0) for v in block]
            assert np.array_equal(got, want)


def test_floor_keeps_small_blocks_and_leaves_zeros_alone():
    x = torch.zeros(1, 48)
    x[0, 0], x[0, 16] = 448 * 6, 3e-3  # the second block's scale, 5e-4, is under half of E4M3's smallest
    _, plain = ref.nvfp4_encode(x, torch.tensor(1.0))
    codes, floored = ref.nvfp4_encode(x, torch.tensor(1.0), floor=ref.E4M3_TINY)
    assert plain.tolist() == [[448, 0, 0]]
    assert floored.tolist() == [[448, ref.E4M3_TINY, 0]]
    assert ref.nvfp4_decode(codes, floored, torch.tensor(1.0))[0, 16] == 1.5 * ref.E4M3_TINY


@settings(max_examples=60, deadline=None)
@given(rows(48), st.sampled_from([256.0, 448.0]))
def test_four_over_six_follows_its_rule_to_the_bit(x, limit):
    tensor = torch.from_numpy(x)
    codes, scales, factor = ref.nvfp4_encode_four_over_six(tensor, tensor.abs().amax(-1), limit)
    got = ref.nvfp4_decode(codes, scales, torch.ones(2))
    for row, values, row_factor in zip(x, got.numpy(), factor.numpy(), strict=True):
        want, want_factor = four_over_six_row(row, limit)
        assert row_factor == want_factor
        assert np.array_equal(values, want)


def test_four_over_six_example():
    row = torch.tensor([[10.0, 20.0, 30.0, 40.0] * 4])
    codes, scales, factor = ref.nvfp4_encode_four_over_six(row, row.amax(-1), 256.0)
    assert scales.tolist() == [[384.0]]
    assert torch.allclose(ref.nvfp4_decode(codes, scales, factor), row, rtol=1e-6)
    _, scales, _ = ref.nvfp4_encode_four_over_six(row, row.amax(-1), 448.0)
    assert scales.tolist() == [[448.0]]  # 672 saturates: both candidates are one


def test_four_over_six_keeps_six_when_errors_are_equal():
    x = torch.zeros(1, 32)
    x[0, 0] = 6.0  # a lone maximum is exact under both scales: 6 x 256 and 4 x 384
    x[0, 16:] = 3.0
    _, scales, _ = ref.nvfp4_encode_four_over_six(x, x.amax(-1), 256.0)
    assert scales.tolist() == [[256.0, 128.0]]


def test_zero_rows_give_zeros_without_nan():
    x = torch.zeros(2, 32)
    x[1, 3] = -2.0
    codes, scales, factor = ref.nvfp4_encode_four_over_six(x, x.abs().amax(-1), 256.0)
    assert factor[0] == 0
    assert torch.equal(ref.nvfp4_decode(codes, scales, factor)[0], torch.zeros(32))
    assert scales.float()[1].tolist() == [256.0, 0.0]
    codes, scales = ref.mxfp8_encode(x)
    assert scales.tolist() == [[0], [120]]
    assert torch.equal(ref.mxfp8_decode(codes, scales), x)


def test_values_that_are_not_finite_stay_visible():
    x = torch.ones(2, 32)
    x[0, 0] = float("nan")
    codes, scales, factor = ref.nvfp4_encode_four_over_six(x, x.abs().amax(-1), 256.0)
    decoded = ref.nvfp4_decode(codes, scales, factor)
    assert decoded[0].isnan().all()
    assert decoded[1].isfinite().all()
    x[0, 0] = float("inf")
    codes, scales = ref.mxfp8_encode(x)
    assert scales.tolist() == [[255], [119]]
    assert ref.mxfp8_decode(codes, scales)[0].isnan().all()


@settings(max_examples=60, deadline=None)
@given(arrays(f32, (1, 64), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_mxfp8_scale_is_the_smallest_that_does_not_saturate(x):
    codes, scales = ref.mxfp8_encode(torch.from_numpy(x))
    for block, got, byte in zip(x.reshape(2, 32), codes.float().view(2, 32).numpy(), scales[0].tolist(), strict=True):
        peak = np.abs(block).max().astype(np.float64)
        assert peak <= 448 * 2.0 ** (byte - 127)
        assert byte == 0 or peak > 448 * 2.0 ** (byte - 128)
        want = [np.copysign(E4M3[nearest(E4M3, abs(v))], v) for v in np.ldexp(block.astype(np.float64), 127 - byte)]
        assert np.array_equal(got, want)


def test_mxfp8_scale_at_the_edge_of_the_range():
    x = torch.zeros(3, 32)
    x[0, 5], x[1, 5], x[2, 5] = 448.0, 448.00006, 2.0**-149
    _, scales = ref.mxfp8_encode(x)
    assert scales.tolist() == [[127], [128], [0]]


@pytest.mark.parametrize("columns", [0, 8, 17, 33])
def test_columns_must_fill_blocks(columns):
    x = torch.zeros(3, columns)
    with pytest.raises(ValueError, match="do not divide"):
        ref.nvfp4_encode(x, torch.tensor(1.0))
    with pytest.raises(ValueError, match="do not divide"):
        ref.nvfp4_encode_four_over_six(x, torch.ones(3), 256.0)
    with pytest.raises(ValueError, match="do not divide"):
        ref.mxfp8_encode(x)


# ---- what other libraries write (tests/ops/quantize_peers.st; its metadata says how it was made)


def test_reads_and_writes_what_modelopt_writes():
    x, codes, scales = (PEERS[name] for name in ("x", "modelopt.nvfp4.codes", "modelopt.nvfp4.scales"))
    factor = PEERS["modelopt.nvfp4.scale2"]
    torch.testing.assert_close(
        ref.nvfp4_decode(codes, scales, factor), PEERS["modelopt.nvfp4.values"], rtol=2e-7, atol=0
    )
    ours, our_scales = ref.nvfp4_encode(x, x.abs().max().float() / 2688, floor=ref.E4M3_TINY)
    empty = our_scales.float() == 0  # a block of zeros has scale 1 there
    assert torch.equal(torch.where(empty, 1.0, our_scales.float()), scales.float())
    assert torch.equal(ours, codes)


def test_reads_and_writes_what_modelopt_writes_in_mxfp8():
    codes, scales = PEERS["modelopt.mxfp8.codes"], PEERS["modelopt.mxfp8.scales"]
    assert torch.equal(ref.mxfp8_decode(codes, scales), PEERS["modelopt.mxfp8.values"])
    ours, our_scales = ref.mxfp8_encode(PEERS["x"])
    assert torch.equal(our_scales, scales)
    assert torch.equal(ours.float(), codes.float())


def test_reads_what_compressed_tensors_writes():
    factor = 1 / PEERS["compressed_tensors.global_scale"][0]  # a divisor there
    got = ref.nvfp4_decode(PEERS["compressed_tensors.codes"], PEERS["compressed_tensors.scales"], factor)
    torch.testing.assert_close(got.bfloat16().float(), PEERS["compressed_tensors.values"], rtol=2**-7, atol=0)


def test_four_over_six_agrees_with_its_authors():
    x = PEERS["x"][1].float()
    codes, scales, _ = ref.nvfp4_encode_four_over_six(x, PEERS["fouroversix.amax"], 256.0)
    assert torch.equal(scales.float(), PEERS["fouroversix.scales"].float())
    ones = torch.tensor(1.0)
    assert torch.equal(
        ref.nvfp4_decode(codes, scales, ones), ref.nvfp4_decode(PEERS["fouroversix.codes"], scales, ones)
    )
