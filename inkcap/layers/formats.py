"""How the matrices of experts are kept: dense, or as a checkpoint's codes and scales until they are unpacked."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inkcap.base.formats import Numerics, WeightFormat
from inkcap.ops.quantize.coded import Coded, Weights
from inkcap.ops.quantize.ref import (
    E2M1_MAX,
    E4M3_MAX,
    MXFP8_BLOCK,
    NVFP4_BLOCK,
    Rounding,
    mxfp8_decode,
    nvfp4_decode,
    round_rows,
)
from inkcap.parallel.comm import Comm
from inkcap.parallel.share import Share
from inkcap.parallel.slot import Slot


@dataclass(frozen=True, slots=True)
class Grid:
    """Matrices [experts, rows, columns], of which a rank holds a share of the rows or of the columns."""

    experts: int
    rows: Share
    columns: Share

    def slot(self, target: Tensor, per: int = 1) -> Slot:
        """The slot of a tensor with one entry for `per` columns."""
        whole = (self.experts, self.rows.whole, self.columns.whole // per)
        if self.columns.count < self.columns.whole:
            return Slot(target, whole, dim=2, start=self.columns.start // per)
        return Slot(target, whole, dim=1, start=self.rows.start)


@dataclass(frozen=True, slots=True)
class Stored:
    """How the two matrices of a layer's experts are stored, and in what numbers they are used."""

    w13: WeightFormat = WeightFormat.DENSE
    w2: WeightFormat = WeightFormat.DENSE
    numerics: Numerics = Numerics.W4A16

    @property
    def rounds_inputs(self) -> bool:
        """Whether what the matrices multiply is rounded."""
        return self.numerics is Numerics.REFERENCE and (self.w13, self.w2) != (WeightFormat.DENSE, WeightFormat.DENSE)


def keeps_codes(device: torch.device) -> bool:
    """Whether ops multiply with codes there: on a GPU."""
    return device.type == "cuda"


def room_for_codes(shape: tuple[int, ...], held: Tensor | None, device: torch.device) -> Tensor:
    """Memory for bytes of codes [experts, rows, bytes], which decoding makes matrices in `held` of where it is given.

    Those of an expert lie at the end of its matrix: other memory would be new, and new memory costs half of loading.
    """
    if held is None:
        return torch.empty(shape, dtype=torch.uint8, device=device)
    return held.flatten(1).view(torch.uint8)[:, -shape[1] * shape[2] :].unflatten(1, shape[1:])


class Matrices(Protocol):
    """The matrices of all experts of a layer, [experts, rows, columns]."""

    weights: Weights | None  # what ops multiply; on a CPU None until `unpack` where they are stored in codes
    rounding: Rounding | None  # of what is multiplied with them in reference numerics; None: it stays as it is

    def slots(self, name: str) -> dict[str, Slot]:
        """`name`, or names that begin with it."""
        ...

    def unpack(self) -> None:
        """Called once all slots are filled: make `weights` and `rounding`."""
        ...


def rounded(x: Tensor, how: Rounding | None, comm: Comm) -> Tensor:
    """x [..., columns] as publishers' kernels round what they multiply, in the dtype of x.

    `comm`: the ranks that hold the other columns of these rows; what comes out does not depend on their number.
    """
    if how is None:
        return x
    return round_rows(x, how, comm.all_max(x.abs().amax(-1)) if how.by_row and comm.size > 1 else None)


class DenseMatrices:
    """The matrices themselves."""

    def __init__(self, grid: Grid, dtype: torch.dtype, device: torch.device) -> None:
        self.grid = grid
        shape = (grid.experts, grid.rows.count, grid.columns.count)
        self.held = torch.empty(shape, dtype=dtype, device=device)
        self.weights: Weights | None = self.held
        self.rounding: Rounding | None = None

    def slots(self, name: str) -> dict[str, Slot]:
        """`name` [E, rows, columns]."""
        return {name: self.grid.slot(self.held)}

    def unpack(self) -> None:
        """Nothing is packed."""


