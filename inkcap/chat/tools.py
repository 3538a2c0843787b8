"""Tool declarations and tool calls: what they look like in a prompt, and what can be read out of a sampled one."""

import html
import math
import re
import secrets
from collections.abc import Collection, Sequence

import msgspec

from inkcap.base.errors import BadRequest

DECLARE = "tool_declare"  # author of the system message that declares tools
MAX_DEPTH = 100  # of nested arrays and objects in schemas and arguments
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class Call(msgspec.Struct, frozen=True):
    """One tool call of a turn, complete. `arguments` is the JSON object as the model wrote it."""

    index: int  # counts the calls of a turn from 0
    id: str
    name: str
    arguments: str


class CallStart(msgspec.Struct, frozen=True):
    """A tool call that comes in pieces begins."""

    index: int
    id: str
    name: str


class CallPiece(msgspec.Struct, frozen=True):
    """A piece of the arguments of a call that has begun."""

    index: int
    text: str


class ArgumentReader:
    """Finds the arguments in a call's payload as it comes. Only for payloads that a grammar holds to their form."""

    def __init__(self, name: str) -> None:
        self._opening = msgspec.json.encode({"name": name})[:-1] + b',"args":'
        self._held = b""
        self._depth = 0
        self._string = self._escaped = False
        self.begun = False  # the arguments have begun
        self.complete = False
        self.other = False  # the payload has another form: these are no arguments to be streamed

    def feed(self, data: bytes) -> bytes:
        """Bytes of the arguments in `data`, the payload's next."""
        if not self.begun:
            self._held += data
            if not self._held.startswith(self._opening[: len(self._held)]):
                self.other = True
            if len(self._held) <= len(self._opening) or self.other:
                return b""
            data = self._held[len(self._opening) :]
            self.begun = True
        end = self._end(data)
        return data[:end]

    def _end(self, data: bytes) -> int:
        """How much of `data` belongs to the arguments, which are one JSON object."""
        if self.complete:
            return 0
        for i, byte in enumerate(data):
            if self._string:
                if self._escaped:
                    self._escaped = False
                elif byte == 0x5C:
                    self._escaped = True
                elif byte == 0x22:
                    self._string = False
            elif byte == 0x22:
                self._string = True
            elif byte in b"{[":
                self._depth += 1
            elif byte in b"}]":
                self._depth -= 1
                if self._depth == 0:
                    self.complete = True
                    return i + 1
        return len(data)


def declaration(tools: Sequence[object], param: str = "tools") -> tuple[str, tuple[str, ...]]:
    """The JSON that declares `tools` (OpenAI form) in a prompt, keys sorted at every depth, and the tools' names.

    Raises BadRequest naming the field, for instance `tools[2].function.name`.
    """
    items: dict[str, dict[str, object]] = {}
    for i, tool in enumerate(tools):
        where = f"{param}[{i}]"
        if not isinstance(tool, dict):
            raise BadRequest(f"{where} is not an object", where)
        if tool.get("type", "function") != "function":
            raise BadRequest(f"{where}.type is {tool.get('type')!r:.80}; only 'function' is known", f"{where}.type")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise BadRequest(f"{where}.function is missing or not an object", f"{where}.function")
        name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise BadRequest(
                f"{where}.function.name is {name!r:.160}; use 1 to 128 letters, digits, '_', '.' or '-'",
                f"{where}.function.name",
            )
        if name in items:
            raise BadRequest(f"{where}.function.name is {name!r}, which another tool has", f"{where}.function.name")
        if not isinstance(description, str | None):
            raise BadRequest(f"{where}.function.description is not a string", f"{where}.function.description")
        if not isinstance(parameters, dict | None):
            raise BadRequest(f"{where}.function.parameters is not an object", f"{where}.function.parameters")
        schema = _writable(parameters or {}, f"{where}.function.parameters", exponent="e+")
        items[name] = {"description": description or "", "name": name, "parameters": schema, "type": "function"}
    return _write(list(items.values()), param, sort=True), tuple(items)


def call_payload(name: str, arguments: dict[str, object], param: str) -> str:
    """`{"name":…,"args":{…}}` of a call made elsewhere: the arguments' own keys sorted, deeper ones as they came."""
    ordered = {key: arguments[key] for key in sorted(arguments)}
    return _write({"name": name, "args": _writable(ordered, param, exponent="e")}, param, sort=False)


def read_arguments(value: object, param: str) -> dict[str, object]:
    """A call's arguments from a request: a JSON object in a string, an object, or nothing, which is `{}`."""
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise BadRequest(f"{param} is not JSON: {error}", param) from None
    if not isinstance(value, dict):
        raise BadRequest(f"{param} is not a JSON object", param)
    return value


class _Envelope(msgspec.Struct):
    name: str
    args: msgspec.Raw = msgspec.Raw()
    arguments: msgspec.Raw = msgspec.Raw()


def read_call(header: str, payload: str, declared: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments of a sampled call, or None when nothing can be made of it.

    `header` stood before the payload. Accepts what models get wrong but mean: quotes written as HTML entities,
    `arguments` for `args`, arguments as JSON in a string, further keys, a header with another name (the payload's
    name counts if it is declared, else the header's).
    """
    for text in dict.fromkeys((payload, html.unescape(payload))):
        try:
            envelope = msgspec.json.decode(text, type=_Envelope)
            written = bytes(envelope.args or envelope.arguments).decode()
            args = msgspec.json.decode(written)
            if isinstance(args, str):
                written = args.strip()
                args = msgspec.json.decode(written)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            continue
        if isinstance(args, dict):
            name = envelope.name if envelope.name in declared or not header else header
            return name, written
    return None


def new_call_id() -> str:
    """`call_` and 24 random hexadecimal digits."""
    return f"call_{secrets.token_hex(12)}"


def _write(value: object, param: str, sort: bool) -> str:
    try:
        return msgspec.json.encode(value, order="sorted" if sort else None).decode()
    except UnicodeEncodeError:
        raise BadRequest(f"{param} contains half of a surrogate pair, which has no UTF-8 form", param) from None


def _writable(value: object, param: str, exponent: str, depth: int = 0) -> object:
    """`value` with numbers as the official renderer writes them: integers beyond 64 bits as floats, and in
    declarations a plus sign in exponents."""
    if depth > MAX_DEPTH:
        raise BadRequest(f"{param} is nested more than {MAX_DEPTH} deep", param)
    if isinstance(value, dict):
        return {key: _writable(item, param, exponent, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_writable(item, param, exponent, depth + 1) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        try:
            value = float(value)
        except OverflowError:
            raise BadRequest(f"{param} contains an integer of more than 1,024 bits", param) from None
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BadRequest(f"{param} contains {value}, which JSON cannot write", param)
        if exponent == "e+" and abs(value) >= 1e16:
            return msgspec.Raw(msgspec.json.encode(value).replace(b"e", b"e+"))
    return value
