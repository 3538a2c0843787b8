"""Structural tags: each format by texts that it takes and texts that it does not, and what is refused by name."""

import llguidance
import pytest

from inkcap.base.errors import BadRequest, NotBuiltYet
from inkcap.base.matching import _byte_tokenizer, limits
from inkcap.chat.grammar import read_wish

NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY = {"type": "any_text"}


def const(value):
    return {"type": "const_string", "value": value}


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


F, G = tag("<f>", NUMBER, "</f>"), tag("<g>", {"type": "regex", "pattern": "[a-c]+"}, "</g>")
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f", "<g"], "tags": [F, G]}
SEPARATED = {"type": "tags_with_separator", "tags": [F, G], "separator": ","}


def sequence(*elements):
    return {"type": "sequence", "elements": [*elements]}


FORMATS = {
    "const_string": (const('a"\n<'), ['a"\n<'], ["", "a", 'a"\n<<']),
    "json_schema": (NUMBER, ["12", "-3"], ["x", "1.5", ""]),
    "regex": ({"type": "regex", "pattern": "a/[b-d]{2}"}, ["a/bc"], ["a/b", "a/bcd"]),
    "regex excludes": ({"type": "regex", "pattern": "[a-c]*", "excludes": ["bb"]}, ["abcb", ""], ["abb"]),
    "grammar": ({"type": "grammar", "grammar": 'start: "a" x\nx: "b"+\n'}, ["ab", "abbb"], ["a", "b"]),
    "gbnf": ({"type": "grammar", "grammar": 'root ::= "a" [0-9]'}, ["a7"], ["a", "7"]),
    "any_text": (ANY, ["", "whatever\n<f>"], []),
    "any_text excludes": ({**ANY, "excludes": ["no", "</"]}, ["", "n o<", "yes"], ["a no", "</"]),
    "sequence": (sequence(const("a"), NUMBER, const("b")), ["a12b"], ["ab", "a1", "a1bb"]),
    "text up to a string": (sequence(ANY, const("END")), ["END", "a\nEN END"], ["EN", "END END", "aENDb"]),
    "text up to a tag": (sequence(ANY, F), ["<f>1</f>", "a < b<f>1</f>"], ["a", "<f>x</f>", "<f>1</f>."]),
    "text after a tag": (sequence(F, ANY), ["<f>1</f>", "<f>1</f> and more"], ["x<f>1</f>"]),
    "or": ({"type": "or", "elements": [const("yes"), NUMBER]}, ["yes", "7"], ["yes7", ""]),
    "optional": (sequence({"type": "optional", "content": const("a")}, const("b")), ["ab", "b"], ["aab", "a"]),
    "plus": ({"type": "plus", "content": const("ab")}, ["ab", "abab"], ["", "aba"]),
    "star": ({"type": "star", "content": const("ab")}, ["", "abab"], ["a"]),
    "repeat": ({"type": "repeat", "min": 1, "max": 2, "content": const("a")}, ["a", "aa"], ["", "aaa"]),
    "tag": (F, ["<f>12</f>"], ["<f>12", "<f></f>", "12"]),
    "tag of text": (tag("<t>", ANY, "</t>"), ["<t></t>", "<t>a<b</ t></t>"], ["<t>", "<t></t>x"]),
    "tag of several ends": (tag("<t>", ANY, ["</t>", "."]), ["<t>a.", "<t>a</t>"], ["<t>a.b</t>"]),
    "tag without an end": (tag("n=", NUMBER, ""), ["n=3"], ["n="]),
    "tag in a tag": (tag("[", F, "]"), ["[<f>1</f>]"], ["[]", "[<f>1</f>"]),
    "triggered_tags": (TRIGGERED, ["", "text <", "a<f>1</f>b<g>abc</g>"], ["<f", "<f>x</f>", "a <g>", "<g>d</g>"]),
    "at_least_one": ({**TRIGGERED, "at_least_one": True}, ["<f>1</f>", "a<g>a</g> b"], ["", "text"]),
    "stop_after_first": (
        {**TRIGGERED, "stop_after_first": True},
        ["", "text", "a<f>1</f>"],
        ["a<f>1</f>b", "<f>1</f><f>1</f>"],
    ),
    "exactly one": (
        {**TRIGGERED, "stop_after_first": True, "at_least_one": True},
        ["a<f>1</f>"],
        ["", "text", "a<f>1</f>b"],
    ),
    "triggers in a tag": (tag("<t>", TRIGGERED, "</t>"), ["<t></t>", "<t>a<f>1</f></t>"], ["<t><f></t>", "<t></t>x"]),
    "tags_with_separator": (SEPARATED, ["", "<f>1</f>", "<f>1</f>,<g>a</g>,<f>2</f>"], [",", "<f>1</f>,", "x"]),
    "separated, at least one": ({**SEPARATED, "at_least_one": True}, ["<f>1</f>"], [""]),
    "separated, the first only": ({**SEPARATED, "stop_after_first": True}, ["", "<g>b</g>"], ["<f>1</f>,<f>1</f>"]),
}


