"""Messages, tools and effort to a prompt's token ids. Control tokens are placed by id; text never becomes one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inkcap.base.errors import BadRequest, NotBuiltYet
from inkcap.base.turn import Start
from inkcap.chat import tokens
from inkcap.chat.effort import PREFIX, format_effort, states_effort
from inkcap.chat.replay import Prefix, Replays, said_by
from inkcap.chat.tokens import Tokenizer
from inkcap.chat.tools import DECLARE, call_payload, declaration, read_arguments

Message = Mapping[str, object]
_MEDIA = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
}


@dataclass(frozen=True, kw_only=True)
class RenderOptions:
    """What may differ between servers and requests. The defaults are the official renderer's and the checkpoints'."""

    tools_position: str = "first"  # first: tools, system text, effort; after-system: system text, tools, effort
    prime_model_role: bool = False  # end with the model's role token, as vLLM does
    continue_final_message: bool = False  # leave the last message, the assistant's, open


@dataclass(frozen=True)
class Rendered:
    """A prompt, and what the parser of its answer must know."""

    token_ids: list[int]
    start: Start
    tool_names: tuple[str, ...] = ()


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[object] | None = None,
    effort: float | None = None,
    options: RenderOptions | None = None,
    replays: Replays | None = None,
    salt: str = "",
) -> Rendered:
    """A prompt in the published token grammar from OpenAI chat messages.

    An effort message is added only when `effort` is given. Answers that `replays` knows, kept under `salt`, are given
    back by token. Raises BadRequest whose `param` is the path of the field,
    for instance `messages[3].content[1].type`, and NotBuiltYet for media parts.
    """
    options = options or RenderOptions()
    if not messages:
        raise BadRequest("messages is empty; a conversation has at least one message", "messages")
    if effort is not None and states_effort(messages):
        raise BadRequest(
            "the conversation has a system message that states the thinking effort, and the request states one too; "
            "leave out one of the two",
            "reasoning_effort",
        )
    writer = _Writer(tokenizer, replays, salt)
    declared = _declared(tools, messages)
    leading = next((i for i, message in enumerate(messages) if _role(message, i) not in _SYSTEM), len(messages))
    names: tuple[str, ...] = ()
    if options.tools_position == "after-system":
        for i in range(leading):
            writer.message(messages[i], i)
    if declared:
        text, names = declaration(declared)
        writer.block(tokens.SYSTEM, tokens.XML, text, "tools", author=DECLARE)
    if options.tools_position != "after-system":
        for i in range(leading):
            writer.message(messages[i], i)
    if effort is not None:
        writer.block(tokens.SYSTEM, tokens.TEXT, PREFIX + format_effort(effort), "reasoning_effort")
    for i in range(leading, len(messages)):
        writer.message(messages[i], i)
    if options.continue_final_message:
        start = writer.reopen(len(messages) - 1, _role(messages[-1], len(messages) - 1))
    else:
        writer.end_turn()
        start = Start.BETWEEN
        if options.prime_model_role:
            writer.ids.append(tokens.MODEL)
            start = Start.HEADER
    return Rendered(writer.ids, start, names)


_SYSTEM = frozenset(("system", "developer"))
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def _role(message: Message, i: int) -> str:
    if not isinstance(message, Mapping):
        raise BadRequest(f"messages[{i}] is not an object", f"messages[{i}]")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRequest(f"messages[{i}].role is {role!r:.80}; use one of {', '.join(_ROLES)}", f"messages[{i}].role")
    return role


def _declared(tools: Sequence[object] | None, messages: Sequence[Message]) -> list[object]:
    """The request's tools and those that developer messages bring."""
    if not isinstance(tools, list | tuple | None):
        raise BadRequest("tools is not a list", "tools")
    declared = list(tools or ())
    for i, message in enumerate(messages):
        if _role(message, i) == "developer" and (own := message.get("tools")) is not None:
            if not isinstance(own, list):
                raise BadRequest(f"messages[{i}].tools is not a list", f"messages[{i}].tools")
            declared += own
    return declared


