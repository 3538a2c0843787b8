"""The kernels for one token's experts in codes compile, which takes no device; their results are compared on one."""

import pytest
import torch

from inkcap.ops.experts.fragments import (
    first_of,
    groups,
    layouts,
    pieces_of,
    rows_of,
    share_of,
    step_of,
    suits,
)
from inkcap.ops.quantize.coded import Coded

PROGRAM = """
import sys
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from inkcap.ops import pdl
from inkcap.ops.experts import fragments
from inkcap.ops.quantize.coded import Coded
from inkcap.ops.values import Caps, Routed

driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
    get_current_stream=lambda device: 0, map_python_to_cpp_type=lambda of: of,
))
pdl.supported = lambda device: True


def compiled(kernel):
    def warm(grid):
        def call(*args, **options):
            known = [a.dtype if isinstance(a, torch.Tensor) else a for a in args]
            print(kernel.warmup(*known, grid=grid, **options).asm["ptx"])
        return call
    return type("Compiled", (), {"__getitem__": lambda self, grid: warm(grid)})()


fragments.up_fragments, fragments.down_fragments = map(compiled, (fragments.up_fragments, fragments.down_fragments))
make = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype)
bits, channels, units = int(sys.argv[1]), 256, 64


def coded(rows, columns):
    return Coded(
        make(2, rows, columns * bits // 8, dtype=torch.uint8),
        make(2, rows, columns // (16 if bits == 4 else 32), dtype=torch.uint8),
        make(2, dtype=torch.float32) if bits == 4 else None, torch.bfloat16,
    )


route = Routed(make(1, 3, dtype=torch.int64), make(1, 3, dtype=torch.float32), make(1, 0))
act = make(1, 3, units)
fragments.up(make(1, channels), coded(2 * units, channels), route, Caps(3.0, 2.0), act)
where = [make(4, channels, dtype=torch.float32), make(2, 4, channels)]
where += [make(1, 4, dtype=torch.int32), make(1, dtype=torch.int64), make(1, dtype=torch.int32)]
where += [make(1, dtype=torch.int64)]
base = make(1, channels, dtype=torch.float32)
fragments.down(
    act, coded(channels, units), route, base, tuple(where), (1024, 256, 4, 1, 256), (4, 4), 0.5, make(1, channels),
    convolved=True, fixed=bits == 8,
)
"""


@pytest.mark.parametrize("bits", [4, 8])
def test_they_compile_for_a_hopper(hopper, bits):
    """Products come from the tensor cores, and weights do not go through shared memory."""
    done = hopper.run(PROGRAM, bits, TRITON_DEFAULT_FP_FUSION="1")
    assert done.returncode == 0, done.stderr
    both = [part for part in done.stdout.split(".version") if "mma.sync" in part]
    assert len(both) == 2
    for part in both:
        assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in part
        assert "fma.rn.bf16x2" in part
        assert "griddepcontrol.wait" in part
        assert "ldmatrix" not in part


@pytest.mark.parametrize(("warps", "words", "per"), [(1, 8, 8), (2, 16, 8), (4, 16, 4)])
def test_lanes_have_rows_and_the_columns_of_x_that_belong_to_them(warps, words, per):
    held, x, _ = layouts(warps, words, per)
    for layout, rows, columns in ((held, 16 * warps, words), (x, 8, words * per)):
        places = {(0, 0)}
        for row, column in (*layout.reg_bases, *layout.lane_bases, *layout.warp_bases):
            places |= {(a ^ row, b ^ column) for a, b in places}
        assert places == {(a, b) for a in range(rows) for b in range(columns)}
    assert [(row, per * column) for row, column in held.lane_bases] == [tuple(base) for base in x.lane_bases]


def test_rows_are_cut_into_whole_steps():
    assert [pieces_of(words, 8) for words in (288, 576, 16, 8, 7)] == [4, 4, 2, 1, 0]
    assert [step_of(words) for words in (144, 72, 288, 7)] == [16, 8, 16, 0]
    cases = ((576, 4), (576, 8), (1152, 8), (704, 8), (16, 4))
    assert [share_of(*case) for case in cases] == [1, 1, 2, 1, 1]
    assert [rows_of(*case) for case in cases] == [16, 16, 8, 16, 32]


def test_steps_are_staged_in_powers_of_two():
    for steps, first in ((1, [0, 1]), (9, [0, 8, 9]), (18, [0, 16, 18]), (7, [0, 4, 6, 7])):
        assert [first_of(steps, group) for group in range(groups(steps) + 1)] == first


def test_no_other_device_takes_them():
    codes, scales = torch.empty(2, 32, 64, dtype=torch.uint8), torch.empty(2, 32, 8, dtype=torch.uint8)
    assert not suits(torch.empty(1, 128).bfloat16(), Coded(codes, scales, torch.ones(2), torch.bfloat16), 2)
