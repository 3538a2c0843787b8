"""The ops, one import per line. Importing this package declares ops and implementations; `dispatch.bind` chooses.

Those in Triton are declared where Triton is installed.
"""

from importlib.util import find_spec

from inkcap.ops import alone
from inkcap.ops.act import cpu as act_cpu
from inkcap.ops.act import ref as act_ref
from inkcap.ops.attention import cpu as attention_cpu
from inkcap.ops.attention import ref as attention_ref
from inkcap.ops.attn_prep import cpu as attn_prep_cpu
from inkcap.ops.attn_prep import ref as attn_prep_ref
from inkcap.ops.blocks import ref as blocks_ref
from inkcap.ops.experts import cpu as experts_cpu
from inkcap.ops.experts import ref as experts_ref
from inkcap.ops.linear import ref as linear_ref
from inkcap.ops.mix import cpu as mix_cpu
from inkcap.ops.mix import ref as mix_ref
from inkcap.ops.norm import cpu as norm_cpu
from inkcap.ops.norm import ref as norm_ref
from inkcap.ops.quantize import lookup as quantize_lookup
from inkcap.ops.quantize import ref as quantize_ref
from inkcap.ops.router import ref as router_ref
from inkcap.ops.rows import ref as rows_ref
from inkcap.ops.sample import cpu as sample_cpu
from inkcap.ops.sample import ref as sample_ref
from inkcap.ops.sconv import cpu as sconv_cpu
from inkcap.ops.sconv import ref as sconv_ref

if find_spec("triton") is not None:
    from inkcap.ops import kernels  # noqa: F401

__all__ = [
    "act_cpu",
    "act_ref",
    "alone",
    "attention_cpu",
    "attention_ref",
    "attn_prep_cpu",
    "attn_prep_ref",
    "blocks_ref",
    "experts_cpu",
    "experts_ref",
    "linear_ref",
    "mix_cpu",
    "mix_ref",
    "norm_cpu",
    "norm_ref",
    "quantize_lookup",
    "quantize_ref",
    "router_ref",
    "rows_ref",
    "sample_cpu",
    "sample_ref",
    "sconv_cpu",
    "sconv_ref",
]
