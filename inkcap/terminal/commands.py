"""Slash commands of the terminal chat: each takes the conversation and the rest of its line, and says something."""

import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from inkcap.terminal.conversation import Conversation

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SETTINGS: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "max_tokens": int,
    "seed": int,
}


class Next(Enum):
    """What the loop must do after a command that is more than words."""

    LEAVE = "leave"
    AGAIN = "ask again"


Outcome = str | Next


class Command(NamedTuple):
    words: str  # what may follow the name
    meaning: str
    run: Callable[[Conversation, str], Outcome]


def parse_effort(text: str) -> str | float:
    """A name or a number from 0 to 1. Raises ValueError with a message for the user."""
    if text in EFFORTS:
        return text
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ValueError(f"effort is a number from 0 to 1 or one of {', '.join(EFFORTS)}; not {text!r}")
    return value


def set_effort(conversation: Conversation, rest: str) -> Outcome:
    conversation.effort = parse_effort(rest) if rest else None
    return f"effort {'as the server sets it' if conversation.effort is None else conversation.effort}"


def set_parameter(conversation: Conversation, rest: str) -> Outcome:
    name, _, value = rest.partition(" ")
    if not name:
        return ", ".join(f"{name} {value}" for name, value in conversation.settings.items()) or "nothing is set"
    if name not in SETTINGS:
        raise ValueError(f"no setting {name}; there are {', '.join(SETTINGS)}")
    if not value:
        conversation.settings.pop(name, None)
        return f"{name} as the server sets it"
    try:
        conversation.settings[name] = SETTINGS[name](value)
    except ValueError:
        raise ValueError(f"{name} is a number; not {value!r}") from None
    return f"{name} {conversation.settings[name]}"


def set_system(conversation: Conversation, rest: str) -> Outcome:
    conversation.system = rest
    return "system message set" if rest else "no system message"


def set_model(conversation: Conversation, rest: str) -> Outcome:
    conversation.model = rest or None
    return f"model {rest or 'as the server chooses'}"


def set_thinking(conversation: Conversation, rest: str) -> Outcome:
    if rest not in ("on", "off", ""):
        raise ValueError(f"thinking is on or off; not {rest!r}")
    conversation.thinking = rest == "on" if rest else not conversation.thinking
    return f"thinking is {'shown' if conversation.thinking else 'hidden'}"


def set_tools(conversation: Conversation, rest: str) -> Outcome:
    tools = json.loads(Path(rest).expanduser().read_text(encoding="utf-8")) if rest else []
    if not isinstance(tools, list):
        raise ValueError(f"{rest} is no JSON list of tools")
    conversation.tools = tools
    return f"{len(tools)} tools; after a call, the next line is its result" if tools else "no tools"


def reset(conversation: Conversation, _: str) -> Outcome:
    conversation.messages.clear()
    return "a new conversation"


def save(conversation: Conversation, rest: str) -> Outcome:
    if not rest:
        raise ValueError("/save needs the name of a file")
    content = {"system": conversation.system, "messages": conversation.messages}
    Path(rest).expanduser().write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return f"{len(conversation.messages)} messages in {rest}"


def load(conversation: Conversation, rest: str) -> Outcome:
    if not rest:
        raise ValueError("/load needs the name of a file")
    content = json.loads(Path(rest).expanduser().read_text(encoding="utf-8"))
    messages = content.get("messages") if isinstance(content, dict) else None
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError(f"{rest} holds no conversation that /save wrote")
    conversation.messages, conversation.system = messages, str(content.get("system") or "")
    return f"{len(messages)} messages"


def show_help(_: Conversation, __: str) -> Outcome:
    width = max(len(f"/{name} {command.words}") for name, command in COMMANDS.items()) + 2
    lines = [f"{f'/{name} {command.words}':{width}}{command.meaning}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, 'Ctrl-C stops an answer. A line of """ begins and ends a message of several lines.'])


COMMANDS = {
    "help": Command("", "shows this", show_help),
    "quit": Command("", "leaves, as Ctrl-D does", lambda _, __: Next.LEAVE),
    "reset": Command("", "starts a new conversation", reset),
    "retry": Command("", "asks for another answer to the last question", lambda _, __: Next.AGAIN),
    "effort": Command("[VALUE]", f"thinking effort: 0 to 1, or {', '.join(EFFORTS)}", set_effort),
    "thinking": Command("[on|off]", "shows or hides thinking", set_thinking),
    "system": Command("[TEXT]", "sets the system message", set_system),
    "set": Command("[NAME [VALUE]]", f"sampling: {', '.join(SETTINGS)}", set_parameter),
    "tools": Command("[FILE]", "declares the tools of a JSON list", set_tools),
    "model": Command("[NAME]", "asks another model of the server", set_model),
    "stats": Command("", "figures of the last answer", lambda conversation, _: conversation.figures),
    "save": Command("FILE", "writes the conversation as JSON", save),
    "load": Command("FILE", "goes on with a conversation that was saved", load),
}
ALIASES = {"?": "help", "q": "quit", "exit": "quit", "new": "reset"}


def carry_out(conversation: Conversation, line: str) -> Outcome:
    """What a line that begins with a slash does or says. Mistakes become words, never exceptions."""
    name, _, rest = line[1:].strip().partition(" ")
    command = COMMANDS.get(ALIASES.get(name, name))
    if command is None:
        return f"no command /{name}; /help lists them"
    try:
        return command.run(conversation, rest.strip())
    except (OSError, ValueError) as error:
        return str(error)


def completions(text: str) -> list[str]:
    """Commands that begin with `text`, for the tab key."""
    return [f"/{name} " for name in COMMANDS if f"/{name}".startswith(text)] if text.startswith("/") else []
