"""Kernels are compiled ahead of their launches, for a GPU that is not there; on one, a start shows the rest."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from triton.runtime import build

from inkcap.ops.ahead import compiled_ahead, one_module_at_a_time

PROGRAM = """
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from inkcap.ops.ahead import compiled_ahead

utils = SimpleNamespace(
    get_device_properties=lambda device: {"max_shared_mem": 200_000},
    load_binary=lambda *args: print(f"loaded {args[0]}\\n", end="") or (1, 1, 32, 0, 1024),  # whole, from any thread
)
driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0, utils=utils,
    get_current_stream=lambda device: 0, map_python_to_cpp_type=lambda of: of,
    launcher_cls=lambda source, metadata: lambda *args: print("launched", args[0]),
))


@triton.jit
def add(x, n, B: tl.constexpr):
    at = tl.arange(0, B)
    tl.store(x + at, tl.load(x + at) + n)


@triton.jit
def double(x, n, B: tl.constexpr):
    tl.store(x, tl.load(x) * n)


with compiled_ahead(torch.device("cpu")):
    for kernel in (add, double):
        for block in (16, 32, 16):
            kernel[(7,)](torch.zeros(32), 3, block)
    print("all called")
compile_, add.compile = add.compile, None  # what is compiled already needs it no more
add[(5,)](torch.zeros(32), 3, 32)
add.compile = compile_
add[(6,)](torch.zeros(32), 3, 64)
"""


def test_calls_compile_and_do_not_launch(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    program = tmp_path / "program.py"  # Triton reads the source of kernels from their file
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    *ahead, again, later, last = done.stdout.splitlines()
    assert sorted(ahead) == ["all called"] + ["loaded add"] * 2 + ["loaded double"] * 2
    assert (again, later, last) == ("launched 5", "loaded add", "launched 6")


class Kernel:
    """What is used of Triton's own class."""

    device_caches = ({}, {}, "target", None, None), None

    def run(self, *args, grid, warmup):
        cache = self.device_caches[0][0]
        return cache.get(args) or self._do_compile(args, None, 0, None, type("Options", (), {}), None, warmup)

    def _do_compile(self, *args):
        raise AssertionError("compiled while called")

    ASTSource = staticmethod(lambda kernel, signature, constants, attributes: None)

    def compile(self, source, target, options) -> object:
        meet.wait(20)
        raise ValueError("no such instruction")


meet = threading.Barrier(2)


def test_two_compile_at_a_time_and_failures_are_raised(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    own, run = Kernel(), Kernel.run

    def call_twice():
        with compiled_ahead(torch.device("cpu"), Kernel):
            own.run(1, grid=(1,), warmup=False)
            own.run(2, grid=(1,), warmup=False)

    with pytest.raises(ValueError, match="no such instruction"):
        call_twice()
    assert Kernel.run is run
    assert not Kernel.device_caches[0][0]


def test_launches_of_kernels_that_are_not_ready_are_noted():
    go, launched = threading.Event(), []

    class Slow(Kernel):
        device_caches = ({}, {}, "target", None, None), None

        def run(self, *args, grid, warmup):
            super().run(*args, grid=grid, warmup=warmup).run(*args)

        def compile(self, source, target, options):
            assert go.wait(20)
            return SimpleNamespace(run=lambda *args: launched.append(args))

    own = Slow()
    with compiled_ahead(torch.device("cpu"), Slow, launch=True) as missed:
        own.run(1, grid=(1,), warmup=False)
        own.run(1, grid=(1,), warmup=False)
        assert len(missed) == 2
        go.set()
    assert not launched
    own.run(1, grid=(1,), warmup=False)
    assert launched == [(1,)]
    assert len(missed) == 2


def test_modules_of_one_name_are_loaded_one_after_another(monkeypatch):
    shared, both = SimpleNamespace(), threading.Barrier(2)

    def load(name, path):  # as CPython does it with a file that it knows
        shared.launch = path
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # for another thread, should there be one
        return shared

    monkeypatch.setattr(build, "_load_module_from_path", load)
    with one_module_at_a_time(), ThreadPoolExecutor(2) as pool:
        made = [pool.submit(build._load_module_from_path, "launcher", path) for path in "ab"]
    assert [each.result().launch for each in made] == ["a", "b"]
    assert build._load_module_from_path is load


def test_what_no_kernel_has_written_is_zero():
    used = torch.full((100_000,), 7)
    del used  # memory that is not 0
    with compiled_ahead(torch.device("cpu"), Kernel):
        made = torch.empty(100_000, dtype=torch.int64)
        more = torch.empty_like(made), made.new_empty(100_000)
    assert not any(each.any() for each in (made, *more))
