"""From what a request asks of its answer (tools, tool choice, formats, budgets) to the rules of a turn.

Three steps, since compiling takes time and another process: `read_wish` looks at the request, `Wish.grammars` says what
must be compilable, `Wish.rules` puts together what is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from inkcap.base.errors import BadRequest
from inkcap.base.matching import BLANKS, json_grammar, json_rule, lark_string, regex_grammar, written_grammar
from inkcap.base.turn import Start, TurnRules
from inkcap.chat.tags import tag_grammar
from inkcap.chat.tools import MAX_DEPTH

MAX_TOOLS = 1024
MAX_GRAMMAR_BYTES = 256 << 10  # of one grammar as text
MAX_CHOICES = 4096
OBJECT = {"type": "object"}
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
# fields of `structured_outputs` that say what the text must be, and those that only say how it is written
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
HOW = ("disable_any_whitespace", "whitespace_pattern", "disable_fallback", "disable_additional_properties")
MAX_PATTERN = 1024  # characters of a pattern of blanks


@dataclass(frozen=True)
class ToolWish:
    """What the calls of one tool are held to."""

    grammar: str  # empty: the schema is too large or too deep
    refusal: str  # why it is empty
    param: str
    strict: bool  # the request asks that arguments fit the schema


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a request asks of its answer."""

    text: str = ""  # grammar of the text
    text_param: str = ""
    tools: dict[str, ToolWish] = field(default_factory=dict)  # those that may be called
    choice: str = ""  # none, auto, required or named; empty: there are no tools
    closed: bool = False  # the request has more tools than may be called
    parallel: bool = True
    thinking: int | None = None

    @property
    def must_call(self) -> bool:
        return self.choice in ("required", "named")

    def grammars(self) -> list[tuple[str, str]]:
        """Grammars to be compiled, each with the field it comes from."""
        found = [(self.text, self.text_param)] if self.text and not self.must_call else []
        return found + [(tool.grammar, tool.param) for tool in self.tools.values() if tool.grammar]

    def rules(self, start: Start, errors: Mapping[str, str]) -> TurnRules | None:
        """The rules of the turn; None if it is free. `errors`: grammars that cannot be compiled, and why.

        Raises BadRequest, naming the field, when a grammar cannot be compiled that has to hold. A tool that may be
        called, but was not declared `strict`, is then held to a JSON object.
        """
        if self.text and not self.must_call and (why := errors.get(self.text)) is not None:
            raise BadRequest(f"{self.text_param} cannot be enforced: {why}", self.text_param)
        calls = {}
        for name, tool in self.tools.items():
            why = errors.get(tool.grammar) if tool.grammar else tool.refusal
            if why is not None and (tool.strict or self.must_call):
                raise BadRequest(f"{tool.param} cannot be enforced: {why}", tool.param)
            calls[name] = call_grammar(name, OBJECT) if why is not None else tool.grammar
        strict = self.must_call or bool(self.text)
        if strict and start in (Start.TEXT, Start.THINKING):
            what = "tool_choice" if self.must_call else self.text_param
            raise BadRequest(f"{what} cannot be enforced on an answer that continue_final_message has begun", what)
        if not strict and not calls and self.choice != "none" and self.thinking is None:
            return None
        most = 0 if self.choice in ("", "none") else 1 if not self.parallel or self.choice == "named" else None
        return TurnRules(
            start=start,
            text="" if self.must_call else self.text,
            strict=strict,
            texts=not self.must_call,
            calls=calls,
            closed=self.closed,
            least_calls=int(self.must_call),
            most_calls=None if self.choice == "" and not strict else most,
            thinking=self.thinking,
        )


def text_rules(grammar: str) -> TurnRules:
    """Rules of a bare continuation, which is all text."""
    return TurnRules(start=Start.RAW, text=grammar, strict=True)


def read_wish(
    *,
    tools: Sequence[object] | None = None,
    tool_choice: object = None,
    parallel: bool | None = None,
    formats: Mapping[str, object] | None = None,
    thinking: int | None = None,
) -> Wish:
    """What the fields of a request ask for. `formats`: response_format, structured_outputs and guided_*, or None.

    Raises BadRequest and NotBuiltYet naming the field.
    """
    text, param = read_format(formats or {})
    if thinking is not None and thinking < 0:
        raise BadRequest(f"thinking_token_budget is {thinking}; it is a number of tokens, 0 or more", _BUDGET)
    if not tools:
        if tool_choice not in (None, "none"):
            raise BadRequest("tool_choice is given but tools is empty", "tool_choice")
        return Wish(text=text, text_param=param, thinking=thinking)
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"tools has {len(tools):,} entries; the limit is {MAX_TOOLS:,}", "tools")
    names = [_name(tool) for tool in tools]
    choice, allowed = read_choice(tool_choice, [name for name in names if name])
    wished = {}
    for i, (name, tool) in enumerate(zip(names, tools, strict=True)):
        if name and name in allowed:
            wished[name] = _tool_wish(name, tool, f"tools[{i}].function.parameters")
    return Wish(
        text=text,
        text_param=param,
        tools=wished,
        choice=choice,
        closed=choice == "auto" and len(wished) < len(set(names)),
        parallel=parallel is not False,
        thinking=thinking,
    )


