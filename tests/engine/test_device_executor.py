"""Steps that a device works on while the next one begins."""

import threading

import pytest
from conftest import DEADLINE
from fakes import FakeRank

from inkcap.base.config import EngineConfig, ModelConfig
from inkcap.base.errors import CheckpointMismatch
from inkcap.base.request import SamplingParams
from inkcap.base.step import Chunk, Continue, RowSetup, StepPlan
from inkcap.engine.executor import DeviceExecutor

OPENED = RowSetup(row=0, tokens=[1, 2, 3], prompt_length=3, params=SamplingParams(), seed=5)


class Device(FakeRank):
    """A rank whose steps end when `done` is set."""

    def __init__(self, behaviour: str = "{}") -> None:
        super().__init__(EngineConfig(model=ModelConfig(path=behaviour)))
        self.done = threading.Event()
        self.begun = threading.Semaphore(0)

    def launch(self, plan):
        result = self.run(plan)
        self.begun.release()
        return Step(self, result)


class Step:
    def __init__(self, device, result):
        self.device, self.given = device, result

    def finish(self):
        assert self.device.done.wait(DEADLINE)
        if self.given.step == self.device.does.get("lost_at"):
            raise RuntimeError("the device lost it")
        return self.given


def test_a_step_begins_before_the_one_before_ends():
    device = Device()
    executor = DeviceExecutor(lambda: device)
    first = executor.submit(StepPlan(step=1, opened=[OPENED], work=[Chunk(0, 0, 3, True)]))
    second = executor.submit(StepPlan(step=2, work=[Continue(0)]))
    for _ in range(2):
        assert device.begun.acquire(timeout=DEADLINE)
    device.done.set()
    assert [first.result().step, second.result().step] == [1, 2]
    executor.close()


def test_a_step_that_finds_the_device_idle_is_begun_when_submit_returns():
    device = Device()
    executor = DeviceExecutor(lambda: device)
    step = executor.submit(StepPlan(step=1, opened=[OPENED], work=[Chunk(0, 0, 3, True)]))
    assert device.begun.acquire(blocking=False)
    device.done.set()
    for number in (2, 3):
        step.result()
        step = executor.submit(StepPlan(step=number, work=[Continue(0)]))
        assert device.begun.acquire(blocking=False)
    executor.close()


def test_what_fails_at_the_beginning_or_at_the_end_is_raised_by_the_result():
    for behaviour, message in (('{"fail_at": 1}', "a planted bug"), ('{"lost_at": 1}', "the device lost it")):
        device = Device(behaviour)
        device.done.set()
        executor = DeviceExecutor(lambda device=device: device)
        step = executor.submit(StepPlan(step=1, opened=[OPENED], work=[Chunk(0, 0, 3, True)]))
        with pytest.raises(RuntimeError, match=message):
            step.result()
        executor.close()


def test_what_loading_raises_is_raised():
    with pytest.raises(CheckpointMismatch, match="lacks 3 tensors"):
        DeviceExecutor(lambda: Device('{"setup": "mismatch"}'))
