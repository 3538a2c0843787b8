"""Captured steps give what steps without graphs give; on a CPU with work run again in place of a graph."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from toy import PARAMS, RICH, make_worker, requests, run

from inkcap.ops.sample.ref import sample
from inkcap.ops.sconv.ref import sconv
from inkcap.runner.graphs import DeviceRecorder, Graphs, bounds_up_to, called_by_reference
from inkcap.runner.mixed import MixedGraphs
from inkcap.runner.table import RowTable
from inkcap.runner.transfer import Download

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def copied(monkeypatch):
    """As from a device, results are copied when a step is launched: the next one reuses the tensors."""
    monkeypatch.setattr("inkcap.runner.worker.Download", lambda tensors: Download([t.clone() for t in tensors]))


class Rerun:
    """Stands for a graph: what was captured is run."""

    def __init__(self, work):
        self.work = work
        self.count = 0

    def replay(self):
        self.count += 1
        with torch.inference_mode():
            self.work()


class Reruns:
    """Stands for the recorder of a device."""

    def capture(self, work, earlier):
        return earlier or Rerun(work)


def with_graphs(rows: int = 6):
    worker = make_worker(CPU, graphs=True, rows=rows)
    old = worker.table
    worker.table = RowTable(rows, old.groups, old.vocab_size, old.rules, CPU, capacity=worker.max_length + 1, spare=1)
    worker.graphs = Graphs(
        worker.model, worker.table, worker.arena.planes, worker.sampler, worker.guides, worker.max_length
    )
    worker.graphs.capture(Reruns())
    worker.mixed = MixedGraphs(worker.graphs)
    worker.mixed.capture(Reruns())
    return worker


@pytest.mark.parametrize(("rows", "depth"), [(6, 0), (1, 1), (5, 1)])
def test_tokens_are_those_of_steps_without_graphs(rows, depth):
    wanted = requests(PARAMS, 8, seed=rows)
    worker = with_graphs(rows)
    assert run(worker, wanted, depth) == run(make_worker(CPU, graphs=False), wanted, 0)
    counts = [sum(e.count for e in part.values()) for part in (worker.graphs.wholes, worker.graphs.draws)]
    assert sum(counts) > 15
    assert rows > 1 or min(counts) > 5
    assert sum(each.count for each in worker.mixed.forwards.values()) >= 8
    assert not worker.table.lengths[rows].ne(1).any()


def test_rows_that_want_more_keep_the_forward_graph():
    wanted = requests(PARAMS[:2] + RICH, 8, seed=3)
    worker = with_graphs()
    assert run(worker, wanted, 1) == run(make_worker(CPU, graphs=False), wanted, 0)
    assert sum(each.count for each in worker.graphs.forwards.values()) > 20


def test_bounds_end_at_the_longest():
    assert bounds_up_to(300) == [300]
    assert bounds_up_to(2048) == [2048]
    assert bounds_up_to(100_000) == [2048, 8192, 32768, 100_000]


def test_longer_rows_take_the_next_bound():
    worker = with_graphs(1)
    worker.graphs.bounds = [70, 400]
    worker.graphs.capture(Reruns())
    wanted = requests(PARAMS, 5, seed=9)
    assert run(worker, wanted, 1) == run(make_worker(CPU, graphs=False), wanted, 0)
    assert {bound for (_, bound), each in worker.graphs.forwards.items() if each.count} == {70, 400}


def test_ops_without_a_kernel_are_named():
    chosen, function = sconv.chosen, sconv.function
    try:
        sconv.chosen, sconv.function = "ref", sconv.reference
        with pytest.raises(TypeError):
            called_by_reference(sconv)
        assert sconv.function is sconv.reference
        assert with_graphs().graphs.host_bound() == []
    finally:
        sconv.chosen, sconv.function = chosen, function
    assert sample.name not in called_by_reference(lambda: None)


class Watched:
    """A graph that sees what is written to one tensor, and is empty without."""

    one = torch.ones(2)

    def capture_begin(self, pool, capture_error_mode):
        self.begun = self.one._version

    def capture_end(self):
        if self.one._version == self.begun:
            warnings.warn("The CUDA Graph is empty. This usually means ...", UserWarning, stacklevel=2)


def test_no_graph_is_empty_for_kernels_that_were_not_ready(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Watched)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    recorder = DeviceRecorder.__new__(DeviceRecorder)
    recorder.missed, recorder.lacking, recorder.pool, recorder.stream = [], set(), None, None
    recorder.one = Watched.one
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        first = recorder.capture(lambda: recorder.missed.append("a kernel"), None)
        assert recorder.lacking == {first}
        assert not heard
        again = recorder.capture(lambda: None, first)
        assert again is not first
        assert len(heard) == 1  # nothing was missing: it should have something in it
    assert recorder.capture(lambda: None, again) is again
