"""Stop strings against the definition: the one that is complete first, whatever the pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inkcap.base.errors import BadRequest
from inkcap.chat.stops import StopStrings

texts = st.text("ab\u00e9", max_size=30)


def first_complete(text: str, stops: list[str]) -> tuple[int, str] | None:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


@settings(max_examples=500, deadline=None)
@given(
    text=texts,
    stops=st.lists(st.text("ab\u00e9", min_size=1, max_size=5), max_size=5),
    cuts=st.lists(st.integers(0, 4), max_size=30),
    include=st.booleans(),
)
def test_any_cut_gives_what_the_definition_says(text, stops, cuts, include):
    found = first_complete(text, stops)
    filter_, shown, rest = StopStrings(stops, include), "", text
    for cut in [*cuts, len(text)]:
        shown += filter_.feed(rest[:cut])
        rest = rest[cut:]
        sure = text if found is None else text[: found[0] - (0 if include else len(found[1]))]
        assert sure.startswith(shown)
    if found is None:
        assert filter_.matched is None
        assert shown + filter_.flush() == text
    else:
        assert filter_.matched == found[1]
        assert shown == sure


def test_a_stop_string_that_begins_inside_another():
    for text, stops, found in (
        ("aaabc", ["aaabb", "abc"], "abc"),
        ("xabcabd", ["abcabe", "cabd"], "cabd"),
        ("ababac", ["ababab", "bac"], "bac"),
    ):
        filter_ = StopStrings(stops)
        shown = "".join(filter_.feed(letter) for letter in text)
        assert (filter_.matched, shown) == (found, text.removesuffix(found))


def test_only_what_may_become_a_stop_string_is_held():
    stops = StopStrings(["STOP!"])
    assert stops.feed("go S") == "go "
    assert stops.feed("TO") == ""
    assert stops.feed("LEN S") == "STOLEN "
    assert stops.feed("TOP!x") == ""
    assert stops.matched == "STOP!"
    assert stops.feed("more") == ""


def test_a_thousand_stop_strings():
    stops = StopStrings([f"<{i}>" for i in range(1000)])
    assert stops.feed("a <99") == "a "
    assert stops.feed("9> b") == ""
    assert stops.matched == "<999>"


@pytest.mark.parametrize("stops", [[""], ["a", ""]])
def test_an_empty_stop_string_is_refused(stops):
    with pytest.raises(BadRequest, match="empty string") as caught:
        StopStrings(stops)
    assert caught.value.param == "stop"


def test_too_much_text_is_refused():
    with pytest.raises(BadRequest, match="1000000 characters together; 100000 are allowed"):
        StopStrings(["a" * 1_000_000])
