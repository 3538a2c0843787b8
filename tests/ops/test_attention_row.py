"""The kernel for one token compiles for a Hopper, which takes no device; its results are compared on one."""

import pytest

from inkcap.ops.attention import row

PROGRAM = """
import sys
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from inkcap.ops import pdl
from inkcap.ops.attention import row
from inkcap.ops.values import GroupView, LogScaling, Packing, Scores

kernel = row.row_kernel
driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
    get_current_stream=lambda device: 0, map_python_to_cpp_type=lambda of: of,
))
pdl.supported = lambda device: True


def warm(grid):
    def call(*args, **options):
        known = [a.dtype if isinstance(a, torch.Tensor) else a for a in args]
        print(kernel.warmup(*known, grid=grid, **options).asm["ptx"])
    return call


row.row_kernel = type("Compiled", (), {"__getitem__": lambda self, grid: warm(grid)})()
make = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype)
heads, kv, window, seam = (int(word) for word in sys.argv[1:])
ints = make(2, dtype=torch.int32)
packing = Packing(ints, ints[:1], ints[:1], ints[:1], make(1, dtype=torch.int64), ((0, 1, 0, 1023),))
scores = Scores(0.1, window or None, make(16, window or 1024), None if window else LogScaling(8, 0.1))
planes = make(2, 64, kv, 128), make(2, 64, kv, 128)
view = GroupView(64, make(1, 32, dtype=torch.int32), make(1, dtype=torch.int64), planes)
q, k, v, r = (make(1, *shape) for shape in ((heads, 128), (kv, 128), (kv, 128), (heads, 16)))
assert row.suits(q, k, r, scores, packing, False)
sinks, gate = (make(1, heads, dtype=torch.float32), make(1, heads * 128)) if seam else (None, None)
row.attend(q, k, v, r, make(1, heads, 128), scores, view, packing, sinks, gate)
"""


@pytest.mark.parametrize(("heads", "kv", "window", "seam"), [(12, 2, 1024, 0), (8, 1, 512, 1), (24, 8, 0, 1)])
def test_compiles(hopper, heads, kv, window, seam):
    done = hopper.run(PROGRAM, heads, kv, window, seam)
    assert done.returncode == 0, done.stderr
    assert "mma.sync" in done.stdout
    first, second = done.stdout.split("griddepcontrol.wait")[1:]
    assert first.count("bar.sync") == 0
    assert second.count("bar.sync") == 2
    assert "st.global.v4" in second


@pytest.mark.parametrize(
    ("reach", "window", "tile"),
    [(1, 512, (8, 4)), (4096, 512, (8, 4)), (4096, 1024, (16, 4)), (2049, None, (16, 8)), (2050, None, (0, 0))],
)
def test_tiles(reach, window, tile):
    assert row.tile(reach, window) == tile
