"""The terminal chat against a real socket."""

import signal
import socket

import pytest

from inkcap.terminal.chat import Conversation, Refused, converse, explain, local_server, main, parse_effort


def talk(conversation, *lines, on_text=None):
    """Type lines; what was shown."""
    typed = iter(lines)
    shown = []

    def read(_):
        line = next(typed, None)
        if line is None:
            raise EOFError
        if isinstance(line, BaseException):
            raise line
        return line

    def write(text):
        shown.append(text)
        if on_text is not None:
            on_text("".join(shown))

    converse(conversation, read, write)
    return "".join(shown)


@pytest.fixture
def conversation(site):
    return Conversation(site.url + "/v1/", None, None, colour=True)


def test_thinking_is_dimmed_and_turns_are_kept(conversation, engine, chat_answer, tokenizer):
    chat_answer("let me see", "it is 4")
    shown = talk(conversation, "2+2?", "", "and again", "/quit", "never sent")
    assert shown == "\033[2mlet me see\033[0m\n\nit is 4\033[0m\n" * 2
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2
    assert conversation.messages[1] == {"role": "assistant", "content": "it is 4", "reasoning": "let me see"}
    assert len(engine.requests) == 2
    prompt = tokenizer.decode(engine.requests[1].token_ids)
    assert all(text in prompt for text in ("2+2?", "let me see", "it is 4", "and again"))


def test_ctrl_c_stops_the_answer_and_not_the_program(conversation, engine, text_answer):
    text_answer("on and on ")
    engine.pace_s = 0.002
    interrupted = []

    def on_text(shown):
        if shown.count("on and on") > 3 and not interrupted:
            interrupted.append(True)
            engine.answer = lambda _: [13, 200_006]
            signal.raise_signal(signal.SIGINT)

    shown = talk(conversation, "go", KeyboardInterrupt(), "again", on_text=on_text)
    assert "(stopped)" in shown
    assert "(/quit leaves)" in shown
    assert shown.endswith(".\033[0m\n")
    assert conversation.messages[1]["content"].startswith("on and on")
    assert len(engine.requests) == 2
    assert engine.open == {}


def test_commands(conversation, engine, chat_answer, tokenizer):
    chat_answer("", "fine")
    shown = talk(conversation, "/effort 0.25", "hi", "/reset", "/effort none", "hello", "/effort 7", "/what", "/help")
    first, second = (tokenizer.decode(request.token_ids) for request in engine.requests)
    assert "effort level: 0.25" in first
    assert "effort level: 0<|" in second
    assert "fine" not in second
    assert "effort is a number" in shown
    assert "no command /what" in shown


def test_answers_cannot_steer_the_terminal(site, chat_answer):
    chat_answer("", "a\x1b[2Jb\tc\nd")
    shown = talk(Conversation(site.url, None, None, colour=False), "hi")
    assert shown == "a�[2Jb\tc\nd\n"


@pytest.mark.parametrize("settings", [{"api_key": "k"}])
def test_errors_take_the_question_back(site, engine, chat_answer, settings):
    chat_answer("", "x")
    stranger = Conversation(site.url, None, None, colour=False)
    assert "error: 401 Unauthorized" in talk(stranger, "hi")
    assert stranger.messages == []
    wrong = Conversation(site.url, "other", "k", colour=False)
    assert "no model 'other'" in talk(wrong, "hi")
    engine.die("it was killed")
    assert "it was killed" in talk(Conversation(site.url, None, "k", colour=False), "hi")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert "error: no answer from" in talk(Conversation(f"http://127.0.0.1:{port}", None, None, False), "hi")


def test_a_server_that_cannot_start(tmp_path, capfd):
    with pytest.raises(Refused, match="did not start"), local_server(str(tmp_path / "nothing"), []):
        raise AssertionError("it started")
    assert "nothing" in capfd.readouterr().err


def test_command_line(site, chat_answer, monkeypatch, capsys):
    chat_answer("", "from afar")
    typed = iter(["hi"])
    monkeypatch.setattr("builtins.input", lambda _: next(typed, "/quit"))
    assert main([site.url, "--effort", "low"]) == 0
    assert "from afar" in capsys.readouterr().out


def test_small_parts():
    assert explain(500, b"<html>") == "the server answered with status 500"
    assert explain(400, b'{"error":{"message":"no"}}') == "no"
    assert parse_effort("0.5") == 0.5
    for wrong in ("1.5", "nan", "much"):
        with pytest.raises(ValueError, match="effort"):
            parse_effort(wrong)