_BUDGET = "thinking_token_budget"


def read_choice(choice: object, names: Sequence[str]) -> tuple[str, frozenset[str]]:
    """A tool choice as none, auto, required or named, and the tools that it lets the model call."""
    if choice is None or choice == "auto":
        return "auto", frozenset(names)
    if choice == "none":
        return "none", frozenset()
    if choice == "required":
        return "required", frozenset(names)
    if not isinstance(choice, Mapping):
        raise BadRequest(
            f"tool_choice is {choice!r:.80}; use none, auto, required, a function or allowed_tools", "tool_choice"
        )
    if choice.get("type") == "allowed_tools":
        return _allowed_tools(choice, names)
    if choice.get("type", "function") != "function":
        raise BadRequest(
            f"tool_choice.type is {choice.get('type')!r:.80}; use function or allowed_tools", "tool_choice.type"
        )
    name = _name(choice) or choice.get("name")
    if name not in names:
        raise BadRequest(f"tool_choice names {name!r:.160}, which is none of the tools", "tool_choice")
    return "named", frozenset((str(name),))


def _allowed_tools(choice: Mapping[str, object], names: Sequence[str]) -> tuple[str, frozenset[str]]:
    """`allowed_tools` as the chat API nests it, or flat as the Responses API does."""
    given = choice.get("allowed_tools", choice)
    if not isinstance(given, Mapping):
        raise BadRequest("tool_choice.allowed_tools is not an object", "tool_choice.allowed_tools")
    mode, listed = given.get("mode", "auto"), given.get("tools")
    if mode not in ("auto", "required"):
        raise BadRequest(f"tool_choice.allowed_tools.mode is {mode!r:.80}; use auto or required", "tool_choice")
    if not isinstance(listed, list) or not listed:
        raise BadRequest("tool_choice.allowed_tools.tools is not a list of tools", "tool_choice")
    allowed = [_name(tool) or (tool.get("name") if isinstance(tool, Mapping) else None) for tool in listed]
    for name in allowed:
        if name not in names:
            raise BadRequest(f"tool_choice.allowed_tools has {name!r:.160}, which is none of the tools", "tool_choice")
    return str(mode), frozenset(map(str, allowed))


def _name(tool: object) -> str | None:
    """The name of a tool; None where it is malformed, which rendering reports."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _tool_wish(name: str, tool: object, param: str) -> ToolWish:
    function = tool["function"] if isinstance(tool, Mapping) else {}
    schema, strict = function.get("parameters"), function.get("strict") is True
    schema = schema if isinstance(schema, Mapping) else {}
    if (why := too_large(schema)) is not None:
        return ToolWish("", why, param, strict)
    # The models write the keys of arguments in the order of the declaration, which is sorted.
    ordered = msgspec.json.decode(msgspec.json.encode(schema, order="sorted"))
    if "type" not in ordered and not {"$ref", "anyOf", "oneOf", "allOf"} & ordered.keys():
        ordered["type"] = "object"
    return ToolWish(call_grammar(name, ordered), "", param, strict)


def call_grammar(name: str, schema: Mapping[str, object]) -> str:
    """The payload of a call of `name` with arguments of `schema`."""
    opening = msgspec.json.encode({"name": name}).decode()[:-1] + ',"args":'
    return f'start: {lark_string(opening)} args "}}"\nargs: {json_rule(schema, compact=True)}\n'


def too_large(schema: object) -> str | None:
    """Why a schema is not even looked at; None if it is."""
    try:
        size = len(msgspec.json.encode(schema))
    except (UnicodeEncodeError, OverflowError, ValueError):
        return "it contains half of a surrogate pair, or a number that JSON cannot write"
    except RecursionError:
        return f"it is nested more than {MAX_DEPTH} deep"
    if size > MAX_GRAMMAR_BYTES:
        return f"it has {size:,} bytes; the limit is {MAX_GRAMMAR_BYTES:,}"
    level: list[object] = [schema]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for value in level
            for child in (value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ())
        ]
        if not level:
            return None
    return f"it is nested more than {MAX_DEPTH} deep"


def read_format(formats: Mapping[str, object]) -> tuple[str, str]:
    """The grammar of the text and the field that asks for it; empty if none does."""
    asked = {name: value for name, value in formats.items() if value is not None}
    response = asked.get("response_format")
    if isinstance(response, Mapping) and response.get("type") == "text":
        del asked["response_format"]
    if not asked:
        return "", ""
    if len(asked) > 1:
        raise BadRequest(f"{' and '.join(asked)} are given; an answer has one format", next(iter(asked)))
    ((name, value),) = asked.items()
    if name == "response_format":
        return _response_format(value)
    if name == "structured_outputs":
        return _structured(value)
    return _grammar(name.removeprefix("guided_"), value, name), name


def _response_format(value: object) -> tuple[str, str]:
    if not isinstance(value, Mapping):
        raise BadRequest("response_format is not an object", "response_format")
    kind = value.get("type")
    if kind == "json_object":
        return json_grammar(OBJECT), "response_format"
    if kind == "json_schema":
        given, param = value.get("json_schema"), "response_format.json_schema.schema"
        if not isinstance(given, Mapping):
            raise BadRequest("response_format.json_schema is missing or not an object", "response_format.json_schema")
        schema = given.get("schema")
        return _grammar("json", OBJECT if schema is None else schema, param), param
    if kind == "structural_tag":
        return _grammar("structural_tag", value, "response_format"), "response_format"
    raise BadRequest(
        f"response_format.type is {kind!r:.80}; use text, json_object, json_schema or structural_tag",
        "response_format.type",
    )


def _structured(value: object) -> tuple[str, str]:
    if not isinstance(value, Mapping):
        raise BadRequest("structured_outputs is not an object", "structured_outputs")
    for key in value:
        if key not in KINDS + HOW:
            raise BadRequest(f"structured_outputs has the unknown key {key!r:.80}", "structured_outputs")
    asked = [key for key in KINDS if value.get(key) not in (None, False)]
    if len(asked) != 1:
        raise BadRequest(
            f"structured_outputs has {' and '.join(asked) or 'nothing'}; give exactly one of {', '.join(KINDS)}",
            "structured_outputs",
        )
    compact, blanks = value.get("disable_any_whitespace") is True, value.get("whitespace_pattern")
    if blanks is not None:
        where = "structured_outputs.whitespace_pattern"
        if not isinstance(blanks, str) or len(blanks) > MAX_PATTERN:
            raise BadRequest(f"{where} must be a regular expression of at most {MAX_PATTERN} characters", where)
        if compact or asked[0] not in ("json", "json_object"):
            raise BadRequest(f"{where} is for json and json_object, and not with disable_any_whitespace", where)
    kind, param = asked[0], f"structured_outputs.{asked[0]}"
    wanted = value[kind]
    if value.get("disable_additional_properties") is True:
        if kind != "json":
            where = "structured_outputs.disable_additional_properties"
            raise BadRequest(f"{where} is for json", where)
        wanted = closed(_schema(wanted, param))
    return _grammar(kind, wanted, param, compact, BLANKS if blanks is None else blanks), param


def closed(schema: object) -> object:
    """A schema whose objects have no properties but those that it names, unless it says otherwise."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    inside = {key: closed(value) for key, value in schema.items()}
    named = {"properties", "patternProperties"} & schema.keys()
    return {"additionalProperties": False, **inside} if named else inside


