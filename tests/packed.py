"""Matrices of experts as each format stores them."""

import torch

from inkcap.base.formats import WeightFormat
from inkcap.ops.quantize import ref

INPUT_AMAX = 24.0


def packed(x: torch.Tensor, stored: WeightFormat) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors by the ending of their slot's name, and the exact values they mean. x: [E, rows, columns]."""
    if stored is WeightFormat.DENSE:
        return {"": x}, x
    if stored is WeightFormat.MXFP8:
        codes, scales = ref.mxfp8_encode(x)
        return {".codes": codes, ".scales": scales}, ref.mxfp8_decode(codes, scales)
    amax, denominator = x.abs().amax((1, 2)), torch.tensor(1536.0)
    codes, scales, _ = ref.nvfp4_encode_four_over_six(x, amax, 256.0)
    exact = ref.nvfp4_decode(codes, scales, amax / denominator)
    shared = {".codes": codes, ".scales": scales}
    if stored is WeightFormat.NVFP4:
        return {**shared, ".amax": amax, ".denominator": denominator}, exact
    more = {".input_amax": torch.tensor([INPUT_AMAX]), ".original_shape": torch.tensor(x.shape)}
    return {**shared, ".scale2": amax / denominator, **more}, exact
