"""Matrices of experts that stay codes and scales, for ops that decode what they multiply."""

from dataclasses import dataclass

import torch
from torch import Tensor

from inkcap.ops.quantize.ref import mxfp8_decode, nvfp4_decode


@dataclass(frozen=True, slots=True)
class Coded:
    """Matrices [E, rows, columns] in NVFP4 or MXFP8. Indexed by an expert, like the tensor they stand for."""

    codes: Tensor  # NVFP4: uint8 [E, rows, columns / 2]; MXFP8: float8_e4m3fn [E, rows, columns]
    scales: Tensor  # NVFP4: float8_e4m3fn [E, rows, columns / 16]; MXFP8: uint8 [E, rows, columns / 32]
    factor: Tensor | None  # NVFP4: [E] fp32, which every product of code and scale is multiplied by
    dtype: torch.dtype  # of decoded matrices

    @property
    def bits(self) -> int:
        """Of a code: 4 or 8."""
        return 8 if self.factor is None else 4

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, rows, columns)."""
        experts, rows, held = self.codes.shape
        return experts, rows, held * 8 // self.bits

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, expert: int) -> Tensor:
        """One expert's matrix [rows, columns], decoded."""
        if self.factor is None:
            return mxfp8_decode(self.codes[expert], self.scales[expert], self.dtype)
        return nvfp4_decode(self.codes[expert], self.scales[expert], self.factor[expert], self.dtype)


Weights = Tensor | Coded
