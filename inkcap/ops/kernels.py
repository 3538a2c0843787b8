"""Implementations in Triton, one import per line. Imported where Triton is installed; see the package's first file."""

from inkcap.ops.linear import triton as linear_triton
from inkcap.ops.norm import triton as norm_triton
from inkcap.ops.router import triton as router_triton
from inkcap.ops.sconv import triton as sconv_triton

__all__ = ["linear_triton", "norm_triton", "router_triton", "sconv_triton"]
