"""Implementations in Triton, one import per line. Imported where Triton is installed; see the package's first file."""

from inkcap.ops.act import triton as act_triton
from inkcap.ops.attention import fixed as attention_fixed
from inkcap.ops.attention import triton as attention_triton
from inkcap.ops.attn_prep import triton as attn_prep_triton
from inkcap.ops.blocks import triton as blocks_triton
from inkcap.ops.experts import fixed as experts_fixed
from inkcap.ops.experts import triton as experts_triton
from inkcap.ops.linear import each as linear_each
from inkcap.ops.linear import fixed as linear_fixed
from inkcap.ops.linear import triton as linear_triton
from inkcap.ops.mix import fixed as mix_fixed
from inkcap.ops.mix import triton as mix_triton
from inkcap.ops.norm import triton as norm_triton
from inkcap.ops.quantize import triton as quantize_triton
from inkcap.ops.router import rounded as router_rounded
from inkcap.ops.router import triton as router_triton
from inkcap.ops.rows import triton as rows_triton
from inkcap.ops.sample import triton as sample_triton
from inkcap.ops.sconv import triton as sconv_triton

__all__ = [
    "act_triton",
    "attention_fixed",
    "attention_triton",
    "attn_prep_triton",
    "blocks_triton",
    "experts_fixed",
    "experts_triton",
    "linear_each",
    "linear_fixed",
    "linear_triton",
    "mix_fixed",
    "mix_triton",
    "norm_triton",
    "quantize_triton",
    "router_rounded",
    "router_triton",
    "rows_triton",
    "sample_triton",
    "sconv_triton",
]
