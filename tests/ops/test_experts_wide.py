"""The kernel for many tokens compiles for a Hopper, which takes no device; its results are compared on one."""

import pytest
import torch

from inkcap.ops.experts.ring import column_of
from inkcap.ops.experts.wide import fits

PROGRAM = """
import sys
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from inkcap.ops.experts import wide
from inkcap.ops.experts.group import Tiles
from inkcap.ops.quantize.coded import Coded
from inkcap.ops.values import Caps

kernel = wide.wide_kernel
driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
    get_current_stream=lambda device: 0, map_python_to_cpp_type=lambda of: of,
))
wide.processors = lambda device: 132


def warm(grid):
    def call(*args, **options):
        known = [a.dtype if isinstance(a, torch.Tensor) else a for a in args]
        print(kernel.warmup(*known, grid=grid, **options).asm["ptx"])
    return call


wide.wide_kernel = type("Compiled", (), {"__getitem__": lambda self, grid: warm(grid)})()
make = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype)
wide.tiles = lambda route, experts, width: Tiles(*(make(1, dtype=torch.int32),) * 5, width=width)
kind, rows, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if kind == "nvfp4":
    scales = make(2, rows, length // 16, dtype=torch.float8_e4m3fn)
    w = Coded(make(2, rows, length // 2, dtype=torch.uint8), scales, make(2, dtype=torch.float32), torch.bfloat16)
elif kind == "mxfp8":
    scales = make(2, rows, length // 32, dtype=torch.uint8)
    w = Coded(make(2, rows, length, dtype=torch.float8_e4m3fn), scales, None, torch.bfloat16)
else:
    w = make(2, rows, length)
x = make(8, length)
assert wide.fits(x, w)
paired = kind != "mxfp8"
wide.wide(x, w, None, 2, make(16, rows), paired=paired, caps=Caps(3.0, 2.0) if kind == "nvfp4" else None)
"""


@pytest.mark.parametrize(
    ("weights", "rows", "length"),
    [("nvfp4", 256, 512), ("mxfp8", 256, 128), ("plain", 384, 512)],
    ids=["nvfp4", "mxfp8", "two tiles of columns"],
)
def test_it_compiles_for_a_hopper(hopper, weights, rows, length):
    """Both kinds of codes and dense weights; products are the tensor cores' asynchronous ones."""
    done = hopper.run(PROGRAM, weights, rows, length, TRITON_DEFAULT_FP_FUSION="1")
    assert done.returncode == 0, done.stderr
    assert "wgmma.mma_async.sync.aligned.m64n128" in done.stdout
    assert ("wgmma.mma_async.sync.aligned.m64n64" in done.stdout) == (rows == 384)
    assert "setmaxnreg" in done.stdout
    assert "st.global.v4" in done.stdout  # eight results in a row
    assert ("cp.async.bulk.tensor.5d" in done.stdout) == (weights == "plain")
    assert ("fma.rn.bf16x2" in done.stdout) == (weights != "plain")


@pytest.mark.parametrize("paired", [False, True])
def test_a_thread_has_eight_results_in_a_row(paired):
    """Of a fragment's columns, lane l of four has 8 i + 2 l and the next one; of pairs, one result each."""
    column = column_of.fn
    assert sorted(column(n, paired) for n in range(128)) == list(range(128))
    groups = 8 if paired else 4
    for first in range(0, 128, 8 * groups):
        for lane in range(4):
            own = [column(first + 8 * i + 2 * lane + r, paired) for i in range(groups) for r in range(2)]
            assert own == list(range(first + lane * len(own), first + (lane + 1) * len(own)))


def test_no_other_device_takes_it():
    assert not fits(torch.empty(8, 128).bfloat16(), torch.empty(2, 256, 128).bfloat16())
