"""Structural tags: text in which marked places follow a schema or a pattern, as one Lark grammar.

Both forms that clients send: `structures` with `triggers`, and the newer nested `format`. Markers are ordinary text;
control tokens can be no part of them.
"""

from collections.abc import Mapping, Sequence

from inkcap.base.errors import BadRequest, NotBuiltYet
from inkcap.base.matching import json_rule, lark_string, regex_rule, written_grammar

Form = Mapping[str, object]
# What must follow a part: one of these texts; () if the answer ends there, None if it is not fixed.
After = tuple[str, ...] | None
OBJECT: Form = {"type": "object"}
KINDS = (
    "const_string",
    "json_schema",
    "regex",
    "grammar",
    "any_text",
    "sequence",
    "or",
    "optional",
    "plus",
    "star",
    "repeat",
    "tag",
    "triggered_tags",
    "tags_with_separator",
)
REPEATS = {"optional": "?", "plus": "+", "star": "*"}


def tag_grammar(value: Form, param: str) -> str:
    """The grammar of a structural tag. Raises BadRequest and NotBuiltYet naming the part."""
    form, where = value.get("format"), f"{param}.format"
    if form is None:
        form, where = _triggered(value, param), param
    tags = Tags()
    whole = tags.write(form, where, ())
    return "\n".join([f"start: {whole or _EMPTY}", *tags.lines, ""])


def _triggered(value: Form, param: str) -> Form:
    """`structures` and `triggers` as a format."""
    listed = value.get("structures")
    if not isinstance(listed, list) or not listed:
        raise BadRequest(f"{param}.structures must be a list of objects", f"{param}.structures")
    tags = []
    for i, one in enumerate(listed):
        if not isinstance(one, Mapping) or not {"begin", "end"} <= one.keys():
            raise BadRequest(f"{param}.structures[{i}] needs begin, schema and end", f"{param}.structures[{i}]")
        content = {"type": "json_schema", "json_schema": one.get("schema", OBJECT)}
        tags.append({"begin": one["begin"], "content": content, "end": one["end"]})
    return {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}


