"""Implementations in Triton, one import per line. Imported where Triton is installed; see the package's first file."""

from inkcap.ops.norm import triton as norm_triton

__all__ = ["norm_triton"]
