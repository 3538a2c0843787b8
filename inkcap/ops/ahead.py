"""Kernels compiled before they are launched, many at once; Triton compiles one after another, each when it is launched.

    with compiled_ahead(device):
        step()  # launches nothing: indices that kernels would have written are 0

Compiled kernels are kept in Triton's cache directory, so that this takes long once only, on a machine's first start.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

if find_spec("triton") is not None:
    from triton.runtime import build
    from triton.runtime.cache import triton_key
    from triton.runtime.jit import JITFunction
else:
    build = triton_key = JITFunction = None
MADE_BY = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))


def know_compiler() -> None:
    """Have Triton read itself, by which it knows what it compiled before: once a process, or each thread would."""
    if triton_key is not None:
        triton_key()


def zeroed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`make`, whose integers are 0: whatever reads what no kernel has written finds an index that exists."""

    def made(*args: Any, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        return tensor if tensor.is_floating_point() else tensor.zero_()

    return made


@contextmanager
def one_module_at_a_time(triton: Any = build) -> Iterator[None]:
    """Inside, several threads may load what launches kernels. These modules all have one name, and to whoever loads a
    file again CPython gives the module of that name, whichever was loaded last, changed to be this one."""
    plain, lock = triton._load_module_from_path, Lock()

    def load(name: str, path: str) -> SimpleNamespace:
        with lock:
            return SimpleNamespace(**vars(plain(name, path)))

    triton._load_module_from_path = load
    try:
        yield
    finally:
        triton._load_module_from_path = plain


class Absent:
    """Stands for a kernel that is being compiled: its launches are not made, but noted."""

    function = packed_metadata = None

    def __init__(self, missed: list[object]) -> None:
        self.missed = missed

    def launch_metadata(self, *_: object) -> None:
        return None

    def run(self, *_: object) -> None:
        self.missed.append(self)


@contextmanager
def compiled_ahead(device: torch.device, kernels: Any = JITFunction, *, launch: bool = False) -> Iterator[list[object]]:
    """Inside, kernels that are called are compiled and not launched; at the end all of them are ready to be.

    Everything else runs, so only the shapes of what comes out mean anything. Raises what compiling raises. With
    `launch` those that are ready are launched, and the list gets longer with each launch that is not made.
    """
    missed: list[object] = []
    if kernels is None:
        yield missed
        return
    run, compile_now = kernels.run, kernels._do_compile
    makers = [getattr(owner, name) for owner, name in MADE_BY]
    waiting: list[Future[None]] = []

    def only_compile(self, *args, grid, warmup, **kwargs):
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    def compile_soon(self, key, signature, place, constants, options, attributes, warmup):
        cache, _, target, _, _ = self.device_caches[place]
        source = self.ASTSource(self, signature, constants, attributes)

        def make() -> None:
            try:
                made = self.compile(source, target=target, options=options.__dict__)
                _ = made.run  # asked for, it is brought to the device, and what launches it is compiled
                cache[key] = made
            except BaseException:
                del cache[key]
                raise

        cache[key] = absent = Absent(missed)
        waiting.append(pool.submit(make))
        return absent

    # a thread begins with the first GPU, where this rank may have no part
    begin = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    with one_module_at_a_time(), ThreadPoolExecutor(len(os.sched_getaffinity(0)), initializer=begin) as pool:
        kernels._do_compile = compile_soon
        if not launch:
            kernels.run = only_compile
            for (owner, name), make in zip(MADE_BY, makers, strict=True):
                setattr(owner, name, zeroed(make))
        try:
            yield missed
        finally:
            kernels.run, kernels._do_compile = run, compile_now
            for (owner, name), make in zip(MADE_BY, makers, strict=True):
                setattr(owner, name, make)
        for made in waiting:
            made.result()