def _grammar(kind: str, value: object, param: str, compact: bool = False, blanks: str = BLANKS) -> str:
    """The grammar of one format."""
    if kind == "json_object":
        return json_grammar(OBJECT, compact, blanks)
    if kind == "json":
        return json_grammar(_schema(value, param), compact, blanks)
    if kind == "choice":
        return _choice(value, param)
    if kind == "structural_tag":
        return _structural_tag(value, param)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{param} is {value!r:.40}; it must be a string that is not empty", param)
    if len(value) > MAX_GRAMMAR_BYTES:
        raise BadRequest(f"{param} has {len(value):,} characters; the limit is {MAX_GRAMMAR_BYTES:,}", param)
    try:
        return regex_grammar(value) if kind == "regex" else written_grammar(value)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{param} cannot be read: {error}", param) from None


def _schema(value: object, param: str) -> Mapping[str, object] | bool:
    """A JSON schema that is not too large: as it is, or in a string."""
    value = _object(value, param) if isinstance(value, str) else value
    if not isinstance(value, Mapping | bool):
        raise BadRequest(f"{param} is not a JSON schema: it must be an object", param)
    if (why := too_large(value)) is not None:
        raise BadRequest(f"{param} cannot be enforced: {why}", param)
    return value


def _object(text: str, param: str) -> object:
    if len(text) > MAX_GRAMMAR_BYTES:
        raise BadRequest(f"{param} has {len(text):,} characters; the limit is {MAX_GRAMMAR_BYTES:,}", param)
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise BadRequest(f"{param} is not JSON: {error}", param) from None


def _choice(value: object, param: str) -> str:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise BadRequest(f"{param} must be a list of strings that are not empty", param)
    if len(value) > MAX_CHOICES:
        raise BadRequest(f"{param} has {len(value):,} entries; the limit is {MAX_CHOICES:,}", param)
    if (why := too_large(value)) is not None:
        raise BadRequest(f"{param} cannot be enforced: {why}", param)
    return "start: " + " | ".join(map(lark_string, dict.fromkeys(value))) + "\n"


def _structural_tag(value: object, param: str) -> str:
    form = _object(value, param) if isinstance(value, str) else value
    if not isinstance(form, Mapping):
        raise BadRequest(f"{param} is not an object", param)
    if (why := too_large(form)) is not None:
        raise BadRequest(f"{param} cannot be enforced: {why}", param)
    return tag_grammar(form, param)
