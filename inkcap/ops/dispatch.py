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

    Calling it calls what `bind` chose, the reference until then. An implementation is *tokenwise* when a token's bits
    are the same whatever tokens the step has besides: deterministic mode takes no other.
    """

    __slots__ = ("chosen", "function", "implementations", "name", "reference", "spare", "tokenwise")

    def __init__(self, reference: Callable[P, R]) -> None:
        self.name: str = reference.__name__
        self.reference = reference
        self.function = reference
        self.chosen = "ref"
        self.implementations: dict[str, tuple[Callable[P, R], Fits]] = {"ref": (reference, lambda device: True)}
        self.tokenwise: set[str] = set()
        self.spare: set[str] = set()  # chosen in deterministic mode only, since others are faster

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def implement(
        self, name: str, when: Fits, *, tokenwise: bool = False, spare: bool = False
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Declare an implementation with the reference's arguments and side effects; `when` says where it can run.

        `spare`: a tokenwise one that is chosen in deterministic mode only.
        """

        def declare(function: Callable[P, R]) -> Callable[P, R]:
            assert name not in self.implementations, f"op {self.name} has two implementations named {name}"
            self.implementations[name] = (function, when)
            if tokenwise or spare:
                self.tokenwise.add(name)
            if spare:
                self.spare.add(name)
            return function

        return declare

    def fitting(self, device: torch.device, *, deterministic: bool = False) -> list[str]:
        """Names of the implementations that can run on `device`, in the order declared."""
        names = [name for name, (_, fits) in self.implementations.items() if fits(device)]
        return [name for name in names if name in self.tokenwise] if deterministic else names

    def choose(self, device: torch.device, wanted: str | None, *, deterministic: bool = False) -> None:
        """Take `wanted`, or the last declared implementation that fits and, but in deterministic mode, is not spare.

        Raises NoSuchOp when `wanted` does not fit, or nothing does.
        """
        fitting = self.fitting(device, deterministic=deterministic)
        mode = " in deterministic mode" if deterministic else ""
        if not fitting:
            had = ", ".join(self.implementations)
            raise NoSuchOp(f"op {self.name} has no implementation for {device}{mode}; those it has are {had}")
        if wanted is not None and wanted not in fitting:
            state = "does not run" if wanted in self.implementations else "does not exist"
            raise NoSuchOp(
                f"implementation {wanted!r} of op {self.name} {state} on {device}{mode}; "
                f"what fits is {', '.join(fitting)}"
            )
        self.chosen = wanted or next(name for name in reversed(fitting) if deterministic or name not in self.spare)
        self.function = self.implementations[self.chosen][0]


OPS: dict[str, Op[..., Any]] = {}


def op(reference: Callable[P, R]) -> Op[P, R]:
    """Make a function the reference of the op that has its name."""
    assert reference.__name__ not in OPS, f"two ops are named {reference.__name__}"
    made = Op(reference)
    OPS[made.name] = made
    return made


def bind(device: torch.device, wanted: dict[str, str] | None = None, *, deterministic: bool = False) -> None:
    """Choose each op's implementation for `device`; `wanted` maps names of ops to implementations asked for.

    `deterministic`: among those whose bits for a token do not depend on the rest of the step. Raises NoSuchOp for a
    name that is no op, or an implementation that does not exist or fit.
    """
    wanted = wanted or {}
    for name in wanted:
        if name not in OPS:
            raise NoSuchOp(f"there is no op {name!r}; the ops are {', '.join(sorted(OPS))}")
    for name, each in OPS.items():
        each.choose(device, wanted.get(name), deterministic=deterministic)


def table() -> list[tuple[str, str, tuple[str, ...]]]:
    """(op, implementation in use, implementations declared), by name."""
    return [(name, each.chosen, tuple(each.implementations)) for name, each in sorted(OPS.items())]
