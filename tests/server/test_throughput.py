"""The line in the log every ten seconds."""

import asyncio

from inkcap.base.errors import EngineFault
from inkcap.base.request import EngineStats
from inkcap.server.service import Service
from inkcap.server.throughput import line, report


def test_line():
    before = EngineStats(prompt_tokens=100, generated_tokens=50, prefix_queries=10, prefix_hits=10)
    after = EngineStats(
        prompt_tokens=300,
        generated_tokens=250,
        running=3,
        waiting=2,
        cache_usage=0.25,
        prefix_queries=210,
        prefix_hits=60,
    )
    assert line(before, after, 10.0) == (
        "prompt 20.0 tok/s, generation 20.0 tok/s, running 3, waiting 2, cache 25.0%, prefix hits 25.0%"
    )
    assert line(after, after, 10.0) is not None  # something runs, though nothing came out
    idle = EngineStats(prompt_tokens=300, generated_tokens=250)
    assert line(idle, idle, 10.0) is None


def test_report_goes_on_whatever_the_engine_says(engine, config, tokenizer, caplog, monkeypatch):
    monkeypatch.setattr("inkcap.base.log.logger.propagate", True)
    caplog.set_level("INFO", "inkcap")
    answers = [EngineFault("dying"), EngineStats(generated_tokens=7, running=1)]

    async def stats():
        answer = answers.pop(0) if answers else EngineStats(generated_tokens=7)
        if isinstance(answer, Exception):
            raise answer
        return answer

    engine.stats = stats

    async def watch():
        task = asyncio.ensure_future(report(Service(engine, config, tokenizer), every_s=0.001))
        async with asyncio.timeout(10):
            while "generation" not in caplog.text:
                await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(watch())
    assert "running 1" in caplog.text
