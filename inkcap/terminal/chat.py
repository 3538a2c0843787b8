"""`inkcap chat`: a conversation in the terminal, with a running server (URL) or one started for the occasion (model).

Thinking is dimmed. Ctrl-C stops the answer and not the program; at the prompt it clears the line.
"""

import argparse
import asyncio
import contextlib
import os
import readline
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp

from inkcap.terminal.commands import Next, carry_out, completions, parse_effort
from inkcap.terminal.conversation import BOLD, CONTROL, PLAIN, Conversation, Refused, Write

START_SECONDS = 1800.0  # a large checkpoint takes its time
HISTORY_LINES = 1000
HISTORY = Path("~/.inkcap_history")
FENCE = '"""'
Read = Callable[[str], str]


def converse(conversation: Conversation, read: Read, write: Write) -> None:
    """The loop: read a line, answer it, until /quit or end of file."""
    with asyncio.Runner() as runner:
        while True:
            try:
                line = read_message(prompt(conversation), read)
            except EOFError:
                return
            except KeyboardInterrupt:
                write("\n(/quit leaves)\n")
                continue
            again = False
            if line.startswith("/"):
                outcome = carry_out(conversation, line)
                if outcome is Next.LEAVE:
                    return
                if isinstance(outcome, str):
                    write(outcome + "\n")
                    continue
                again = True
            elif not line and not conversation.pending:
                continue
            try:
                runner.run(conversation.again(write) if again else conversation.answer(line, write))
            except KeyboardInterrupt:
                write("(stopped)\n")
            except Refused as error:
                write(f"error: {CONTROL.sub('�', str(error))}\n")


def prompt(conversation: Conversation) -> str:
    """What stands before the cursor: whose words are awaited."""
    if calls := conversation.pending:
        return CONTROL.sub("�", f"result of {calls[0]['function']['name']}> ").replace("\n", " ")
    return "> "


def read_message(shown: str, read: Read) -> str:
    """A line, or the lines between two that are three double quotes."""
    line = read(shown).strip()
    if line != FENCE:
        return line
    lines: list[str] = []
    while (line := read(". ")).strip() != FENCE:
        lines.append(line)
    return "\n".join(lines)


@contextlib.contextmanager
def history(path: Path) -> Iterator[None]:
    """Lines of earlier conversations behind the ↑ key, commands behind tab; this one's lines are kept at the end.

    Only the owner may read the file. Raises Refused when it cannot be read or written.
    """
    readline.set_completer_delims(" ")
    readline.set_completer(lambda text, n: dict(enumerate(completions(text))).get(n))
    readline.parse_and_bind("tab: complete")
    readline.set_history_length(HISTORY_LINES)
    with readable(path):
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        readline.read_history_file(path)
    try:
        yield
    finally:
        with readable(path):
            readline.write_history_file(path)


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Refused(f"the history {path} cannot be used: {error.strerror}; --no-history does without") from error


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def local_server(model: str, flags: list[str]) -> Iterator[str]:
    """A server of ours for `model`; gives its address once it is ready, and ends it afterwards. Raises Refused."""
    port = free_port()
    arguments = [sys.executable, "-m", "inkcap", "serve", model, "--port", str(port), "--log-level", "warning", *flags]
    # its own session: Ctrl-C here must not reach it
    process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        asyncio.run(until_ready(url, process))
        yield url
    finally:
        process.terminate()
        process.wait()


async def until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    async with aiohttp.ClientSession() as session:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass  # not listening yet
            await asyncio.sleep(0.2)
    raise Refused(f"the server did not start (exit code {process.poll()}); its messages stand above")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `inkcap chat`; flags it does not know go to the server it starts."""
    parser.add_argument("target", metavar="MODEL_OR_URL", help="a checkpoint, or http://host:port of a running server")
    parser.add_argument("--model", help="name to ask a running server for; default: its first")
    parser.add_argument("--api-key")
    parser.add_argument("--effort", type=parse_effort, help="thinking effort, 0 to 1 or a name")
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument("--no-history", action="store_true", help=f"neither read nor write {HISTORY}")


def run(args: argparse.Namespace, serve_flags: list[str]) -> int:
    """Hold the conversation; the exit code."""
    colour = sys.stdout.isatty()

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        with contextlib.ExitStack() as stack:
            url = args.target
            if not url.startswith(("http://", "https://")):
                url = stack.enter_context(local_server(args.target, serve_flags))
            elif serve_flags:
                raise Refused(f"unknown flag {serve_flags[0]!r}: the server runs already, and takes no flags from here")
            if sys.stdin.isatty() and not args.no_history:
                stack.enter_context(history(HISTORY.expanduser()))
            conversation = Conversation(url, args.model, args.api_key, colour)
            conversation.effort = args.effort
            conversation.system = args.system
            write(f"{BOLD if colour else ''}{args.target}{PLAIN if colour else ''}  /help lists commands\n")
            converse(conversation, input, write)
    except Refused as error:
        print(f"inkcap chat: {error}", file=sys.stderr)
        return 1
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="inkcap chat", description=__doc__)
    add_flags(parser)
    args, rest = parser.parse_known_args(argv)
    return run(args, rest)


if __name__ == "__main__":
    sys.exit(main())
