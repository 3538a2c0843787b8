"""OpenTelemetry traces: one span a request, below the caller's, with what the generation took. Needs the extra `trace`.

The span carries sizes and times; prompts and answers never leave the process this way.
"""

import contextlib
import time
from collections.abc import Iterator

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from inkcap.server.generation import Run

CARRIED = (b"traceparent", b"tracestate")  # headers that name the caller's span


class Tracing:
    """Sends spans to `endpoint`, an OTLP address for HTTP, in the background. `close` sends the rest."""

    def __init__(self, endpoint: str, model: str) -> None:
        self.model = model
        self.provider = TracerProvider(resource=Resource.create({"service.name": "inkcap"}))
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self.tracer = self.provider.get_tracer("inkcap")
        self.propagator = TraceContextTextMapPropagator()

    @contextlib.contextmanager
    def span(self, scope: Scope) -> Iterator[None]:
        """The span of one HTTP request, until its last byte is handed over."""
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"] if name in CARRIED
        }
        asked = {"http.request.method": scope["method"], "url.path": scope["path"]}
        asked["gen_ai.request.id"] = scope["state"]["request_id"]
        with self.tracer.start_as_current_span(
            f"{scope['method']} {scope['path']}"[:100],
            context=self.propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes=asked,
            record_exception=False,  # its text may hold what a client sent
            set_status_on_exception=False,
        ):
            yield

    def end(self, status: int) -> None:
        """The status that the request of the current span was answered with."""
        span = get_current_span()
        span.set_attribute("http.response.status_code", status)
        if status >= 500:
            span.set_status(StatusCode.ERROR)

    def note(self, run: Run) -> None:
        """Write what a generation took into the current span; a response in the background has none any more."""
        span = get_current_span()
        if not (span.is_recording() and run.tracks):
            return
        params, usage = run.tracks[0].request.params, run.usage(sum(track.generated for track in run.tracks))
        first = min((track.first_at for track in run.tracks if track.generated), default=None)
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
        span.set_attributes(
            {
                "gen_ai.response.model": self.model,
                "gen_ai.request.max_tokens": run.tracks[0].request.max_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.n": params.n,
                "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
                "gen_ai.usage.cached_tokens": cached,
                "gen_ai.usage.completion_tokens": usage.completion_tokens,
                "gen_ai.latency.time_in_queue": max(track.queue_seconds for track in run.tracks),
                "gen_ai.latency.e2e": time.perf_counter() - run.started,
            }
        )
        if first is not None:
            span.set_attribute("gen_ai.latency.time_to_first_token", first - run.started)

    def close(self) -> None:
        """Send what is left. Blocks for some seconds at most."""
        self.provider.shutdown()