class _Writer:
    """Appends messages to a list of ids."""

    def __init__(self, tokenizer: Tokenizer, replays: Replays | None, salt: str) -> None:
        self.ids: list[int] = []
        self._replays = replays
        self._before = Prefix(salt)
        self._tokenizer = tokenizer
        self._turn_open = False  # model messages stand at the end, without their end of turn
        self._last_kind = 0
        self._call_names: dict[str, str] = {}  # tool_call_id -> tool

    def block(self, role: int, kind: int, text: str, param: str, author: str = "") -> None:
        """One message of the token grammar."""
        self.ids.append(role)
        if author:
            self.ids += self._tokenizer.encode_text(author, param)
        self.ids.append(kind)
        self.ids += self._tokenizer.encode_text(text, param)
        self.ids.append(tokens.END_MESSAGE)
        self._last_kind = kind

    def end_turn(self) -> None:
        if self._turn_open:
            self.ids.append(tokens.END_TURN)
            self._turn_open = False

    def reopen(self, i: int, role: str) -> Start:
        """Take the end off the last message, so that the model goes on inside it."""
        where = f"messages[{i}]"
        if role != "assistant":
            raise BadRequest(
                f"continue_final_message continues the assistant's message, but {where}.role is {role!r}",
                f"{where}.role",
            )
        if not self._turn_open or self._last_kind not in (tokens.TEXT, tokens.THINKING):
            raise BadRequest(f"{where} does not end in text, so there is nothing to continue", f"{where}.content")
        self.ids.pop()
        return Start.TEXT if self._last_kind == tokens.TEXT else Start.THINKING

    def message(self, message: Message, i: int) -> None:
        """One message of the API: any number of messages of the token grammar."""
        role, where = _role(message, i), f"messages[{i}]"
        if role == "assistant":
            self._assistant(message, where)
            return
        self.end_turn()
        if role in ("tool", "function"):
            self._tool_result(message, where)
            return
        content = message.get("content")
        if not isinstance(content, str | list) or content == []:
            raise BadRequest(f"{where}.content is {content!r:.40}; use a string or a list of parts", f"{where}.content")
        code = tokens.USER if role == "user" else tokens.SYSTEM
        for text, path in _texts(content, f"{where}.content", media=role == "user"):
            self.block(code, tokens.TEXT, text, path)

    def _replayed(self, message: Message) -> list[int] | None:
        """The tokens of an answer as they were sampled here, if they were; with its end of turn."""
        if self._replays is None or self._turn_open or (said := said_by(message)) is None:
            return None
        return self._replays.find(self._before.digest(self.ids), said)

    def _assistant(self, message: Message, where: str) -> None:
        before = len(self.ids)
        sampled = self._replayed(message)
        key = "reasoning" if message.get("reasoning") is not None else "reasoning_content"
        if thought := _string(message.get(key), f"{where}.{key}"):
            self.block(tokens.MODEL, tokens.THINKING, thought, f"{where}.{key}")
        content = message.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list | None):
            raise BadRequest(f"{where}.content is not a string or a list of parts", f"{where}.content")
        for j, part in enumerate(content or ()):
            kind, text, path = _assistant_part(part, f"{where}.content[{j}]")
            if text:
                self.block(tokens.MODEL, kind, text, path)
        if refusal := _string(message.get("refusal"), f"{where}.refusal"):
            self.block(tokens.MODEL, tokens.TEXT, refusal, f"{where}.refusal")
        self._calls(message, where)
        if sampled is not None:  # the message was rendered for its checks and the names of its calls
            self.ids[before:] = sampled[:-1]
        self._turn_open = self._turn_open or len(self.ids) > before

    def _calls(self, message: Message, where: str) -> None:
        calls = message.get("tool_calls")
        if not isinstance(calls, list | None):
            raise BadRequest(f"{where}.tool_calls is not a list", f"{where}.tool_calls")
        for j, call in enumerate(calls or ()):
            path = f"{where}.tool_calls[{j}]"
            if not isinstance(call, dict) or call.get("type", "function") != "function":
                raise BadRequest(f"{path} is not a call of a function", path)
            name = self._call(call.get("function"), f"{path}.function")
            if isinstance(identity := call.get("id"), str):
                self._call_names[identity] = name
        if message.get("function_call") is not None:
            self._call(message["function_call"], f"{where}.function_call")

    def _call(self, function: object, where: str) -> str:
        if not isinstance(function, dict):
            raise BadRequest(f"{where} is missing or not an object", where)
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise BadRequest(f"{where}.name is missing or not a string", f"{where}.name")
        path = f"{where}.arguments"
        payload = call_payload(name, read_arguments(function.get("arguments"), path), path)
        self.block(tokens.MODEL, tokens.CALL_JSON, payload, path, author=name)
        return name

    def _tool_result(self, message: Message, where: str) -> None:
        identity, name = message.get("tool_call_id"), message.get("name")
        if isinstance(identity, str) and identity in self._call_names:
            name = self._call_names[identity]
        if not isinstance(name, str) or not name:
            raise BadRequest(
                f"{where} does not say which tool it answers: tool_call_id {identity!r:.80} belongs to no earlier "
                "call, and there is no name",
                f"{where}.tool_call_id",
            )
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise BadRequest(f"{where}.content is not a string or a list of parts", f"{where}.content")
        kind = tokens.TOOL_ERROR if message.get("is_error") is True else tokens.TEXT
        # A call without a result would leave the model waiting, so an empty result is still a message.
        for text, path in _texts(content or "", f"{where}.content", media=True):
            self.block(tokens.TOOL, kind, text, path, author=name)


