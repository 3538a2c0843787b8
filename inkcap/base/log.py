"""One logger for everything; role and rank stand in each line."""

import logging
import sys

logger = logging.getLogger("inkcap")


def start_logging(role: str, level: str = "info") -> None:
    """Send log lines to stderr as `time level [role] message`. Calling it again replaces the role and the level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s.%(msecs)03d %(levelname)s [{role}] %(message)s", datefmt="%Y-%m-%dT%H:%M:%S")
    )
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
