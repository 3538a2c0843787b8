"""Cases that tests of kernels share: small ones for the interpreter, real ones for a device."""

from dataclasses import dataclass, fields, replace

import torch
from steps import World

from inkcap.cache.state import LayerState, Plane


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
