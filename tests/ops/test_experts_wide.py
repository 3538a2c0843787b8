"""The kernel for many tokens compiles for a Hopper, which takes no device; its results are compared on one."""

import os
import subprocess
import sys

import pytest
import torch

from inkcap.ops.experts.wide import fits, written

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
rows, length = 256, 128
if sys.argv[1] == "coded":
    w = Coded(
        make(2, rows, length // 2, dtype=torch.uint8), make(2, rows, length // 16, dtype=torch.float8_e4m3fn),
        make(2, dtype=torch.float32), torch.bfloat16,
    )
else:
    w = make(2, rows, length)
x = make(8, length)
assert wide.fits(x, w)
coded = sys.argv[1] == "coded"
wide.wide(x, w, None, 2, make(16, rows), paired=coded, caps=Caps(3.0, 2.0) if coded else None)
"""


@pytest.mark.parametrize("weights", ["coded", "plain"])
def test_it_compiles_for_a_hopper(weights):
    """Both kinds of weights; products come from the tensor cores' asynchronous instruction, in warps of three kinds."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, weights],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "wgmma.mma_async.sync.aligned.m64n" in done.stdout
    assert "setmaxnreg" in done.stdout
    assert ("cp.async.bulk.tensor" in done.stdout) == (weights == "plain")
    assert ("fma.rn.bf16x2" in done.stdout) == (weights == "coded")


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (64, 256), (128, 128)])
def test_every_element_is_written_once(rows, columns):
    held = written(rows, columns)
    places = {(0, 0)}
    for row, column in (*held.reg_bases, *held.lane_bases, *held.warp_bases):
        places |= {(a ^ row, b ^ column) for a, b in places}
    assert places == {(a, b) for a in range(rows) for b in range(columns)}


def test_no_other_device_takes_it():
    assert not fits(torch.empty(8, 128).bfloat16(), torch.empty(2, 256, 128).bfloat16())
