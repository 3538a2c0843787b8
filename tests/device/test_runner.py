"""A worker on a GPU: captured steps against eager ones, both against a CPU, with steps in flight."""

import warnings

import pytest
import torch
from toy import PARAMS, RICH, make_worker, requests, run

from inkcap.runner.memory import measure_step

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


@pytest.mark.parametrize(("rows", "depth"), [(6, 0), (6, 1), (1, 1), (40, 1)])
def test_graphs_eager_steps_and_a_cpu_agree(rows, depth):
    wanted = requests(PARAMS, 3 * min(rows, 8), seed=rows)
    expected = run(make_worker(CPU, graphs=False, rows=rows), wanted, 0)
    assert run(make_worker(GPU, graphs=True, rows=rows), wanted, depth) == expected
    assert run(make_worker(GPU, graphs=False, rows=rows), wanted, depth) == expected


def test_rows_that_want_more_agree_too():
    wanted = requests(PARAMS[:2] + RICH, 12, seed=3)
    expected = run(make_worker(CPU, graphs=False), wanted, 0)
    for graphs in (True, False):
        found = run(make_worker(GPU, graphs=graphs), wanted, 1)
        for name, (tokens, chances, ends) in expected.items():
            assert found[name][0] == tokens
            assert found[name][2] == ends
            for a, b in zip(found[name][1], chances, strict=True):
                assert a.token_ids == b.token_ids
                assert a.rank == b.rank
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_a_step_waits_for_nothing():
    """Any copy or read that waits raises while plans are launched."""
    worker = make_worker(GPU, graphs=True)
    run(worker, requests(PARAMS, 3, seed=1), 1)  # whatever is made once
    launch = worker.launch

    def strict(plan):
        with warnings.catch_warnings(action="ignore"):  # that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    worker.launch = strict
    run(worker, requests(PARAMS + RICH[:3], 14, seed=2), 1)


def test_logits_that_are_not_numbers_fail_the_step():
    worker = make_worker(GPU, graphs=True)
    worker.model.mix.fill_(float("nan"))
    with pytest.raises(Exception, match="not finite"):
        run(worker, requests(PARAMS, 1, seed=1), 1)


def test_the_largest_step_is_measured():
    worker = make_worker(GPU, graphs=False)
    assert (
        0 < measure_step(worker.config, worker.model, GPU) < 1 << 28
    )  # the workspace of a library's product is most of it
