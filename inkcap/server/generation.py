"""The sequences of one HTTP request: submitted together, read as one stream, aborted when nobody wants them."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from inkcap.base.errors import Draining, EngineFault
from inkcap.base.request import Finish, GenerateRequest, Logprobs, TokenDelta
from inkcap.engine.api import Engine
from inkcap.server.metrics import Metrics
from inkcap.server.replies import Usage, usage_of

Arrived = list[tuple[int, list[TokenDelta]]]  # per sequence that has something: its index, and what came


class Track:
    """What is known of one sequence so far."""

    __slots__ = (
        "cached_tokens",
        "ended",
        "first_at",
        "generated",
        "last_at",
        "preemptions",
        "prompt_logprobs",
        "queue_seconds",
        "request",
        "source",
    )

    def __init__(self, request: GenerateRequest, source: AsyncIterator[list[TokenDelta]]) -> None:
        self.request = request
        self.source = source
        self.generated = 0
        self.cached_tokens = 0
        self.queue_seconds = 0.0
        self.preemptions = 0
        self.prompt_logprobs: list[Logprobs | None] | None = None
        self.first_at = 0.0
        self.last_at = 0.0
        self.ended = False


class Run:
    """Sequences of one request. `cut_off` says why the server ended it, when it did."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        requests: list[GenerateRequest],
        runs: "set[Run]",
        watch: "Callable[[Run], None] | None" = None,
    ) -> None:
        """Submit all or none. `watch` is called at the end. Raises QueueFull, Draining or EngineFault."""
        self.engine = engine
        self.metrics = metrics
        self.runs = runs
        self.watch = watch
        self.cut_off: str | None = None
        self.started = time.perf_counter()
        self.tracks: list[Track] = []
        try:
            for request in requests:
                self.tracks.append(Track(request, engine.submit(request)))
        except Exception:
            self.close()
            raise
        runs.add(self)
        for request in requests:
            metrics.prompt_tokens.observe(len(request.token_ids))
            metrics.max_tokens.observe(request.max_tokens)

    async def arrivals(self) -> AsyncGenerator[Arrived, None]:
        """Each item is all that came since the last one was taken. Closing it aborts what still runs."""
        try:
            if len(self.tracks) == 1:
                track = self.tracks[0]
                async for deltas in track.source:
                    self.note(track, deltas)
                    yield [(0, deltas)]
                    if track.ended:
                        break
            else:
                async for arrived in self.merged():
                    yield arrived
        finally:
            self.close()

    async def merged(self) -> AsyncGenerator[Arrived, None]:
        waiting: dict[int, list[TokenDelta]] = {}
        wake = asyncio.Event()

        async def pump(index: int, track: Track) -> None:
            async for deltas in track.source:
                waiting.setdefault(index, []).extend(deltas)
                wake.set()

        pumps = [asyncio.ensure_future(pump(index, track)) for index, track in enumerate(self.tracks)]
        for task in pumps:
            task.add_done_callback(lambda _: wake.set())
        try:
            while not all(track.ended for track in self.tracks):
                await wake.wait()
                wake.clear()
                for task in pumps:
                    if task.done():
                        task.result()  # a fault of the engine surfaces here
                arrived = [(i, deltas) for i, deltas in sorted(waiting.items()) if not self.tracks[i].ended]
                waiting.clear()
                for index, deltas in arrived:
                    self.note(self.tracks[index], deltas)
                if arrived:
                    yield arrived
                elif all(task.done() for task in pumps):
                    break
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def note(self, track: Track, deltas: list[TokenDelta]) -> None:
        """Count what came. Raises EngineFault for a sequence that failed, Draining for one the server cut off."""
        now = time.perf_counter()
        count = 0
        for delta in deltas:
            count += len(delta.tokens)
            if delta.cached_tokens is not None:
                track.cached_tokens = delta.cached_tokens
                track.queue_seconds = delta.queue_seconds or 0.0
            track.preemptions += delta.preemptions
            if delta.prompt_logprobs is not None:
                track.prompt_logprobs = delta.prompt_logprobs
        if count:
            if track.generated:
                self.metrics.inter_token.observe((now - track.last_at) / count, count)
            else:
                track.first_at = now
                self.metrics.first_token.observe(now - self.started)
            track.generated += count
            track.last_at = now
        finish = deltas[-1].finish
        if finish is not None:
            self.finish(track, finish)
            if finish is Finish.ERROR:
                raise EngineFault(f"the engine failed on this request: {deltas[-1].error}")
            if finish is Finish.ABORT and self.cut_off is not None:
                raise Draining(self.cut_off)

    def usage(self, completion: int, reasoning: int | None = None) -> Usage:
        """Tokens of the request. Each prompt counts once, however many sequences continue it."""
        firsts = self.tracks[:: self.tracks[0].request.params.n]
        prompt = sum(len(track.request.token_ids) for track in firsts)
        return usage_of(prompt, completion, sum(track.cached_tokens for track in firsts), reasoning)

    def stop(self, index: int) -> None:
        """A stop string ended this sequence: the engine need not go on."""
        track = self.tracks[index]
        if not track.ended:
            self.finish(track, Finish.STOP)
            self.engine.abort(track.request.request_id)

    def cut(self, why: str) -> None:
        """The server ends this request: its client gets `why` as a 503, or as an error event."""
        self.cut_off = why
        self.abort()

    def abort(self) -> None:
        """End it early: the sequences that still run end with Finish.ABORT."""
        for track in self.tracks:
            if not track.ended:
                self.engine.abort(track.request.request_id)

    def finish(self, track: Track, reason: Finish) -> None:
        track.ended = True
        now = time.perf_counter()
        self.metrics.count_finish(reason.value)
        if reason in (Finish.STOP, Finish.LENGTH):
            self.metrics.end_to_end.observe(now - self.started)
            self.metrics.generation_tokens.observe(track.generated)
            self.metrics.preemptions.observe(track.preemptions)
            if track.generated:
                self.metrics.queue.observe(track.queue_seconds)
                self.metrics.prefill.observe(max(0.0, track.first_at - self.started - track.queue_seconds))
                self.metrics.inference.observe(max(0.0, track.last_at - self.started - track.queue_seconds))
            if track.generated > 1:
                decode = track.last_at - track.first_at
                self.metrics.decode.observe(decode)
                self.metrics.per_output_token.observe(decode / (track.generated - 1))

    def close(self) -> None:
        """Abort what still runs, and leave the set of open runs. May be called again."""
        self.runs.discard(self)
        for track in self.tracks:
            if not track.ended:
                self.finish(track, Finish.ABORT)
                self.engine.abort(track.request.request_id)
        if self.watch is not None:
            watch, self.watch = self.watch, None
            watch(self)
