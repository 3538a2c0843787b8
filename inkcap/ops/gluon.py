"""What versions of Triton's Gluon from 3.6 on have under different names."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

copy_rows = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
everybody = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def seen_as(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory as elements of `dtype` in another shape."""
    if REINTERPRETS:
        other = memory.reinterpret(dtype, shape, layout)
    else:
        other = memory._reinterpret(dtype, shape, layout)
    return other
