"""Ops and their implementations: a dictionary filled at import, bound once per process. No priorities, no search."""

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from inkcap.base.errors import NoSuchOp

P = ParamSpec("P")
R = TypeVar("R")
Fits = Callable[[torch.device], bool]


class Op(Generic[P, R]):
    """One op: its reference, which defines it, and the implementations that may stand in for it.

    Calling it calls what `bind` chose, the reference until then.
    """

    __slots__ = ("chosen", "function", "implementations", "name", "reference")

    def __init__(self, reference: Callable[P, R]) -> None:
        self.name: str = reference.__name__
        self.reference = reference
        self.function = reference
        self.chosen = "ref"
        self.implementations: dict[str, tuple[Callable[P, R], Fits]] = {"ref": (reference, lambda device: True)}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def implement(self, name: str, when: Fits) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Declare an implementation with the reference's arguments and side effects; `when` says where it can run."""

        def declare(function: Callable[P, R]) -> Callable[P, R]:
            assert name not in self.implementations, f"op {self.name} has two implementations named {name}"
            self.implementations[name] = (function, when)
            return function

        return declare

    def fitting(self, device: torch.device) -> list[str]:
        """Names of the implementations that can run on `device`, in the order declared."""
        return [name for name, (_, fits) in self.implementations.items() if fits(device)]

    def choose(self, device: torch.device, wanted: str | None) -> None:
        """Take `wanted`, or the last declared implementation that fits. Raises NoSuchOp when `wanted` does not."""
        fitting = self.fitting(device)
        if wanted is not None and wanted not in fitting:
            state = "does not run" if wanted in self.implementations else "does not exist"
            raise NoSuchOp(
                f"implementation {wanted!r} of op {self.name} {state} on {device}; what fits is {', '.join(fitting)}"
            )
        self.chosen = wanted or fitting[-1]
        self.function = self.implementations[self.chosen][0]


OPS: dict[str, Op[..., Any]] = {}


def op(reference: Callable[P, R]) -> Op[P, R]:
    """Make a function the reference of the op that has its name."""
    assert reference.__name__ not in OPS, f"two ops are named {reference.__name__}"
    made = Op(reference)
    OPS[made.name] = made
    return made


def bind(device: torch.device, wanted: dict[str, str] | None = None) -> None:
    """Choose each op's implementation for `device`; `wanted` maps names of ops to implementations asked for.

    Raises NoSuchOp for a name that is no op, or an implementation that does not exist or fit.
    """
    wanted = wanted or {}
    for name in wanted:
        if name not in OPS:
            raise NoSuchOp(f"there is no op {name!r}; the ops are {', '.join(sorted(OPS))}")
    for name, each in OPS.items():
        each.choose(device, wanted.get(name))


def table() -> list[tuple[str, str, tuple[str, ...]]]:
    """(op, implementation in use, implementations declared), by name."""
    return [(name, each.chosen, tuple(each.implementations)) for name, each in sorted(OPS.items())]
