"""For all tests: modules beside this file can be imported, memory from torch.empty is NaN until written, and Triton
kernels run in the interpreter unless the environment says otherwise. Tests in a browser run where Chromium is, and
where they are asked for with `-m`."""

import contextlib
import gc
import os
import shutil
import sys
from pathlib import Path

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are declared; scripts/test-gpu sets it to 0
sys.path.insert(0, str(Path(__file__).parent))

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def leaves_out_browser(config) -> bool:
    return CHROMIUM is None and "browser" not in config.option.markexpr


def pytest_configure(config):
    config.addinivalue_line("markers", "browser: needs Chromium; left out without it unless -m names this mark")


def pytest_collection_modifyitems(config, items):
    if leaves_out_browser(config):
        out = [item for item in items if item.get_closest_marker("browser")]
        items[:] = [item for item in items if not item.get_closest_marker("browser")]
        config.hook.pytest_deselected(items=out)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Searches for garbage take a quarter of the time here and find none: what is read stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session):
    if os.environ["TRITON_INTERPRET"] == "1" and "triton" in sys.modules:
        from interpreter import hasten

        hasten()


def pytest_terminal_summary(terminalreporter, config):
    if leaves_out_browser(config):
        terminalreporter.write_line("left out: tests of the page in a browser, since no Chromium was found")


def poisoned(make):
    """`make`, with floating-point results full of NaN."""

    def empty(*args, **kwargs):
        out = make(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    return empty


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Uninitialised memory that is read shows as NaN. Tests that never import torch do not pay for it."""
    if torch := sys.modules.get("torch"):
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch.Tensor, "new_empty"),
        ):
            monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(autouse=True, scope="module")
def bound():
    """Ops that engines of a file bound, such as those of deterministic mode, are bound no longer behind it."""

    def ops():
        dispatch = sys.modules.get("inkcap.ops.dispatch")
        return {} if dispatch is None else dispatch.OPS

    before = {op: (op.chosen, op.function) for op in ops().values()}
    yield
    for op in ops().values():
        op.chosen, op.function = before.get(op, ("ref", op.reference))


@pytest.fixture(scope="session")
def hopper():
    """Runs programs that compile for a GPU that is not there."""
    from hopper import Hopper

    with contextlib.closing(Hopper()) as made:
        yield made