def matched(grammar, text):
    matcher = llguidance.LLMatcher(_byte_tokenizer(), grammar, limits=limits(), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens([*text.encode()]) and matcher.is_accepting()


def grammar_of(form, field="response_format"):
    tagged = {"type": "structural_tag", "format": form}
    given = tagged if field == "response_format" else {"structural_tag": tagged}
    return read_wish(formats={field: given}).text


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_takes_what_it_says_and_nothing_else(name):
    form, takes, refuses = FORMATS[name]
    grammar = grammar_of(form)
    assert [text for text in takes if not matched(grammar, text)] == []
    assert [text for text in refuses if matched(grammar, text)] == []
    assert grammar_of(form, "structured_outputs") == grammar


def test_the_older_form_is_triggered_tags():
    schema = {"type": "integer"}
    old = {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f>"]}
    grammar = read_wish(formats={"response_format": {"type": "structural_tag", **old}}).text
    for text in ("", "hi <g> <f>12</f> bye"):
        assert matched(grammar, text)
    for text in ("<f>", "<f>x</f>", "a <f>1"):
        assert not matched(grammar, text)


REFUSED = [
    ({"type": "nonsense"}, "format.type"),
    ({"type": "const_string"}, "format.value"),
    ({"type": "json_schema", "json_schema": 3}, "format"),
    ({"type": "sequence", "elements": []}, "format.elements"),
    ({"type": "repeat", "min": 2, "max": 1, "content": const("a")}, "format"),
    ({"type": "tag", "begin": "a", "content": const("b")}, "format.end"),
    ({**TRIGGERED, "triggers": ["<h"]}, "format.tags[0]"),
    ({**TRIGGERED, "triggers": []}, "format.triggers"),
    ({**TRIGGERED, "excludes": "x"}, "format.excludes"),
    (sequence(ANY, NUMBER), "format.elements[0]"),
    ({"type": "star", "content": ANY}, "format.content"),
    ({"type": "grammar", "grammar": "root ::= ("}, "format"),
    (sequence(const("a"), "b"), "format.elements"),
    ("any_text", "format"),
]


@pytest.mark.parametrize(("form", "where"), REFUSED, ids=[f"{i}-{where}" for i, (_, where) in enumerate(REFUSED)])
def test_what_is_wrong_is_named(form, where):
    with pytest.raises(BadRequest) as caught:
        grammar_of(form)
    assert caught.value.param == f"response_format.{where}"
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "form",
    [
        {"type": "token", "token": "<|end_message|>"},
        {"type": "any_tokens", "exclude_tokens": []},
        {"type": "qwen_xml_parameter", "json_schema": {}},
        {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"},
    ],
)
def test_what_is_not_built_is_refused_by_name(form):
    with pytest.raises(NotBuiltYet) as caught:
        grammar_of(form)
    assert "is not built" in str(caught.value)


def test_control_tokens_cannot_be_spelled():
    """A marker that looks like one is text: the vocabulary of grammars has no control tokens."""
    grammar = grammar_of(tag("<|end_message|>", NUMBER, "<|content_text|>"))
    assert matched(grammar, "<|end_message|>1<|content_text|>")
