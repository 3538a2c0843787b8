"""Scales of cached keys and values from a file, in place of those made of the weights."""

import json
from collections.abc import Mapping
from math import frexp, ldexp
from pathlib import Path

import torch

from inkcap.base.errors import ConfigInvalid
from inkcap.parallel.slot import Slot


def read_kv_scales(path: Path, slots: Mapping[str, Slot]) -> int:
    """Fill scales from a JSON object: names of `slots` to a number, or to one for each kv head of the whole model.

    A scale is what codes are multiplied by: numbers beyond 448 times it saturate. It is raised to a power of two, which
    costs no accuracy, since codes keep three bits behind the leading one whatever their size. Scales that the file
    leaves out stay as they are. Returns how many it has. Raises ConfigInvalid, naming what is wrong.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigInvalid(f"cache.scales = {path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict) or not found:
        raise ConfigInvalid(f"cache.scales = {path} holds no JSON object of names and numbers")
    for name, given in found.items():
        slot = slots.get(name)
        if slot is None:
            raise ConfigInvalid(
                f"cache.scales = {path} has {name!r:.80}, which this model has not; names are like {next(iter(slots))}"
            )
        heads = slot.whole[0]
        numbers = given if isinstance(given, list) else [given] * heads
        if len(numbers) != heads:
            raise ConfigInvalid(
                f"cache.scales = {path} has {len(numbers)} numbers for {name}; there are {heads} kv heads"
            )
        slot.fill(torch.tensor([power_above(path, name, number) for number in numbers]))
    return len(found)


def power_above(path: Path, name: str, number: object) -> float:
    """The smallest power of two that is no less than a scale of the file."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not 2.0**-60 <= number <= 2.0**60:
        raise ConfigInvalid(f"cache.scales = {path} has {number!r:.80} for {name}; a scale is a number above 0")
    mantissa, exponent = frexp(number)
    return ldexp(1.0, exponent - (mantissa == 0.5))
