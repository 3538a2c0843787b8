"""The terminal chat against a real socket."""

import contextlib
import itertools
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading

import pytest

from inkcap.chat.tokens import CALL_JSON, END_MESSAGE, END_TURN, MODEL, TEXT
from inkcap.terminal.chat import converse, local_server, main
from inkcap.terminal.commands import COMMANDS, carry_out, completions, parse_effort
from inkcap.terminal.conversation import Conversation, Refused, Reply, explain
from tests.server.conftest import until


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


def test_a_stream_that_breaks_keeps_what_was_said(conversation, engine, site, text_answer):
    text_answer("half ")
    engine.pace_s = 0.002

    def on_text(shown):
        if shown.count("half") > 2:
            site.do(lambda: engine.die("it was killed"))

    shown = talk(conversation, "go", on_text=on_text)
    assert "error: the engine stopped" in shown or "it was killed" in shown
    assert conversation.messages[1]["content"].startswith("half half")


def test_retry_replaces_the_last_answer(conversation, engine, chat_answer, tokenizer):
    chat_answer("", "first")
    assert "no answer to replace" in talk(conversation, "/retry")
    talk(conversation, "question")
    chat_answer("", "second")
    assert "second" in talk(conversation, "/retry")
    assert engine.requests[0].token_ids == engine.requests[1].token_ids
    assert [message["content"] for message in conversation.messages] == ["question", "second"]
    engine.capacity = 0
    assert "error:" in talk(conversation, "/retry")
    assert conversation.messages[1]["content"] == "second"


def test_settings_and_the_system_message_go_along(conversation, engine, chat_answer, tokenizer):
    chat_answer("", "x")
    talk(conversation, "/set temperature 0.25", "/set max_tokens 7", "/set seed 3", "/system Be brief.", "hi")
    (request,) = engine.requests
    assert (request.params.temperature, request.max_tokens, request.seed) == (0.25, 7, 3)
    assert "Be brief." in tokenizer.decode(request.token_ids)
    shown = talk(conversation, "/set", "/set seed", "/set heat 3", "/set top_k x", "/model alias", "/model")
    assert "temperature 0.25, max_tokens 7, seed 3" in shown
    assert "no setting heat; there are temperature" in shown
    assert "top_k is a number; not 'x'" in shown
    assert conversation.settings == {"temperature": 0.25, "max_tokens": 7}
    assert conversation.model is None


def test_thinking_can_be_hidden(conversation, chat_answer):
    chat_answer("secret thoughts", "fine")
    shown = talk(conversation, "/thinking off", "hi")
    assert "secret" not in shown
    assert "\033[2mthinking …\033[0m\n\nfine" in shown
    assert conversation.messages[1]["reasoning"] == "secret thoughts"
    assert "secret thoughts" in talk(conversation, "/thinking", "hi")


def test_the_next_lines_are_results_of_calls(conversation, engine, chat_answer, tokenizer, tmp_path):
    def call(city):
        payload = json.dumps({"name": "get_weather", "args": {"city": city}})
        return [MODEL, *tokenizer.encode_text("get_weather"), CALL_JSON, *tokenizer.encode_text(payload), END_MESSAGE]

    text = [MODEL, TEXT, *tokenizer.encode_text("I look."), END_MESSAGE]
    engine.answer = lambda _: [*text, *call("SF"), *call("NY"), END_TURN]
    (tmp_path / "tools").write_text('[{"type":"function","function":{"name":"get_weather","parameters":{}}}]')
    (tmp_path / "wrong").write_text("{}")
    prompts = []

    def read(shown):
        prompts.append(shown)
        if len(engine.requests) == 1:
            chat_answer("", "sunny")
        return next(lines)

    lines = iter([f"/tools {tmp_path}/tools", "weather?", "18 degrees", "19 degrees", f"/tools {tmp_path}/wrong", "/q"])
    shown = []
    converse(conversation, read, shown.append)
    assert prompts == ["> ", "> ", "result of get_weather> ", "result of get_weather> ", "> ", "> "]
    said = "".join(shown)
    assert 'I look.\ncalls get_weather {"city":"SF"}\ncalls get_weather {"city":"NY"}' in said.replace('": "', '":"')
    assert "sunny" in said
    assert "no JSON list" in said
    prompt = tokenizer.decode(engine.requests[1].token_ids)
    assert "tool_declare" in prompt
    assert prompt.index("18 degrees") < prompt.index("19 degrees")


