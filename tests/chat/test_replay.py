"""Answers that come back become the tokens they were: keys, thinking, cut answers, bounds."""

import json

import pytest

from inkcap.chat.render import render
from inkcap.chat.replay import Replays, closed, without_thinking
from inkcap.chat.tokens import CALL_JSON, END_MESSAGE, END_TURN, MODEL, TEXT, THINKING
from inkcap.chat.tools import Call

ASK = [{"role": "user", "content": "Weather?"}]
ARGUMENTS = '{"city":"SF","n":1.0}'


@pytest.fixture
def turn(tokenizer):
    """A prompt, and an answer to it whose words the tokenizer would split otherwise."""
    payload = f'{{"name":"f","args":{ARGUMENTS}}}'
    thought = [MODEL, THINKING, *bytewise(tokenizer, "Think."), END_MESSAGE]
    rest = [MODEL, TEXT, *bytewise(tokenizer, "Hello"), END_MESSAGE]
    rest += [MODEL, *tokenizer.encode_text("f"), CALL_JSON, *bytewise(tokenizer, payload), END_MESSAGE, END_TURN]
    return render(tokenizer, ASK).token_ids, thought, rest


def bytewise(tokenizer, text):
    return [tokenizer.token_bytes.index(bytes((byte,))) for byte in text.encode()]


def kept(turn, salt=""):
    prompt, thought, rest = turn
    replays = Replays()
    replays.add(prompt, thought + rest, "Think.", "Hello", [Call(0, "call_1", "f", ARGUMENTS)], salt)
    return replays


def message(**more):
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
    return {"role": "assistant", "content": "Hello", "tool_calls": [call], **more}


def rendered(tokenizer, replays, answer, salt=""):
    conversation = [*ASK, answer, {"role": "tool", "tool_call_id": "call_1", "content": "18"}]
    return render(tokenizer, conversation, replays=replays, salt=salt).token_ids


def test_an_answer_comes_back_by_token_however_the_client_wrote_its_arguments(tokenizer, turn):
    prompt, thought, rest = turn
    answer = message(reasoning="Think.")
    answer["tool_calls"][0]["function"]["arguments"] = json.dumps({"n": 1.0, "city": "SF"}, indent=2)
    found = rendered(tokenizer, kept(turn), answer)
    assert found[: len(prompt) + len(thought) + len(rest)] == prompt + thought + rest
    assert found != rendered(tokenizer, None, answer)
    assert found[-4:] == rendered(tokenizer, None, answer)[-4:], "the result of the tool follows"


def test_thinking_that_the_client_left_out_stays_out(tokenizer, turn):
    prompt, _, rest = turn
    assert rendered(tokenizer, kept(turn), message())[: len(prompt + rest)] == prompt + rest


def test_thinking_that_the_client_left_out_comes_back_where_the_server_was_told_so(tokenizer, turn):
    prompt, thought, rest = turn
    replays = Replays(hidden=True)
    replays.add(prompt, thought + rest, "Think.", "Hello", [Call(0, "call_1", "f", ARGUMENTS)])
    whole = prompt + thought + rest
    assert rendered(tokenizer, replays, message())[: len(whole)] == whole
    assert rendered(tokenizer, replays, message(reasoning="Think."))[: len(whole)] == whole


@pytest.mark.parametrize(
    "other",
    [
        {"content": "hello"},
        {"reasoning": "Other."},
        {"tool_calls": []},
        {"refusal": "no"},
        {"content": [{"type": "text", "text": "Hello!"}]},
    ],
)
def test_another_answer_is_rendered(tokenizer, turn, other):
    answer = message(**other)
    conversation = [*ASK, answer]
    assert render(tokenizer, conversation, replays=kept(turn)) == render(tokenizer, conversation)


def test_the_same_words_after_another_prompt_or_salt_are_rendered(tokenizer, turn):
    plain = rendered(tokenizer, None, message())
    assert rendered(tokenizer, kept(turn, "tenant"), message()) == plain
    assert rendered(tokenizer, kept(turn, "tenant"), message(), "tenant") != plain
    conversation = [{"role": "user", "content": "Other?"}, message()]
    assert render(tokenizer, conversation, replays=kept(turn)) == render(tokenizer, conversation)


def test_a_primed_prompt_and_an_answer_cut_off_come_back_whole(tokenizer):
    prompt = render(tokenizer, ASK).token_ids
    replays = Replays()
    words = bytewise(tokenizer, "Hel")
    replays.add([*prompt, MODEL], [TEXT, *words], "", "Hel", [])
    found = render(tokenizer, [*ASK, {"role": "assistant", "content": "Hel"}], replays=replays).token_ids
    assert found == [*prompt, MODEL, TEXT, *words, END_MESSAGE, END_TURN]


def test_what_is_kept_is_bounded_and_the_oldest_goes(tokenizer):
    replays = Replays(most_tokens=20)
    for i in range(5):
        replays.add([1, i], [MODEL, TEXT, 7, 7, 7, 7, END_MESSAGE, END_TURN], "", f"{i}", [])
    assert len(replays._kept) == 2
    assert replays._tokens == 16


def test_messages_of_an_answer():
    thought, text = [MODEL, THINKING, 1, 2, END_MESSAGE], [MODEL, TEXT, 3, END_MESSAGE]
    assert without_thinking([*thought, *text, END_TURN]) == [*text, END_TURN]
    assert without_thinking([*thought[1:], *text, END_TURN]) == [*text, END_TURN]
    assert closed([*thought, MODEL, TEXT, 3]) == [*thought, *text, END_TURN]
    assert closed([*text, END_TURN]) == closed(text) == [*text, END_TURN]
