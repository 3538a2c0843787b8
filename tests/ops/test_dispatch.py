"""Ops are bound once: the last implementation that fits, or the one asked for, or an error that says what fits."""

import inspect

import pytest
import torch

import inkcap.ops  # noqa: F401  declares the implementations
from inkcap.base.errors import NoSuchOp
from inkcap.ops import dispatch
from inkcap.ops.dispatch import OPS, Op, bind, op, table

CPU = torch.device("cpu")


@pytest.fixture
def scratch(monkeypatch):
    """A dictionary of ops of its own, with one op that has three implementations."""
    monkeypatch.setattr(dispatch, "OPS", {})

    @op
    def double(x: int) -> str:
        """Twice x."""
        return f"ref {2 * x}"

    double.implement("plain", when=lambda device: device.type == "cpu")(lambda x: f"plain {2 * x}")
    double.implement("fast", when=lambda device: device.type == "cuda")(lambda x: f"fast {2 * x}")
    return double


def test_reference_until_bound_then_the_last_that_fits(scratch):
    assert scratch(2) == "ref 4"
    bind(CPU)
    assert scratch(2) == "plain 4"
    bind(torch.device("cuda"))
    assert scratch(x=3) == "fast 6"
    assert scratch.reference(3) == "ref 6"


def test_wanted_implementation_replaces_the_choice(scratch):
    bind(CPU, {"double": "ref"})
    assert scratch(1) == "ref 2"
    assert table() == [("double", "ref", ("ref", "plain", "fast"))]


def test_errors_say_what_would_have_fitted(scratch):
    with pytest.raises(NoSuchOp, match="'fast' of op double does not run on cpu; what fits is ref, plain"):
        bind(CPU, {"double": "fast"})
    with pytest.raises(NoSuchOp, match="'slow' of op double does not exist on cpu; what fits is ref, plain"):
        bind(CPU, {"double": "slow"})
    with pytest.raises(NoSuchOp, match="no op 'treble'; the ops are double"):
        bind(CPU, {"treble": "ref"})


def test_deterministic_mode_takes_nothing_but_tokenwise_implementations(scratch):
    with pytest.raises(NoSuchOp, match="op double has no implementation for cpu in deterministic mode"):
        bind(CPU, deterministic=True)
    scratch.implement("alone", when=lambda device: device.type == "cpu", spare=True)(lambda x: f"alone {2 * x}")
    bind(CPU)
    assert scratch(1) == "plain 2"  # a spare one is for that mode alone
    bind(CPU, deterministic=True)
    assert scratch(1) == "alone 2"
    with pytest.raises(
        NoSuchOp, match="'plain' of op double does not run on cpu in deterministic mode; what fits is alone"
    ):
        bind(CPU, {"double": "plain"}, deterministic=True)


def test_names_are_taken_once(scratch):
    with pytest.raises(AssertionError, match="two implementations named plain"):
        scratch.implement("plain", when=lambda device: True)(lambda x: "")
    with pytest.raises(AssertionError, match="two ops are named double"):
        op(scratch.reference)


def test_implementations_take_the_arguments_of_their_reference():
    def shape(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    checked = 0
    for name, each in OPS.items():
        assert isinstance(each, Op)
        assert each.reference.__doc__, f"op {name} says nothing about itself"
        for implementation, (function, _) in each.implementations.items():
            assert shape(function) == shape(each.reference), f"{name}: {implementation} differs from the reference"
            checked += implementation != "ref"
    assert checked
