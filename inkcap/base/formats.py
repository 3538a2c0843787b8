"""How the matrices of experts are stored in checkpoints, and in what numbers they are used."""

from enum import StrEnum


class Numerics(StrEnum):
    """What the experts of a quantised layer multiply their weights with; the setting `model.numerics`.

    Weights are decoded exactly and rounded once to the model's dtype either way. Routers, attention and everything else
    see the same numbers in both, and layers whose experts are dense do not differ at all.
    """

    W4A16 = "w4a16"  # activations as they are, in the dtype of the model: for GPUs without FP4 units, and CPUs
    REFERENCE = "reference"  # activations quantised as the publishers' kernels do it, emulated, before both products


class WeightFormat(StrEnum):
    """One way to store a tensor [experts, rows, columns]; the companions of its codes are named after it."""

    DENSE = "dense"  # BF16, F16 or F32
    NVFP4 = "nvfp4"  # E2M1 pairs; E4M3 scale per 16 columns; an amax per expert over one denominator
    NVFP4_SCALE2 = "nvfp4-scale2"  # the same, with a factor per expert instead, and the amax of the inputs
    MXFP8 = "mxfp8"  # E4M3; UE8M0 scale per 32 columns
