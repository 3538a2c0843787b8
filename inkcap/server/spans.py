"""What the server asks of a tracer, and the one place that loads it: OpenTelemetry is needed only where it is used."""

import importlib
from contextlib import AbstractContextManager
from typing import Protocol

from starlette.types import Scope

from inkcap.base.errors import ConfigInvalid
from inkcap.server.generation import Run


class Spans(Protocol):
    """A tracer of requests; see `tracing.Tracing`."""

    def span(self, scope: Scope) -> AbstractContextManager[None]:
        """The span of one HTTP request, until its last byte is handed over."""
        ...

    def end(self, status: int) -> None:
        """The status that the request of the current span was answered with."""
        ...

    def note(self, run: Run) -> None:
        """Write what a generation took into the current span."""
        ...

    def close(self) -> None:
        """Send what is left. Blocks for some seconds at most."""
        ...


def start_tracing(endpoint: str, model: str) -> Spans:
    """A tracer that sends to `endpoint`. Raises ConfigInvalid where OpenTelemetry is not installed."""
    try:
        module = importlib.import_module("inkcap.server.tracing")
    except ImportError as error:
        raise ConfigInvalid(
            f"server.trace_endpoint needs OpenTelemetry ({error}): pip install 'inkcap[trace]'"
        ) from None
    return module.Tracing(endpoint, model)
