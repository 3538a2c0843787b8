"""One line in the log every ten seconds while there is work: tokens per second, sequences, cache."""

import asyncio
import time

from inkcap.base.errors import EngineFault
from inkcap.base.log import logger
from inkcap.base.request import EngineStats
from inkcap.server.service import Service

EVERY_SECONDS = 10.0


def line(before: EngineStats, after: EngineStats, seconds: float) -> str | None:
    """What happened between two looks at the engine; None when nothing did."""
    prompt = after.prompt_tokens - before.prompt_tokens
    generated = after.generated_tokens - before.generated_tokens
    if not (prompt or generated or after.running or after.waiting):
        return None
    looked_up = after.prefix_queries - before.prefix_queries
    hit = (after.prefix_hits - before.prefix_hits) / looked_up if looked_up else 0.0
    return (
        f"prompt {prompt / seconds:.1f} tok/s, generation {generated / seconds:.1f} tok/s, "
        f"running {after.running}, waiting {after.waiting}, cache {after.cache_usage:.1%}, prefix hits {hit:.1%}"
    )


async def report(service: Service, every_s: float = EVERY_SECONDS) -> None:
    """Log until cancelled."""
    before, looked = EngineStats(), time.monotonic()
    while True:
        await asyncio.sleep(every_s)
        if service.engine.info is None or service.engine.fault is not None:
            continue
        try:
            after = await service.engine.stats()
        except EngineFault:
            continue  # it died while we asked; the server's end is decided elsewhere
        now = time.monotonic()  # a busy engine answers between two steps, so this is later than asked for
        if text := line(before, after, now - looked):
            logger.info(text)
        before, looked = after, now
