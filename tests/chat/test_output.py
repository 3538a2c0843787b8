"""From deltas to text and events: stop strings, counts, finish reasons, log-probabilities."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inkcap.base.request import Finish, Logprobs, SamplingParams, TokenDelta
from inkcap.base.turn import Start
from inkcap.chat.output import Answer, ChatDelta, ChatOutput, LogprobReader, TextDelta, TextOutput
from inkcap.chat.parse import Content, Thought
from inkcap.chat.render import Rendered
from inkcap.chat.tokens import CALL_JSON, END_MESSAGE, END_OF_TEXT, END_TURN, MODEL, TEXT, THINKING, USER, Tokenizer
from inkcap.chat.tools import Call

PROMPT = Rendered([], Start.BETWEEN, ("f",))
CALL = ("f", CALL_JSON, '{"name":"f","args":{}}', END_MESSAGE)


def flat(tokenizer: Tokenizer, *parts: int | str) -> list[int]:
    return [token for part in parts for token in ([part] if isinstance(part, int) else tokenizer.encode_text(part))]


def deltas(ids: list[int], finish: Finish | None, stop_token: int | None = None, size: int = 1) -> list[TokenDelta]:
    """The stream an engine would send, `size` tokens a step."""
    pieces = [ids[i : i + size] for i in range(0, len(ids), size)] or [[]]
    made = [TokenDelta("r", piece) for piece in pieces[:-1]]
    return [*made, TokenDelta("r", pieces[-1], finish=finish, stop_token=stop_token)]


def text_of(output: TextOutput, stream: list[TokenDelta]) -> tuple[str, TextDelta]:
    """All text, and the delta that ended it."""
    text, last = "", None
    for delta in stream:
        made = output.feed(delta)
        text += made.text
        last = made if made.finish_reason is not None else last
    assert last is not None
    return text, last


def answer_of(output: ChatOutput, stream: list[TokenDelta]) -> tuple[Answer, ChatDelta]:
    answer, last = Answer(), None
    for delta in stream:
        made = output.feed(delta)
        answer.add(made.events)
        last = made if made.finish_reason is not None else last
    assert last is not None
    return answer, last


# Raw completions


@pytest.mark.parametrize("size", [1, 2, 100])
def test_text_ends_at_a_stop_token_that_is_counted_but_not_shown(tokenizer, size):
    ids = flat(tokenizer, "Hello wörld 😀", END_OF_TEXT)
    output = TextOutput(tokenizer, SamplingParams(skip_special_tokens=False))
    text, last = text_of(output, deltas(ids, Finish.STOP, END_OF_TEXT, size))
    assert text == "Hello wörld 😀"
    assert (last.finish_reason, last.stop_reason, last.abort) == ("stop", None, False)
    assert output.completion_tokens == len(ids)


@pytest.mark.parametrize(("include", "shown"), [(False, "a b"), (True, "a b c")])
def test_a_requested_stop_id_is_named_and_shown_on_demand(tokenizer, include, shown):
    ids = flat(tokenizer, "a b c")
    params = SamplingParams(stop_token_ids=[ids[-1]], include_stop_str_in_output=include)
    text, last = text_of(TextOutput(tokenizer, params), deltas(ids, Finish.STOP, ids[-1]))
    assert (text, last.finish_reason, last.stop_reason) == (shown, "stop", ids[-1])


def test_control_tokens_in_text_are_spelled_on_demand(tokenizer):
    ids = flat(tokenizer, MODEL, "a")
    for skip, shown in ((True, "a"), (False, "<|message_model|>a")):
        output = TextOutput(tokenizer, SamplingParams(skip_special_tokens=skip))
        assert text_of(output, deltas(ids, Finish.LENGTH))[0] == shown


@pytest.mark.parametrize("finish", [Finish.LENGTH, Finish.ABORT, Finish.ERROR])
def test_other_ends_show_what_was_held(tokenizer, finish):
    ids = [*flat(tokenizer, "wait for ST"), 160]
    output = TextOutput(tokenizer, SamplingParams(stop="STOP"))
    text, last = text_of(output, deltas(ids, finish))
    assert (text, last.finish_reason) == ("wait for ST\ufffd", finish.value)


def test_an_error_is_passed_on(tokenizer):
    delta = TokenDelta("r", [], finish=Finish.ERROR, error="a rank died")
    assert TextOutput(tokenizer, SamplingParams()).feed(delta).error == "a rank died"
    assert ChatOutput(tokenizer, SamplingParams()).feed(delta).error == "a rank died"


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(("include", "shown"), [(False, "one tw"), (True, "one two, thr")])
def test_a_stop_string_across_tokens_ends_text_and_count(tokenizer, size, include, shown):
    ids = flat(tokenizer, "one two, three four five six seven")
    output = TextOutput(tokenizer, SamplingParams(stop=["o, thr", "never"], include_stop_str_in_output=include))
    text, last = text_of(output, deltas(ids, Finish.LENGTH, size=size))
    assert text == shown
    assert (last.finish_reason, last.stop_reason) == ("stop", "o, thr")
    assert last.abort == (size < 100)  # the engine ended by itself in the last delta only
    assert output.completion_tokens == len(flat(tokenizer, "one two, three"))
    assert output.feed(TokenDelta("r", ids)) == TextDelta("", [])


def test_the_last_token_may_complete_a_stop_string(tokenizer):
    ids = flat(tokenizer, "one two")
    text, last = text_of(TextOutput(tokenizer, SamplingParams(stop="two")), deltas(ids, Finish.LENGTH))
    assert (text, last.finish_reason, last.abort) == ("one ", "stop", False)


def test_stop_strings_wait_for_min_tokens(tokenizer):
    ids = flat(tokenizer, "x a x a x a")
    output = TextOutput(tokenizer, SamplingParams(stop="a", min_tokens=3))
    assert text_of(output, deltas(ids, Finish.LENGTH))[0] == "x a x "


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(0, 255) | st.integers(0, 199_997), max_size=30),
    stop=st.text("ae .\ufffd", min_size=1, max_size=3),
    size=st.integers(1, 7),
)
def test_text_does_not_depend_on_the_steps(tokenizer, ids, stop, size):
    whole = tokenizer.decode(ids)
    text, last = text_of(TextOutput(tokenizer, SamplingParams(stop=stop)), deltas(ids, Finish.LENGTH, size=size))
    assert text == whole.partition(stop)[0]
    assert last.finish_reason == ("stop" if stop in whole else "length")


# Chat


@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_chat_answer(tokenizer, size):
    ids = flat(tokenizer, MODEL, THINKING, "Let me see.", END_MESSAGE, MODEL, TEXT, "It is 4.", END_MESSAGE, END_TURN)
    output = ChatOutput(tokenizer, SamplingParams())
    answer, last = answer_of(output, deltas(ids, Finish.STOP, END_TURN, size))
    assert (answer.reasoning, answer.content, answer.calls) == ("Let me see.", "It is 4.", [])
    assert (last.finish_reason, last.stop_reason, last.abort) == ("stop", None, False)
    assert output.completion_tokens == len(ids)
    assert output.reasoning_tokens == len(flat(tokenizer, "Let me see."))


@pytest.mark.parametrize(
    ("parts", "finish", "stop_token", "reason"),
    [
        ((MODEL, *CALL, END_TURN), Finish.STOP, END_TURN, "tool_calls"),
        ((MODEL, TEXT, "a", END_MESSAGE, MODEL, *CALL, END_TURN), Finish.STOP, END_TURN, "tool_calls"),
        ((MODEL, *CALL), Finish.LENGTH, None, "length"),
        ((MODEL, *CALL), Finish.ABORT, None, "abort"),
        ((MODEL, "f", CALL_JSON, "{", END_MESSAGE, END_TURN), Finish.STOP, END_TURN, "stop"),
        ((MODEL, "f", CALL_JSON, '{"name":'), Finish.LENGTH, None, "length"),
        ((MODEL, *CALL, MODEL, TEXT, "a", 11), Finish.STOP, 11, "stop"),
        ((MODEL, *CALL, END_OF_TEXT), Finish.STOP, END_OF_TEXT, "tool_calls"),
    ],
)
def test_finish_reasons(tokenizer, parts, finish, stop_token, reason):
    for size in (1, 100):
        output = ChatOutput(tokenizer, SamplingParams(stop_token_ids=[11]), PROMPT)
        answer, last = answer_of(output, deltas(flat(tokenizer, *parts), finish, stop_token, size))
        assert last.finish_reason == reason
        assert last.stop_reason == (11 if stop_token == 11 else None)
        assert not last.abort
        if reason == "tool_calls":
            assert [(call.name, call.arguments) for call in answer.calls] == [("f", "{}")]


def test_an_answer_of_calls_alone_has_no_content(tokenizer):
    output = ChatOutput(tokenizer, SamplingParams(), PROMPT)
    answer, _ = answer_of(output, deltas(flat(tokenizer, *CALL, END_TURN), Finish.STOP, END_TURN))
    assert (answer.content, answer.reasoning) == (None, None)
    assert isinstance(answer.calls[0], Call)


def test_a_requested_stop_id_is_not_part_of_the_answer(tokenizer):
    ids = flat(tokenizer, MODEL, TEXT, "a b c")
    output = ChatOutput(tokenizer, SamplingParams(stop_token_ids=[ids[-1]]))
    answer, last = answer_of(output, deltas(ids, Finish.STOP, ids[-1], 100))
    assert (answer.content, last.stop_reason, output.completion_tokens) == ("a b", ids[-1], len(ids))


@pytest.mark.parametrize("size", [1, 4, 100])
def test_stop_strings_count_in_the_text_only(tokenizer, size):
    ids = flat(tokenizer, MODEL, THINKING, "STOP here?", END_MESSAGE, MODEL, TEXT, "No ST", END_MESSAGE)
    ids += flat(tokenizer, MODEL, THINKING, "hm", END_MESSAGE, MODEL, TEXT, "OP now", END_MESSAGE, END_TURN)
    output = ChatOutput(tokenizer, SamplingParams(stop=["STOP"]))
    answer, last = answer_of(output, deltas(ids, Finish.STOP, END_TURN, size))
    assert (answer.reasoning, answer.content) == ("STOP here?hm", "No ")
    assert (last.finish_reason, last.stop_reason, last.abort) == ("stop", "STOP", size < 100)
    assert output.completion_tokens == len(ids) - len(flat(tokenizer, " now", END_MESSAGE, END_TURN))


def test_text_that_is_no_stop_string_after_all_is_shown(tokenizer):
    ids = flat(tokenizer, MODEL, TEXT, "No ST", END_MESSAGE, END_TURN)
    answer, last = answer_of(ChatOutput(tokenizer, SamplingParams(stop="STOP")), deltas(ids, Finish.STOP, END_TURN))
    assert (answer.content, last.finish_reason) == ("No ST", "stop")


def test_a_stop_string_may_be_included(tokenizer):
    ids = flat(tokenizer, MODEL, TEXT, "a STOP b")
    params = SamplingParams(stop="STOP", include_stop_str_in_output=True)
    assert answer_of(ChatOutput(tokenizer, params), deltas(ids, Finish.LENGTH))[0].content == "a STOP"


@pytest.mark.parametrize("stop", [[], ["xyz"]])
def test_a_model_that_writes_the_users_part_is_stopped(tokenizer, stop):
    ids = flat(tokenizer, MODEL, TEXT, "a", END_MESSAGE, USER)
    output = ChatOutput(tokenizer, SamplingParams(stop=stop))
    made = [output.feed(TokenDelta("r", [token])) for token in ids]
    assert (made[-1].finish_reason, made[-1].abort) == ("stop", True)
    assert output.feed(TokenDelta("r", flat(tokenizer, TEXT, "b"))) == ChatDelta([], [])


def test_the_end_of_turn_is_passed_over_when_asked(tokenizer):
    ids = flat(tokenizer, MODEL, TEXT, "a", END_MESSAGE, END_TURN, MODEL, TEXT, "b", END_MESSAGE)
    output = ChatOutput(tokenizer, SamplingParams(ignore_eos=True))
    answer, last = answer_of(output, deltas(ids, Finish.LENGTH))
    assert (answer.content, last.finish_reason) == ("ab", "length")


def test_skipping_control_tokens_does_not_touch_the_parser(tokenizer):
    ids = flat(tokenizer, MODEL, THINKING, "a", END_MESSAGE, MODEL, TEXT, "b", END_MESSAGE, END_TURN)
    for skip in (True, False):
        output = ChatOutput(tokenizer, SamplingParams(skip_special_tokens=skip))
        answer, _ = answer_of(output, deltas(ids, Finish.STOP, END_TURN))
        assert (answer.reasoning, answer.content) == ("a", "b")


def test_a_continued_message_is_content(tokenizer):
    output = ChatOutput(tokenizer, SamplingParams(), Rendered([], Start.TEXT))
    made = output.feed(TokenDelta("r", flat(tokenizer, " more"), cached_tokens=64))
    assert made.events == [Content(" more")]
    assert output.cached_tokens == 64


def test_pieces_of_one_kind_in_a_delta_are_joined(tokenizer):
    ids = flat(tokenizer, MODEL, THINKING, "a b c", END_MESSAGE, MODEL, TEXT, "d e f")
    for params in (SamplingParams(), SamplingParams(stop="never")):
        made = ChatOutput(tokenizer, params).feed(TokenDelta("r", ids))
        assert made.events == [Thought("a b c"), Content("d e f")]


# Log-probabilities


def chances(token: int, *others: int) -> Logprobs:
    return Logprobs([token, *others], [-0.5 - i for i in range(1 + len(others))], 1)


def test_logprobs_have_strings_bytes_and_offsets(tokenizer):
    ids = [*flat(tokenizer, "Hé"), 160, *flat(tokenizer, "!"), END_OF_TEXT]
    output = TextOutput(tokenizer, SamplingParams(logprobs=1), offset=10)
    delta = TokenDelta("r", ids, [chances(token, 0) for token in ids], Finish.STOP, END_OF_TEXT)
    entries = output.feed(delta).logprobs
    assert entries is not None
    assert [entry.chosen.token for entry in entries] == ["H", "é", "\ufffd", "!", "<|endoftext|>"]
    assert [entry.offset for entry in entries] == [10, 11, 12, 12, 14]
    assert entries[2].chosen.bytes == [0xE4]
    assert entries[1].chosen.bytes == list("é".encode())
    assert (entries[0].top[0].token, entries[0].top[0].logprob, entries[0].rank) == ("!", -1.5, 1)


def test_logprobs_cover_every_token_of_a_chat_turn(tokenizer):
    ids = flat(tokenizer, MODEL, THINKING, "a", END_MESSAGE, MODEL, TEXT, "b", END_MESSAGE, END_TURN)
    output = ChatOutput(tokenizer, SamplingParams(logprobs=0), show_ids=True)
    made = output.feed(TokenDelta("r", ids, [chances(token) for token in ids], Finish.STOP, END_TURN))
    assert made.logprobs is not None
    assert [entry.chosen.token for entry in made.logprobs] == [f"token_id:{token}" for token in ids]
    assert len(made.logprobs) == output.completion_tokens


def test_logprobs_end_with_the_token_that_completed_a_stop_string(tokenizer):
    ids = flat(tokenizer, "a b c d")
    output = TextOutput(tokenizer, SamplingParams(logprobs=0, stop="b"))
    made = output.feed(TokenDelta("r", ids, [chances(token) for token in ids]))
    assert made.tokens == ids[:2]
    assert made.logprobs is not None
    assert [entry.chosen.token_id for entry in made.logprobs] == ids[:2]


def test_a_prompt_begins_without_a_log_probability(tokenizer):
    ids = flat(tokenizer, "Hello world")
    entries = LogprobReader(tokenizer).read(ids, [None, chances(ids[1])])
    assert entries[0] is None
    assert entries[1] is not None
    assert entries[1].offset == 5


def test_no_logprobs_unless_asked_for(tokenizer):
    ids = flat(tokenizer, "a")
    assert TextOutput(tokenizer, SamplingParams()).feed(TokenDelta("r", ids, [chances(ids[0])])).logprobs is None
