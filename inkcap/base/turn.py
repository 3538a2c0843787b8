"""What a turn of the model may be: the part of a request that the sampling side enforces. Plain data, no torch."""

from enum import StrEnum

from msgspec import Struct, field


class Start(StrEnum):
    """Where in the grammar of messages a prompt leaves off."""

    BETWEEN = "between"  # after a whole message
    HEADER = "header"  # after the model's role token
    TEXT = "text"  # inside an open text message
    THINKING = "thinking"  # inside an open thinking message
    RAW = "raw"  # there are no messages: a bare continuation, all of it text


class TurnRules(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What may stand in a turn. Grammars are texts for `base.matching`; they hold what stands between the control
    tokens of one message.

    A turn is *strict* when it must answer in a given form; then it is at most one thinking message, followed by one
    text or by calls. Otherwise messages come in any order, and only what a call says is held to a grammar.
    """

    start: Start = Start.BETWEEN
    text: str = ""  # grammar of the text; empty: any text
    strict: bool = False
    texts: bool = True  # whether a strict turn may answer in text
    calls: dict[str, str] = field(default_factory=dict)  # tool -> grammar of a call's payload
    closed: bool = False  # a turn that is not strict may call these tools only
    least_calls: int = 0
    most_calls: int | None = None
    thinking: int | None = None  # tokens of thinking the turn may have; None: any number
