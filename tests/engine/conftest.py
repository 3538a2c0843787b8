"""Engines to test with: fake ranks behind the real loop and scheduler, and a small real model."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from inkcap.base.config import CacheConfig, EngineConfig, ModelConfig, SchedConfig, ServerConfig
from inkcap.base.errors import EngineFault

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
DEADLINE = 60.0  # seconds: a test that waits longer has failed


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A real model with a small vocabulary: windows, relative bias, log scaling and experts are all at work."""
    from inkcap.models.inkling.demo import DemoShape, write  # torch: only for tests that want a model

    directory = tmp_path_factory.mktemp("checkpoint") / "demo"
    shape = DemoShape(
        vocabulary=500,
        padded_vocabulary=512,
        hidden=32,
        layers=4,
        global_every=2,
        dense=1,
        head_dim=8,
        extent=24,
        floor=32,
        dense_width=64,
        expert_width=16,
        max_length=512,
        shards=1,
    )
    write(directory, seed=1, shape=shape)
    return directory


def config(path, *, memory_bytes=16 << 20, tp=1, prefix=True, deterministic=False, device="cpu", kv="auto", **sched):
    """An engine on one thread; in float32 on a CPU, in bfloat16 on a GPU."""
    base = EngineConfig(
        model=ModelConfig(path=str(path), device=device, threads=1, deterministic=deterministic),
        cache=CacheConfig(memory_bytes=memory_bytes, prefix=prefix, keep_every=64, dtype=kv),
        sched=SchedConfig(**sched),
        server=ServerConfig(drain_seconds=0.0),
    )
    return replace(base, parallel=replace(base.parallel, tp=tp))


def run(coroutine):
    """Run an asyncio test within the deadline."""

    async def limited():
        async with asyncio.timeout(DEADLINE):
            return await coroutine

    return asyncio.run(limited())


async def until(condition):
    """Wait until something holds; the deadline is that of `run`."""
    while not condition():
        await asyncio.sleep(0.005)


async def settled(client):
    """The stats of an engine once nothing waits or runs."""
    while True:
        stats = await client.stats()
        if not stats.running and not stats.waiting:
            return stats
        await asyncio.sleep(0.005)


async def outcome(stream):
    """All tokens of a stream, and its finish or the fault that ended it."""
    tokens, finish = [], None
    try:
        async for part in stream:
            for delta in part:
                tokens += delta.tokens
                finish = delta.finish
    except EngineFault as fault:
        finish = fault
    return tokens, finish
