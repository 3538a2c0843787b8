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
from typing import Any

import torch
from torch import Tensor

if find_spec("triton") is not None:
    from triton.runtime.cache import triton_key
    from triton.runtime.jit import JITFunction
else:
    triton_key = JITFunction = None
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
def compiled_ahead(device: torch.device, kernels: Any = JITFunction) -> Iterator[None]:
    """Inside, kernels that are called are compiled and not launched; at the end all of them are ready to be.

    Everything else runs, so only the shapes of what comes out mean anything. Raises what compiling raises.
    """
    if kernels is None:
        yield
        return
    launch, compile_now = kernels.run, kernels._do_compile
    makers = [getattr(owner, name) for owner, name in MADE_BY]
    waiting: list[tuple[dict[object, object], object, Future[Any]]] = []

    def only_compile(self, *args, grid, warmup, **kwargs):
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    def compile_soon(self, key, signature, place, constants, options, attributes, warmup):
        cache, _, target, _, _ = self.device_caches[place]
        source = self.ASTSource(self, signature, constants, attributes)
        cache[key] = made = pool.submit(self.compile, source, target=target, options=options.__dict__)
        waiting.append((cache, key, made))
        return made

    # a thread begins with the first GPU, where this rank may have no part
    begin = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), initializer=begin) as pool:
        kernels.run, kernels._do_compile = only_compile, compile_soon
        for (owner, name), make in zip(MADE_BY, makers, strict=True):
            setattr(owner, name, zeroed(make))
        try:
            yield
        finally:
            kernels.run, kernels._do_compile = launch, compile_now
            for (owner, name), make in zip(MADE_BY, makers, strict=True):
                setattr(owner, name, make)
            for cache, key, _ in waiting:
                del cache[key]
        for cache, key, made in waiting:
            cache[key] = made.result()
        # bring them to the device, and compile what launches them
        list(pool.map(lambda found: found[0][found[1]].run, waiting))
