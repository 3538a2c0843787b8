"""Cases that tests of kernels share: small ones for the interpreter, real ones for a device."""

from dataclasses import dataclass, fields, replace

import torch
from steps import World

from inkcap.cache.state import LayerState, Plane
from inkcap.ops.quantize.coded import Coded


@dataclass(frozen=True)
class Settle:
    """A product of `inputs` with `channels` outputs, over steps of (row, tokens) that follow each other."""

    inputs: int
    channels: int
    scaled: bool
    begins: bool  # no residual
    wide: bool = False  # the residual is fp32
    steps: tuple[tuple[tuple[int, int], ...], ...] = (((1, 1),), ((1, 1),), ((1, 1),), ((1, 1),), ((1, 1),))


MIXED = (((1, 6), (2, 1)), ((2, 1), (1, 1)), ((1, 1),), ((2, 3),), ((1, 1), (2, 1), (3, 1)))
SETTLES = [
    Settle(32, 24, False, False),
    Settle(24, 17, True, True, steps=MIXED),
    Settle(7, 16, True, False, wide=True, steps=MIXED),
]


def moved(value, device):
    """A frozen value with its tensors on `device`."""
    tensors = {f.name: getattr(value, f.name) for f in fields(value)}
    return replace(
        value,
        **{k: v.to(device) for k, v in tensors.items() if isinstance(v, torch.Tensor)},
        **({"memo": {}} if "memo" in tensors else {}),
    )


def convolved(channels, steps, dtype, device, width=4):
    """(first positions per token, view, packing, plane) of each step, over one arena on `device`."""
    planes = (Plane("other", (8,), str(dtype).removeprefix("torch.")),
              Plane("x", (channels,), str(dtype).removeprefix("torch.")))  # fmt: skip
    place = World([LayerState("sconv", 0, planes, width, 4, False)], length=64, seed=5)
    arena, at = place.arenas["sconv"].to(device), {}
    plane = arena[:, 32 : 32 + 4 * channels].unflatten(1, (4, channels))
    for step in steps:
        batch = place.batch([(row, at.get(row, 0), [0] * tokens) for row, tokens in step])
        for row, tokens in step:
            at[row] = at.get(row, 0) + tokens
        view = replace(moved(batch.views["sconv"], device), planes=(arena[:, :32].unflatten(1, (4, 8)), plane))
        yield view, moved(batch.packing, device), plane


def settle_case(case, dtype, device):
    """(arguments of `settle`, the plane it changes) of each step."""
    weight = (torch.randn(case.channels, case.inputs) / case.inputs**0.5).to(device, dtype)
    taps = (torch.randn(4, case.channels) / 2).to(device).t()
    scale = torch.tensor([0.3], device=device) if case.scaled else None
    for view, packing, plane in convolved(case.channels, case.steps, dtype, device):
        tokens = len(packing.positions)
        residual = torch.randn(tokens, case.channels).to(device, torch.float32 if case.wide else dtype)
        arguments = {
            "rows": torch.randn(tokens, case.inputs).to(device, dtype), "weight": weight,
            "residual": None if case.begins else residual, "taps": taps, "view": view, "packing": packing, "plane": 1,
            "scale": scale, "conv_scale": 0.5,
        }  # fmt: skip
        yield arguments, plane


def same_dtype(got, want):
    return got.dtype == want.dtype and got.shape == want.shape


HIDDEN = 6144  # of the rank that device tests and benchmarks of products are shaped like
PRODUCTS = {  # name: (rows, length)
    "qkvr local": (1664, HIDDEN),
    "qkvr global": (1408, HIDDEN),
    "dense w13": (6144, HIDDEN),
}
SETTLED = {"wo": (HIDDEN, 1024), "dense w2": (HIDDEN, 3072)}
HEAD = (25128, HIDDEN)
EXPERTS, TOP, SHARED, UNITS = 256, 6, 2, 384


@dataclass(frozen=True)
class ExpertWeights:
    """One layer's router and experts."""

    router: torch.Tensor
    bias: torch.Tensor
    scale: torch.Tensor
    w13: torch.Tensor
    shared_w13: torch.Tensor
    w2: torch.Tensor
    shared_w2: torch.Tensor

    def exact(self):
        """The same in fp32."""
        return ExpertWeights(*(getattr(self, f.name).float() for f in fields(self)))


def normal(*shape, device, dtype=torch.bfloat16, scale=1.0):
    return torch.empty(shape, dtype=dtype, device=device).normal_(0, scale)


def expert_weights(device, experts=EXPERTS, dtype=torch.bfloat16):
    """Scaled so that activations keep about unit size."""
    near = HIDDEN**-0.5
    return ExpertWeights(
        normal(experts + SHARED, HIDDEN, device=device, dtype=dtype, scale=near),
        normal(experts, device=device, dtype=torch.float32, scale=0.1),
        torch.ones(1, device=device),
        normal(experts, 2 * UNITS, HIDDEN, device=device, dtype=dtype, scale=near),
        normal(SHARED, 2 * UNITS, HIDDEN, device=device, dtype=dtype, scale=near),
        normal(experts, HIDDEN, UNITS, device=device, dtype=dtype, scale=UNITS**-0.5),
        normal(HIDDEN, SHARED, UNITS, device=device, dtype=dtype, scale=UNITS**-0.5),
    )


def coded(bits, experts, rows, columns, device="cpu", dtype=torch.float32):
    """Random matrices in NVFP4 or MXFP8, of a size that keeps activations near one; scales spread, some subnormal."""
    if bits == 4:
        codes = torch.randint(256, (experts, rows, columns // 2), dtype=torch.uint8, device=device)
        scales = torch.rand(experts, rows, columns // 16, device=device).square() * 2
        factor = torch.rand(experts, device=device) * columns**-0.5 / 2 + columns**-0.5 / 8
        return Coded(codes, scales.to(torch.float8_e4m3fn), factor, dtype)
    codes = torch.randn(experts, rows, columns, device=device).to(torch.float8_e4m3fn)
    near = 127 - int(torch.tensor(columns).float().log2()) // 2
    scales = torch.randint(near - 3, near + 1, (experts, rows, columns // 32), dtype=torch.uint8, device=device)
    return Coded(codes, scales, None, dtype)
