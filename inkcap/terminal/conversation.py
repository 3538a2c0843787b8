"""A conversation with a server: what has been said, and the next answer as it streams, ready for a terminal.

Nothing an answer contains can steer the terminal: control characters are replaced.
"""

import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import msgspec

DIM, BOLD, PLAIN = "\033[2m", "\033[1m", "\033[0m"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline
CONNECT_SECONDS = 10
Write = Callable[[str], object]
Message = dict[str, Any]


class Refused(Exception):
    """The server did not answer, or answered with an error; the message is for the user."""


class Reply:
    """One answer while it comes: shown piece by piece, kept as a message."""

    def __init__(self, write: Write, colour: bool, thinking: bool) -> None:
        """`thinking`: show it, dimmed where there is colour; else one word says that it goes on."""
        self.show = write
        self.dim, self.plain = (DIM, PLAIN) if colour else ("", "")
        self.thinking = thinking
        self.content = ""
        self.reasoning = ""
        self.calls: list[Message] = []
        self.usage: dict[str, Any] = {}
        self.asked = time.perf_counter()
        self.first: float | None = None
        self.last = self.asked

    @property
    def said(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def feed(self, chunk: dict[str, Any]) -> None:
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            thought = delta.get("reasoning") or delta.get("reasoning_content")
            if thought or delta.get("content") or delta.get("tool_calls"):
                self.last = time.perf_counter()
                self.first = self.first or self.last
            if thought:
                self.think(thought)
            if text := delta.get("content"):
                self.apart()
                self.content += text
                self.write(text)
            for call in delta.get("tool_calls") or ():
                self.call(call)

    def think(self, text: str) -> None:
        if not self.reasoning:
            self.show(self.dim if self.thinking else f"{self.dim}thinking …")
        self.reasoning += text
        if self.thinking:
            self.write(text)

    def call(self, delta: dict[str, Any]) -> None:
        function = delta["function"]
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        if delta["index"] == len(self.calls):
            self.apart()
            if self.content or self.calls:
                self.show("\n")
            self.calls.append({"id": delta.get("id"), "type": "function", "function": {"name": "", "arguments": ""}})
            self.show("calls ")
        whole = self.calls[delta["index"]]["function"]
        whole["name"] += name
        whole["arguments"] += arguments
        self.write(name + (" " if name else "") + arguments)

    def apart(self) -> None:
        """What comes first after thinking stands apart from it."""
        if self.reasoning and not self.content and not self.calls:
            self.show(f"{self.plain}\n\n")

    def write(self, text: str) -> None:
        self.show(CONTROL.sub("�", text))

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if calls := [call for call in self.calls if complete(call["function"]["arguments"])]:
            message["tool_calls"] = calls
        return message

    def figures(self) -> str:
        """Tokens, speed and the time to the first token."""
        tokens, prompt = self.usage.get("completion_tokens"), self.usage.get("prompt_tokens")
        if self.first is None or tokens is None:
            return "no figures: the last answer did not come to its end"
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        speed = f", {(tokens - 1) / (self.last - self.first):.1f} per second" if self.last > self.first else ""
        wait = self.first - self.asked
        return f"{tokens} tokens{speed}, first after {wait:.2f} s; prompt {prompt} tokens, {cached} from the cache"


class Conversation:
    """What has been said, and how to ask for more."""

    def __init__(self, url: str, model: str | None, api_key: str | None, colour: bool) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.colour = colour
        self.thinking = True  # whether it is shown
        self.effort: str | float | None = None
        self.system = ""
        self.tools: list[Any] = []
        self.settings: dict[str, float] = {}  # sampling parameters of each request
        self.messages: list[Message] = []
        self.figures = "nothing was answered yet"

    @property
    def pending(self) -> list[Message]:
        """Tool calls of the last answer that have no result yet."""
        for results, message in enumerate(reversed(self.messages)):
            if message["role"] != "tool":
                return message.get("tool_calls", [])[results:]
        return []

    async def answer(self, text: str, write: Write) -> None:
        """Take a line, as the result of a pending call if there is one, and write the answer as it comes.

        What was answered stays in the conversation when this is cancelled. Raises Refused when the server does not
        answer; the line is taken back then.
        """
        before = len(self.messages)
        if calls := self.pending:
            call = calls[0]
            self.messages.append(
                {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}
            )
            if self.pending:
                return
        else:
            self.messages.append({"role": "user", "content": text})
        await self.ask(write, lambda: self.messages.__delitem__(slice(before, None)))

    async def again(self, write: Write) -> None:
        """Drop the last answer and ask for another. Raises Refused, as `answer` does; the old answer is back then."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise Refused("there is no answer to replace")
        old = self.messages.pop()
        await self.ask(write, lambda: self.messages.append(old))

    async def ask(self, write: Write, undo: Callable[[], object]) -> None:
        """Stream one answer; `undo` is called when it has nothing."""
        reply = Reply(write, self.colour, self.thinking)
        try:
            async for chunk in self.chunks():
                reply.feed(chunk)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Refused(f"no answer from {self.url}: {error}") from error
        finally:
            if reply.said:
                self.messages.append(reply.message())
                self.figures = reply.figures()
            else:
                undo()
            write((PLAIN if self.colour else "") + "\n")

    def body(self) -> dict[str, Any]:
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {**self.settings, "messages": system + self.messages}
        if self.model:
            body["model"] = self.model
        if self.effort is not None:
            body["reasoning_effort"] = self.effort
        if self.tools:
            body["tools"] = self.tools
        return {**body, "stream": True, "stream_options": {"include_usage": True}}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Chunks as the server streams them. Raises Refused, aiohttp.ClientError or TimeoutError."""
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS)
        async with (
            aiohttp.ClientSession(headers=self.headers, timeout=timeout) as session,
            session.post(f"{self.url}/v1/chat/completions", json=self.body()) as response,
        ):
            if response.status != 200:
                raise Refused(explain(response.status, await response.read()))
            rest = b""
            async for data in response.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if not line.startswith(b"data: "):
                        continue
                    if line.startswith(b"data: [DONE]"):
                        return
                    chunk = msgspec.json.decode(line[6:])
                    if "error" in chunk:
                        raise Refused(chunk["error"]["message"])
                    yield chunk
        raise Refused("the connection ended before the answer was complete")


def complete(json: str) -> bool:
    """Whether a call's arguments came to their end; a call that was cut off can have no result."""
    try:
        msgspec.json.decode(json)
    except msgspec.DecodeError:
        return False
    return True


def explain(status: int, body: bytes) -> str:
    """The message of an error reply."""
    try:
        error = msgspec.json.decode(body)["error"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return f"the server answered with status {status}"
    return error["message"] if isinstance(error, dict) else f"{status} {error}"
