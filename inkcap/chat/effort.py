"""Thinking effort: names and numbers, what a prompt says about it, and which of several settings counts."""

import math
import re
from collections.abc import Mapping, Sequence

from inkcap.base.errors import BadRequest

NAMES = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.7, "high": 0.9, "xhigh": 0.99, "max": 0.99}
PREFIX = "Thinking effort level: "
_STATED = re.compile(re.escape(PREFIX) + r"\d+(\.\d+)?\s*")


def parse_effort(value: object, param: str = "reasoning_effort") -> float:
    """A name or a number from 0 to 1 as a number. Raises BadRequest for anything else."""
    if isinstance(value, str) and value in NAMES:
        return NAMES[value]
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    raise BadRequest(f"{param} is {value!r:.80}; use a number from 0 to 1 or one of {', '.join(NAMES)}", param)


def format_effort(effort: float) -> str:
    """Two decimals at most, no trailing zeros.

    Rounds as the official renderer was seen to: to thousandths, then to hundredths, halves to even; so 0.005 and
    0.0054 are `0`, 0.0146 is `0.02`.
    """
    if not (math.isfinite(effort) and 0 <= effort <= 1):
        raise BadRequest(f"thinking effort is {effort}; it goes from 0 to 1", "reasoning_effort")
    hundredths = round(round(effort * 1000) / 1000 * 100)
    return f"{hundredths / 100:.2f}".rstrip("0").rstrip(".")


def states_effort(messages: Sequence[object]) -> bool:
    """Whether a system message of the conversation is an effort message already."""
    for message in messages:
        if not isinstance(message, Mapping) or message.get("role") not in ("system", "developer"):
            continue
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
        if any(isinstance(text, str) and _STATED.fullmatch(text) for text in texts):
            return True
    return False


def choose_effort(
    messages: Sequence[object],
    default: float | None,
    reasoning_effort: object = None,
    template_kwargs: Mapping[str, object] | None = None,
) -> float | None:
    """The effort to state in a prompt: what the request asks for, else `default`; None when there is nothing to add.

    A request asks by `reasoning_effort`, else `chat_template_kwargs.reasoning_effort`, else
    `chat_template_kwargs.enable_thinking` or `.thinking`, where false means none and true means the default. The
    default is not added to a conversation that states its effort itself. Raises BadRequest naming the field.
    """
    kwargs = template_kwargs or {}
    if reasoning_effort is not None:
        return parse_effort(reasoning_effort)
    if (asked := kwargs.get("reasoning_effort")) is not None:
        return parse_effort(asked, "chat_template_kwargs.reasoning_effort")
    for key in ("enable_thinking", "thinking"):
        if (wanted := kwargs.get(key)) is None:
            continue
        if not isinstance(wanted, bool):
            raise BadRequest(
                f"chat_template_kwargs.{key} is {wanted!r:.80}; use true or false", f"chat_template_kwargs.{key}"
            )
        if not wanted:
            return NAMES["none"]
        break
    return None if states_effort(messages) else default