def _texts(content: str | list[object], where: str, media: bool) -> list[tuple[str, str]]:
    """Text of each part with the part's path. `media`: the role may have images and audio, though not yet here."""
    if isinstance(content, str):
        return [(content, where)]
    found = []
    for j, part in enumerate(content):
        path = f"{where}[{j}]"
        if isinstance(part, str):
            found.append((part, path))
            continue
        kind = _part_type(part, path)
        if kind in ("text", "input_text", "output_text"):
            found.append((_part_text(part, "text", path), f"{path}.text"))
        elif kind in _MEDIA and media:
            raise NotBuiltYet(f"{path} is an {_MEDIA[kind]} part; this server takes text only", f"{path}.type")
        else:
            raise BadRequest(f"{path}.type is {kind!r:.80}, which this role cannot have; use 'text'", f"{path}.type")
    return found


def _assistant_part(part: object, path: str) -> tuple[int, str, str]:
    """Kind, text and path of one part of an assistant message."""
    if isinstance(part, str):
        return tokens.TEXT, part, path
    kind = _part_type(part, path)
    if kind == "thinking":
        return tokens.THINKING, _part_text(part, "thinking", path), f"{path}.thinking"
    if kind == "refusal":
        return tokens.TEXT, _part_text(part, "refusal", path), f"{path}.refusal"
    if kind in ("text", "output_text"):
        return tokens.TEXT, _part_text(part, "text", path), f"{path}.text"
    raise BadRequest(f"{path}.type is {kind!r:.80}; an assistant has 'text', 'thinking' and 'refusal'", f"{path}.type")


def _part_type(part: object, path: str) -> str:
    if not isinstance(part, Mapping):
        raise BadRequest(f"{path} is not an object", path)
    kind = part.get("type")
    if not isinstance(kind, str):
        raise BadRequest(f"{path}.type is missing or not a string", f"{path}.type")
    return kind


def _part_text(part: object, key: str, path: str) -> str:
    text = part.get(key) if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise BadRequest(f"{path}.{key} is missing or not a string", f"{path}.{key}")
    return text


def _string(value: object, path: str) -> str:
    if not isinstance(value, str | None):
        raise BadRequest(f"{path} is not a string", path)
    return value or ""
