"""The kernel for tiles of uses of experts in codes compiles, which takes no device; its results are compared on one."""

import pytest
import torch

from inkcap.ops.experts.lanes import fixed_cut, layouts, step_of, suits, width_of
from inkcap.ops.quantize.coded import Coded

PROGRAM = """
import sys
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from inkcap.ops import pdl
from inkcap.ops.experts import lanes
from inkcap.ops.experts.group import Tiles
from inkcap.ops.quantize.coded import Coded
from inkcap.ops.values import Caps, Routed

driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
    get_current_stream=lambda device: 0, map_python_to_cpp_type=lambda of: of,
))
pdl.supported = lanes.able = lambda device: True
kernel = lanes.lanes_kernel


def warm(grid):
    def call(*args, **options):
        known = [a.dtype if isinstance(a, torch.Tensor) else a for a in args]
        print(kernel.warmup(*known, grid=grid, **options).asm["ptx"])
    return call


lanes.lanes_kernel = type("Compiled", (), {"__getitem__": lambda self, grid: warm(grid)})()
make = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype)
bits, channels, units, tokens = int(sys.argv[1]), 1536, 128, 12


def coded(rows, columns):
    return Coded(
        make(8, rows, columns * bits // 8, dtype=torch.uint8),
        make(8, rows, columns // (16 if bits == 4 else 32), dtype=torch.uint8),
        make(8, dtype=torch.float32) if bits == 4 else None, torch.bfloat16,
    )


route = Routed(make(tokens, 3, dtype=torch.int64), make(tokens, 3, dtype=torch.float32), make(tokens, 0))
uses = Tiles(*(make(8, dtype=torch.int32) for _ in range(5)), width=8)
x, act, w13, w2 = make(tokens, channels), make(tokens, 3, units), coded(2 * units, channels), coded(channels, units)
assert lanes.suits(x, w13, tokens, 3 * tokens, paired=True) and lanes.suits(act, w2, tokens, 3 * tokens, paired=False)
lanes.grouped_lanes(x, w13, route, 3, act, paired=True, caps=Caps(3.0, 2.0))
lanes.grouped_lanes(act, w2, uses, 1, make(tokens * 3, channels), paired=False, early=True)
cut = lanes.fixed_cut(w13, tokens, 16, paired=True)
assert cut.sums == 2
lanes.grouped_lanes(x, w13, route, 3, act, paired=True, caps=Caps(3.0, 2.0), cut=cut)
"""


@pytest.mark.parametrize("bits", [4, 8])
def test_it_compiles_for_a_hopper(hopper, bits):
    """Products come from the tensor cores, and codes do not go through shared memory."""
    done = hopper.run(PROGRAM, bits, TRITON_DEFAULT_FP_FUSION="1")
    assert done.returncode == 0, done.stderr
    all_three = [part for part in done.stdout.split(".version") if "mma.sync" in part]
    assert len(all_three) == 3
    for part in all_three:
        before, _, behind = part.rpartition("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")
        loop = before[before.index("mma.sync") :]
        assert "fma.rn.bf16x2" in before
        assert "shared" not in loop
        assert "st.shared" in behind, "sums are put in order"
        assert "ldmatrix" not in part


@pytest.mark.parametrize(
    ("slices", "groups", "tiles", "words", "per", "uses"),
    [(1, 4, 1, 16, 8, 8), (2, 2, 2, 16, 4, 16), (4, 1, 2, 8, 8, 8)],
)
def test_lanes_have_rows_and_the_columns_of_x_that_belong_to_them(slices, groups, tiles, words, per, uses):
    held, x, _, _ = layouts(slices, groups, tiles, words, per, uses)
    whole = (slices, 16 * groups * tiles, words), (slices, uses, words * per)
    for layout, sizes in zip((held, x), whole, strict=True):
        places = {(0, 0, 0)}
        for base in (*layout.reg_bases, *layout.lane_bases, *layout.warp_bases):
            places |= {tuple(a ^ b for a, b in zip(place, base, strict=True)) for place in places}
        assert places == {(a, b, c) for a in range(sizes[0]) for b in range(sizes[1]) for c in range(sizes[2])}
    assert [[a, b, per * c] for a, b, c in held.lane_bases] == x.lane_bases
    assert [[base[0], 0, 0] for base in held.warp_bases] == x.warp_bases


def test_no_other_device_takes_them():
    codes, scales = torch.empty(2, 64, 64, dtype=torch.uint8), torch.empty(2, 64, 8, dtype=torch.uint8)
    assert not suits(
        torch.empty(1, 128).bfloat16(), Coded(codes, scales, torch.ones(2), torch.bfloat16), 1, 2, paired=False
    )


def test_rows_are_cut_into_whole_steps():
    assert [step_of(words) for words in (144, 72, 48, 7)] == [16, 8, 16, 0]


@pytest.mark.parametrize(("bits", "columns", "sums"), [(4, 2304, 2), (8, 4608, 2), (4, 128, 1), (8, 128, 1)])
def test_rows_of_four_pieces_are_summed_as_one_tokens_are(bits, columns, sums):
    codes = torch.empty(2, 64, columns * bits // 8, dtype=torch.uint8)
    w = Coded(codes, codes, torch.ones(2) if bits == 4 else None, torch.bfloat16)
    for tokens, width in ((1, 8), (8, 8), (64, 8), (300, 16)):
        up, down = (fixed_cut(w, tokens, width, paired=paired) for paired in (True, False))
        assert ((up.slices, up.sums), (down.slices, down.sums)) == ((2, sums), (1, 1))


def test_tiles_hold_what_experts_have():
    assert [width_of(tokens, 6 * tokens, 256) for tokens in (2, 8, 9, 16, 17, 213, 214)] == [8, 8, 16, 16, 8, 8, 16]