def test_messages_of_several_lines(conversation, chat_answer):
    chat_answer("", "x")
    talk(conversation, '"""', "one", "", "  two", '"""', "three")
    assert [message["content"] for message in conversation.messages[::2]] == ["one\n\n  two", "three"]


def test_conversations_are_saved_and_taken_up_again(conversation, chat_answer, tmp_path, site):
    chat_answer("hm", "ä")
    file = tmp_path / "talk.json"
    shown = talk(conversation, "/system S", "hi", f"/save {file}", "/save", f"/save {tmp_path}/no/where")
    assert "2 messages in" in shown
    assert "needs the name of a file" in shown
    assert "No such file" in shown
    other = Conversation(site.url, None, None, colour=False)
    assert "2 messages" in talk(other, f"/load {file}", f"/load {tmp_path}/none", "/load")
    assert (other.messages, other.system) == (conversation.messages, "S")
    file.write_text("[]")
    assert "no conversation that /save wrote" in talk(other, f"/load {file}")
    assert len(other.messages) == 2


def test_figures(conversation, chat_answer):
    chat_answer("", "one two three")
    shown = talk(conversation, "/stats", "hi", "/stats")
    assert shown.startswith("nothing was answered yet")
    assert "tokens" in shown
    assert "3 from the cache" in shown


def test_help_and_completion_name_every_command(conversation):
    shown = carry_out(conversation, "/help")
    assert all(f"/{name}" in shown for name in COMMANDS)
    assert completions("/s") == ["/system ", "/set ", "/stats ", "/save "]
    assert completions("s") == []


class Terminal:
    """`inkcap chat` in a pseudo-terminal; `shown` grows as it writes."""

    def __init__(self, *words, home):
        self.master, slave = pty.openpty()
        environment = {**os.environ, "HOME": str(home), "TERM": "dumb"}
        words = [sys.executable, "-m", "inkcap.terminal.chat", *words]
        self.process = subprocess.Popen(
            words, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=environment
        )
        os.close(slave)
        self.shown = ""
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        with contextlib.suppress(OSError):  # how a pseudo-terminal says that the other end is closed
            while data := os.read(self.master, 65536):
                self.shown += data.decode(errors="replace")

    def type(self, line):
        os.write(self.master, f"{line}\r".encode())

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.reader.join(20)
        os.close(self.master)


def test_in_a_terminal(site, engine, text_answer, tmp_path):
    text_answer("on and on ")
    engine.pace_s = 0.002
    with contextlib.closing(Terminal(site.url, home=tmp_path)) as terminal:
        until(lambda: "> " in terminal.shown)
        terminal.type("go on")
        until(lambda: terminal.shown.count("on and on") > 3)
        terminal.process.send_signal(signal.SIGINT)
        until(lambda: "(stopped)" in terminal.shown)
        until(lambda: not engine.open)
        engine.answer = lambda _: itertools.chain([END_TURN])
        terminal.type("/effort low")
        until(lambda: "effort low\r\n" in terminal.shown)
        terminal.type("/quit")
        assert terminal.process.wait(20) == 0
    kept = tmp_path / ".inkcap_history"
    assert kept.read_text().splitlines() == ["go on", "/effort low", "/quit"]
    assert kept.stat().st_mode & 0o777 == 0o600


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
    assert main([site.url, "--max-num-seqs", "3"]) == 1
    assert "--max-num-seqs" in capsys.readouterr().err


def test_a_call_that_was_cut_off_is_not_sent_back():
    reply = Reply(lambda _: None, colour=False, thinking=True)
    for more in ({"id": "a", "function": {"name": "f", "arguments": '{"x'}}, {"function": {"arguments": '":1'}}):
        reply.feed({"choices": [{"delta": {"tool_calls": [{"index": 0, **more}]}}]})
    assert reply.message() == {"role": "assistant", "content": ""}
    reply.feed({"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}}]})
    assert reply.message()["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x":1}'}


def test_small_parts():
    assert explain(500, b"<html>") == "the server answered with status 500"
    assert explain(400, b"\xff") == "the server answered with status 400"
    assert explain(400, b'{"error":{"message":"no"}}') == "no"
    assert parse_effort("0.5") == 0.5
    for wrong in ("1.5", "nan", "much"):
        with pytest.raises(ValueError, match="effort"):
            parse_effort(wrong)