class Tags:
    """Writes formats as expressions of a grammar, whose further lines it collects."""

    def __init__(self) -> None:
        self.lines = ["ANY: /(.|\\n)*/"]

    def write(self, form: object, where: str, after: After) -> str:
        """An expression of what `form` allows, and of what follows it if that is fixed."""
        if not isinstance(form, Mapping):
            raise BadRequest(f"{where} is not an object", where)
        kind = form.get("type")
        if kind == "any_text":
            return self._free(where, _texts(form, "excludes", where, needed=False), after)
        if kind == "triggered_tags":
            return self._triggered_tags(form, where, after)
        if kind == "sequence":
            return self._sequence(form, where, after)
        if kind == "or":
            parts = _parts(form, "elements", where)
            return _either([self.write(part, f"{where}.elements[{i}]", after) for i, part in enumerate(parts)])
        if kind == "tag":
            return _row(self._tag(form, where, 0), _ending(after))
        return _row(self._closed(kind, form, where), _ending(after))

    def _closed(self, kind: object, form: Form, where: str) -> str:
        """Formats that say themselves where they end."""
        if kind == "const_string":
            return _literal(_text(form, "value", where))
        if kind == "json_schema":
            if form.get("style") not in (None, "json"):
                raise NotBuiltYet(f"{where}.style {form['style']!r:.40} is not built; use json", f"{where}.style")
            schema = form.get("json_schema")
            if not isinstance(schema, Mapping | bool):
                raise BadRequest(f"{where}.json_schema is not a JSON schema: it must be an object", where)
            return self._line("r", json_rule(schema, compact=False))
        if kind == "regex":
            return self._regex(form, where)
        if kind == "grammar":
            try:
                return self._line("r", "%lark {\n" + written_grammar(_text(form, "grammar", where)) + "\n}")
            except (ValueError, RecursionError) as error:
                raise BadRequest(f"{where}.grammar cannot be read: {error}", where) from None
        if kind == "tags_with_separator":
            return self._separated(form, where)
        if kind in REPEATS or kind == "repeat":
            content = self.write(form.get("content"), f"{where}.content", None) or _EMPTY
            return f"({content}){REPEATS.get(str(kind)) or _times(form, where)}"
        if kind in ("token", "any_tokens", "exclude_token", "token_triggered_tags", "qwen_xml_parameter"):
            raise NotBuiltYet(f"{where}.type {kind!r} is not built; known are {', '.join(KINDS)}", f"{where}.type")
        raise BadRequest(f"{where}.type is {kind!r:.80}; known are {', '.join(KINDS)}", f"{where}.type")

    def _regex(self, form: Form, where: str) -> str:
        pattern = _text(form, "pattern", where)
        excluded = _texts(form, "excludes", where, needed=False)
        return self._line("T", regex_rule(pattern) + (f" & ~{self._having(excluded)}" if excluded else ""))

    def _sequence(self, form: Form, where: str, after: After) -> str:
        elements = _parts(form, "elements", where)
        written = []
        at = 0
        while at < len(elements):
            element, place = elements[at], f"{where}.elements[{at}]"
            following = elements[at + 1] if at + 1 < len(elements) else None
            at += 1
            if following is None:
                written.append(self.write(element, place, after))
            elif _open(element) and following.get("type") in ("const_string", "tag"):
                # text that is free ends where the next element begins
                fixed = "value" if following["type"] == "const_string" else "begin"
                begin = _text(following, fixed, f"{where}.elements[{at}]")
                written.append(self.write(element, place, (begin,)))
                rest = "" if fixed == "value" else self._tag(following, f"{where}.elements[{at}]", len(begin))
                written.append(_row(rest, _ending(after if at + 1 == len(elements) else None)))
                at += 1
            else:
                written.append(self.write(element, place, None))
        return _row(*written)

    def _tag(self, form: Form, where: str, begun: int) -> str:
        """A tag of whose beginning `begun` characters are written already."""
        begin, end = _text(form, "begin", where), form.get("end")
        ends = tuple(_texts(form, "end", where)) if isinstance(end, list) else (_text(form, "end", where, empty=True),)
        # nothing marks the end of a tag whose end is empty
        after = None if ends == ("",) else ends
        return _row(_literal(begin[begun:]), self.write(form.get("content"), f"{where}.content", after))

    def _triggered_tags(self, form: Form, where: str, after: After) -> str:
        triggers, tags = _texts(form, "triggers", where), _parts(form, "tags", where)
        excluded = [*triggers, *_texts(form, "excludes", where, needed=False)]
        of: dict[str, list[str]] = {}
        for i, tag in enumerate(tags):
            place = f"{where}.tags[{i}]"
            begin = _text(tag, "begin", place)
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise BadRequest(f"{place}.begin {begin[:60]!r} begins with none of the triggers", place)
            of.setdefault(trigger, []).append(self._tag(tag, place, len(trigger)))
        marked = [_row(self._free(where, excluded, (trigger,)), _either(rest)) for trigger, rest in of.items()]
        one = _either(marked)
        tail = self._free(where, excluded, after)
        least = form.get("at_least_one") is True
        if form.get("stop_after_first") is True:
            first = _row(one, _ending(after))
            return first if least else _either([first, tail])
        return _row(f"({one}){'+' if least else '*'}", tail)

    def _separated(self, form: Form, where: str) -> str:
        separator = _literal(_text(form, "separator", where, empty=True))
        tags = [self._tag(tag, f"{where}.tags[{i}]", 0) for i, tag in enumerate(_parts(form, "tags", where))]
        one = self._line("r", _either(tags))
        many = one if form.get("stop_after_first") is True else f"{one} ({_row(separator, one)})*"
        return f"({many})" if form.get("at_least_one") is True else f"({many})?"

    def _free(self, where: str, excluded: Sequence[str], after: After) -> str:
        """Any text without `excluded`, up to the first of `after`."""
        if after is None:
            raise BadRequest(f"{where} is free text, and no fixed text follows that would end it", where)
        if not (excluded or after):
            return "ANY"
        free = f"/(.|\\n)*/ & ~{self._having((*excluded, *after))}"
        return self._line("T", _row(self._line("T", free), _ending(after)) if after else free)

    def _having(self, texts: Sequence[str]) -> str:
        """A text that contains one of `texts`."""
        return self._line("T", f"ANY ({' | '.join(map(_literal, dict.fromkeys(texts)))}) ANY")

    def _line(self, prefix: str, body: str) -> str:
        """A further rule (r) or terminal (T) of the grammar."""
        name = f"{prefix}{len(self.lines)}"
        self.lines.append(f"{name}: {body or _EMPTY}")
        return name


_EMPTY = '""'


def _open(form: Form) -> bool:
    return form.get("type") in ("any_text", "triggered_tags")


def _literal(text: str) -> str:
    return lark_string(text) if text else ""


def _ending(after: After) -> str:
    return f"({' | '.join(map(lark_string, after))})" if after else ""


def _row(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _either(parts: Sequence[str]) -> str:
    return f"({' | '.join(part or _EMPTY for part in parts)})"


def _times(form: Form, where: str) -> str:
    least, most = form.get("min", 0), form.get("max", -1)
    if not isinstance(least, int) or not isinstance(most, int) or least < 0 or (most != -1 and most < least):
        raise BadRequest(
            f"{where}.min and max are {least!r:.20} and {most!r:.20}; use 0 <= min <= max, or max -1", where
        )
    return f"{{{least},{'' if most == -1 else most}}}"


def _text(form: Form, key: str, where: str, empty: bool = False) -> str:
    value = form.get(key)
    if not isinstance(value, str) or not (value or empty):
        raise BadRequest(f"{where}.{key} must be a string{'' if empty else ' that is not empty'}", f"{where}.{key}")
    return value


def _texts(form: Form, key: str, where: str, needed: bool = True) -> list[str]:
    value = form.get(key)
    if value in (None, []) and not needed:
        return []
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise BadRequest(f"{where}.{key} must be a list of strings that are not empty", f"{where}.{key}")
    return value


def _parts(form: Form, key: str, where: str) -> list[Form]:
    value = form.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(one, Mapping) for one in value):
        raise BadRequest(f"{where}.{key} must be a list of objects", f"{where}.{key}")
    return value
