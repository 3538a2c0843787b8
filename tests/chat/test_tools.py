"""Tool declarations and calls: what is written, what is refused, what can be saved of a broken call."""

import json

import pytest

from inkcap.base.errors import BadRequest
from inkcap.chat.tools import MAX_DEPTH, call_payload, declaration, new_call_id, read_arguments, read_call


def tool(**function: object) -> dict:
    return {"type": "function", "function": {"name": "f"} | function}


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def test_declaration_is_compact_and_sorted_at_every_depth():
    text, names = declaration([tool(strict=True, parameters={"b": [{"z": 1, "a": "é"}], "a": None}), tool(name="g")])
    assert text == (
        '[{"description":"","name":"f","parameters":{"a":null,"b":[{"a":"é","z":1}]},"type":"function"},'
        '{"description":"","name":"g","parameters":{},"type":"function"}]'
    )
    assert names == ("f", "g")


def test_numbers_are_written_as_the_official_renderer_does():
    numbers = [1e16, 1.5e30, 1e-7, 0.00001, 2**64 - 1, 2**64, -1]
    text, _ = declaration([tool(parameters={"x": numbers})])
    assert '{"x":[1e+16,1.5e+30,1e-7,0.00001,18446744073709551615,1.8446744073709552e+19,-1]}' in text
    payload = call_payload("f", {"x": numbers}, "p")
    assert '{"x":[1e16,1.5e30,1e-7,0.00001,18446744073709551615,1.8446744073709552e19,-1]}' in payload


def test_null_description_and_parameters_are_empty():
    assert declaration([tool(description=None, parameters=None)]) == declaration([tool()])


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([3], "tools[0]"),
        ([tool(), {"type": "web_search"}], "tools[1].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([tool(name=None)], "tools[0].function.name"),
        ([tool(name="")], "tools[0].function.name"),
        ([tool(name="a b")], "tools[0].function.name"),
        ([tool(name="a" * 129)], "tools[0].function.name"),
        ([tool(), tool()], "tools[1].function.name"),
        ([tool(description=3)], "tools[0].function.description"),
        ([tool(description="\ud800")], "tools"),
        ([tool(parameters=[])], "tools[0].function.parameters"),
        ([tool(parameters={"x": float("nan")})], "tools[0].function.parameters"),
        ([tool(parameters={"x": 10**400})], "tools[0].function.parameters"),
        ([tool(parameters={"x": nested(MAX_DEPTH + 1)})], "tools[0].function.parameters"),
    ],
)
def test_a_bad_tool_is_refused_with_its_path(tools, param):
    with pytest.raises(BadRequest) as caught:
        declaration(tools)
    assert caught.value.param == param


def test_payload_sorts_the_top_level_only():
    assert (
        call_payload("f", {"z": {"b": 1, "a": 2}, "a": 1.0}, "p") == '{"name":"f","args":{"a":1.0,"z":{"b":1,"a":2}}}'
    )


@pytest.mark.parametrize("text", ["{", "nul", "[1]", '"x"', "1", '{"a":Infinity}', "\ud800", "[" * 100_000])
def test_arguments_that_are_no_object_are_refused(text):
    with pytest.raises(BadRequest) as caught:
        read_arguments(text, "here")
    assert caught.value.param == "here"


@pytest.mark.parametrize(
    ("header", "payload", "found"),
    [
        ("f", '{"name":"f","args":{"a":1}}', ("f", '{"a":1}')),
        ("", '{"name":"f","args":{}}', ("f", "{}")),
        ("f", '{"name":"f","args":{"a": 1.50, "b":1e400000}}', None),
        (
            "f",
            '{"name":"f","args":{"a": 1.50,"b":123456789012345678901}}',
            ("f", '{"a": 1.50,"b":123456789012345678901}'),
        ),
        ("f", '{"name":"f","args":{},"id":7}', ("f", "{}")),
        ("f", '{"args":{"a":"}"},"name":"f"}', ("f", '{"a":"}"}')),
        ("f", '{"name":"f","arguments":{"a":1}}', ("f", '{"a":1}')),
        ("f", '{"name":"f","arguments":"{\\"a\\":1}"}', ("f", '{"a":1}')),
        ("f", "{&quot;name&quot;:&quot;f&quot;,&quot;args&quot;:{&quot;a&quot;:1}}", ("f", '{"a":1}')),
        ("f", '{"name":"f","args":{"a":"&quot;"}}', ("f", '{"a":"&quot;"}')),
        ("f", '{"name":"g","args":{}}', ("g", "{}")),
        ("f", '{"name":"unknown","args":{}}', ("f", "{}")),
        ("", '{"name":"unknown","args":{}}', ("unknown", "{}")),
        ("f", "", None),
        ("f", "{", None),
        ("f", '{"name":"f"}', None),
        ("f", '{"args":{}}', None),
        ("f", '{"name":3,"args":{}}', None),
        ("f", '{"name":"f","args":[]}', None),
        ("f", '{"name":"f","args":null}', None),
        ("f", '{"name":"f","args":"text"}', None),
        ("f", '{"name":"f","args":{}}x', None),
        ("f", '{"name":"f","args":{"a":NaN}}', None),
        ("f", '{"name":"f","args":' + "[" * 100_000, None),
        ("f", '{"name":"f","args":' + "[" * 5_000 + "]" * 5_000 + "}", None),
        ("f", "<tool>f</tool>", None),
    ],
)
def test_reading_a_sampled_call(header, payload, found):
    assert read_call(header, payload, {"f", "g"}) == found
    if found:
        assert isinstance(json.loads(found[1]), dict)


def test_call_ids_differ():
    assert len({new_call_id() for _ in range(100)}) == 100
    assert len(new_call_id()) == len("call_") + 24


def test_ten_thousand_tools_have_distinct_names():
    tools = [tool(name=f"f{i}") for i in range(10_000)]
    assert len(declaration(tools)[1]) == len(tools)