class Nvfp4Matrices:
    """E2M1 codes in pairs, E4M3 scales, and one factor per expert: its amax over a denominator."""

    def __init__(self, grid: Grid, dtype: torch.dtype, device: torch.device) -> None:
        grid.columns.check_blocks(NVFP4_BLOCK)
        self.grid = grid
        self.dtype = dtype
        rows, columns = (grid.experts, grid.rows.count), grid.columns.count
        self.held = None if keeps_codes(device) else torch.empty(*rows, columns, dtype=dtype, device=device)
        self.codes = room_for_codes((*rows, columns // 2), self.held, device)
        self.scales = torch.empty(*rows, columns // NVFP4_BLOCK, dtype=torch.float8_e4m3fn, device=device)
        self.amax = torch.empty(grid.experts, dtype=torch.float32, device=device)
        self.denominator = torch.empty((), dtype=torch.float32, device=device)
        self.factors = torch.empty(grid.experts, dtype=torch.float32, device=device)
        self.weights: Weights | None = None
        if self.held is None:
            self.weights = Coded(self.codes, self.scales, self.factors, dtype)
        self.rounding: Rounding | None = None

    def slots(self, name: str) -> dict[str, Slot]:
        """`name` with `.codes` [E, rows, columns / 2], `.scales` [.., columns / 16], `.amax` [E], `.denominator` []."""
        return {
            f"{name}.codes": self.grid.slot(self.codes, 2),
            f"{name}.scales": self.grid.slot(self.scales, NVFP4_BLOCK),
            f"{name}.amax": Slot(self.amax, (self.grid.experts,)),
            f"{name}.denominator": Slot(self.denominator, ()),
        }

    def factor(self) -> Tensor:
        """What every product of code and scale is multiplied by: [E] fp32."""
        return self.amax / self.denominator

    def rounds(self) -> Rounding:
        """Four-over-Six with a factor per whole row, its limit that of the weights' denominator."""
        return Rounding(NVFP4_BLOCK, limit=self.denominator.item() / E2M1_MAX)

    def unpack(self) -> None:
        """On a GPU the codes stay, and kernels decode them; elsewhere decode to the model's dtype."""
        self.rounding = self.rounds()
        self.factors.copy_(self.factor())
        if self.held is not None:
            self.weights = nvfp4_decode(self.codes, self.scales, self.factors, self.dtype, self.held)
        del self.codes, self.scales


class Nvfp4Scale2Matrices(Nvfp4Matrices):
    """The same codes and scales with the factor itself, and the amax of what is multiplied with them."""

    def __init__(self, grid: Grid, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(grid, dtype, device)
        self.input_amax = torch.empty(1, dtype=torch.float32, device=device)
        self.original_shape = torch.empty(3, dtype=torch.int64, device=device)

    def slots(self, name: str) -> dict[str, Slot]:
        """`name` with `.codes`, `.scales`, `.scale2` [E], `.input_amax` [1] and `.original_shape` [3]."""
        slots = super().slots(name)
        return {
            f"{name}.codes": slots[f"{name}.codes"],
            f"{name}.scales": slots[f"{name}.scales"],
            f"{name}.scale2": slots[f"{name}.amax"],
            f"{name}.input_amax": Slot(self.input_amax, (1,)),
            f"{name}.original_shape": Slot(self.original_shape, (3,)),
        }

    def factor(self) -> Tensor:
        """As stored: a multiplier, [E] fp32."""
        return self.amax

    def rounds(self) -> Rounding:
        """NVFP4 with the one factor that the checkpoint's input_amax gives."""
        factor = self.input_amax[0].cpu() / (E2M1_MAX * E4M3_MAX)  # a GPU would multiply by a rounded reciprocal
        return Rounding(NVFP4_BLOCK, factor.to(self.input_amax.device))


class Mxfp8Matrices:
    """E4M3 codes and the exponents of their scales."""

    def __init__(self, grid: Grid, dtype: torch.dtype, device: torch.device) -> None:
        grid.columns.check_blocks(MXFP8_BLOCK)
        self.grid = grid
        self.dtype = dtype
        rows, columns = (grid.experts, grid.rows.count), grid.columns.count
        self.held = None if keeps_codes(device) else torch.empty(*rows, columns, dtype=dtype, device=device)
        self.codes = room_for_codes((*rows, columns), self.held, device).view(torch.float8_e4m3fn)
        self.scales = torch.empty(*rows, columns // MXFP8_BLOCK, dtype=torch.uint8, device=device)
        self.weights: Weights | None = None if self.held is not None else Coded(self.codes, self.scales, None, dtype)
        self.rounding: Rounding | None = Rounding(MXFP8_BLOCK)

    def slots(self, name: str) -> dict[str, Slot]:
        """`name` with `.codes` [E, rows, columns] and `.scales` [E, rows, columns / 32]."""
        return {
            f"{name}.codes": self.grid.slot(self.codes),
            f"{name}.scales": self.grid.slot(self.scales, MXFP8_BLOCK),
        }

    def unpack(self) -> None:
        """As NVFP4."""
        if self.held is not None:
            self.weights = mxfp8_decode(self.codes, self.scales, self.dtype, self.held)
        del self.codes, self.scales


KINDS = {
    WeightFormat.DENSE: DenseMatrices,
    WeightFormat.NVFP4: Nvfp4Matrices,
    WeightFormat.NVFP4_SCALE2: Nvfp4Scale2Matrices,
    WeightFormat.MXFP8: Mxfp8Matrices,
}


def matrices(stored: WeightFormat, grid: Grid, dtype: torch.dtype, device: torch.device) -> Matrices:
    """Empty matrices of one format. Raises ConfigInvalid when ranks would split a block of columns."""
    return KINDS[stored](grid, dtype, device)
