"""`inkcap chat`: a conversation in the terminal, with a running server (URL) or one started for the occasion (model).

Thinking is dimmed. Ctrl-C stops the answer and not the program; at the prompt it clears the line.
"""

import argparse
import asyncio
import contextlib
import re
import readline  # noqa: F401  input() gets line editing and history by its import
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import msgspec

HELP = "/quit leaves, /reset starts anew, /effort VALUE sets thinking effort (0 to 1, or none … max), /help shows this"
DIM, BOLD, PLAIN = "\033[2m", "\033[1m", "\033[0m"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline: an answer must not steer the terminal
START_SECONDS = 1800.0  # a large checkpoint takes its time


class Refused(Exception):
    """The server answered with an error; the message is for the user."""


class Conversation:
    """What has been said, and how to get the next answer from a server."""

    def __init__(self, url: str, model: str | None, api_key: str | None, colour: bool) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.colour = colour
        self.effort: str | float | None = None
        self.messages: list[dict[str, str]] = []

    async def answer(self, text: str, write: Callable[[str], object]) -> None:
        """Ask, and write the answer as it comes. What was written stays in the conversation when this is cancelled.

        Raises Refused when the server does not answer; the question is taken back then.
        """
        self.messages.append({"role": "user", "content": text})
        reply = {"role": "assistant", "content": "", "reasoning": ""}
        try:
            async for kind, piece in self.pieces():
                if kind == "reasoning" and not reply["reasoning"] and self.colour:
                    write(DIM)
                if kind == "content" and not reply["content"] and reply["reasoning"]:
                    write((PLAIN if self.colour else "") + "\n\n")
                reply[kind] += piece
                write(CONTROL.sub("�", piece))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Refused(f"no answer from {self.url}: {error}") from error
        finally:
            if reply["content"] or reply["reasoning"]:
                self.messages.append({key: value for key, value in reply.items() if value or key != "reasoning"})
            else:
                self.messages.pop()
            write((PLAIN if self.colour else "") + "\n")

    async def pieces(self) -> AsyncIterator[tuple[str, str]]:
        """("reasoning" | "content", text) as the server streams them."""
        body: dict[str, Any] = {"messages": self.messages, "stream": True}
        if self.model:
            body["model"] = self.model
        if self.effort is not None:
            body["reasoning_effort"] = self.effort
        timeout = aiohttp.ClientTimeout(total=None, connect=10)
        async with (
            aiohttp.ClientSession(headers=self.headers, timeout=timeout) as session,
            session.post(f"{self.url}/v1/chat/completions", json=body) as response,
        ):
            if response.status != 200:
                raise Refused(explain(response.status, await response.read()))
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = msgspec.json.decode(line[6:])
                if "error" in chunk:
                    raise Refused(chunk["error"]["message"])
                for choice in chunk["choices"]:
                    delta = choice["delta"]
                    if thought := delta.get("reasoning") or delta.get("reasoning_content"):
                        yield "reasoning", thought
                    if said := delta.get("content"):
                        yield "content", said
                    for call in delta.get("tool_calls") or ():
                        function = call["function"]
                        yield "content", f"{function.get('name') or ''}{function.get('arguments') or ''}"


def explain(status: int, body: bytes) -> str:
    """The message of an error reply."""
    try:
        error = msgspec.json.decode(body)["error"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"the server answered with status {status}"
    return error["message"] if isinstance(error, dict) else f"{status} {error}"


def parse_effort(text: str) -> str | float:
    """A name or a number from 0 to 1. Raises ValueError with a message for the user."""
    if text in EFFORTS:
        return text
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ValueError(f"effort is a number from 0 to 1 or one of {', '.join(EFFORTS)}; not {text!r}")
    return value


def command(conversation: Conversation, line: str) -> str | None:
    """Carry out a slash command; the words to show, or None to leave."""
    name, _, rest = line[1:].strip().partition(" ")
    if name in ("quit", "exit", "q"):
        return None
    if name == "reset":
        conversation.messages.clear()
        return "a new conversation"
    if name == "effort":
        try:
            conversation.effort = parse_effort(rest.strip()) if rest.strip() else None
        except ValueError as error:
            return str(error)
        return f"effort {'as the server sets it' if conversation.effort is None else conversation.effort}"
    return HELP if name in ("help", "?") else f"no command /{name}. {HELP}"


def converse(conversation: Conversation, read: Callable[[str], str], write: Callable[[str], object]) -> None:
    """The loop: read a line, answer it, until /quit or end of file."""
    prompt = "> "
    with asyncio.Runner() as runner:
        while True:
            try:
                line = read(prompt).strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                write("\n(/quit leaves)\n")
                continue
            if line.startswith("/"):
                said = command(conversation, line)
                if said is None:
                    return
                write(said + "\n")
            elif line:
                try:
                    runner.run(conversation.answer(line, write))
                except KeyboardInterrupt:
                    write("(stopped)\n")
                except Refused as error:
                    write(f"error: {error}\n")


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
            conversation = Conversation(url, args.model, args.api_key, colour)
            conversation.effort = args.effort
            write(f"{BOLD if colour else ''}{args.target}{PLAIN if colour else ''}  {HELP}\n")
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
