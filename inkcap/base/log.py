"""One logger for everything; role and rank stand in each line, and in the server the request that it is about.

A line is one line whatever a client sent: what is not printable is escaped.
"""

import json
import logging
import sys
import time
from contextvars import ContextVar

logger = logging.getLogger("inkcap")
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)  # of the request being answered


def start_logging(role: str, level: str = "info", form: str = "text") -> None:
    """Send log lines to stderr, as `time level [role] message` or as JSON objects. Calling it again replaces it all."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(role) if form == "json" else TextLines(role))
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def escaped(text: str) -> str:
    """`text` on one line, with what is not printable written as in a Python string."""
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() else c.encode("unicode_escape").decode() for c in text])


class TextLines(logging.Formatter):
    """`time level [role] message`; the lines of a traceback are indented, so that none can pass for a line of ours."""

    def __init__(self, role: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname)s [{role}] %(message)s", datefmt="%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, ei) -> str:  # pyright: ignore[reportMissingParameterType]
        return "\n".join([f"    {escaped(line)}" for line in super().formatException(ei).split("\n")])


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, role, message; request_id and traceback where there are such."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "role": self.role,
            "message": record.getMessage(),
        }
        if (identity := request_id.get()) is not None:
            line["request_id"] = identity
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)  # in ASCII, so that no character of a message ends a line
