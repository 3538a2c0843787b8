"""Programmatic dependent launch: a kernel may start while the one before it still runs, and waits where it must.

Rules of every kernel launched with it:
- `wait()` stands before the first read of anything that this forward wrote, and before every write.
- What stands before it reads only what was complete earlier: weights, tables, positions, state of older steps.
- `trigger()` stands at the start, where the next kernel's early loads gain most. The first kernel of a forward triggers
  after its own wait, so that nothing behind it starts before the step's inputs are complete; so does a kernel whose
  predecessor wrote what its successor reads early.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@functools.cache
def supported(device: torch.device) -> bool:
    """Whether kernels on `device` can be launched so: Hopper and newer. Never under the interpreter."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def trigger(PDL: tl.constexpr):
    """Let the next kernel start."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Block until the kernels before this one are complete and what they wrote is visible."""
    if PDL:
        gdc_wait()


def launch(pdl: bool) -> dict[str, bool]:
    """Launch options of a kernel; older versions of Triton do not know them, so they appear only where they apply."""
    return {"launch_pdl": True} if pdl else {}
