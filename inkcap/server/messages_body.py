"""Body of `/v1/messages`, Anthropic's shape, and what it says as a chat request. What has no counterpart is refused."""

from typing import Annotated, Any

from pydantic import Field

from inkcap.base.errors import BadRequest, NotBuiltYet
from inkcap.server.conversation import Message, Transcript, chat_body, fields, flag, string, written
from inkcap.server.errors import shorten
from inkcap.server.schema import Body, ChatBody, Int32

LEAST_BUDGET = 1024  # tokens of thinking that may be asked for, as the API defines it
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
UNBUILT = ("container", "mcp_servers", "context_management", "speed")


class CountBody(Body):
    """Body of `POST /v1/messages/count_tokens`, and what it shares with `POST /v1/messages`."""

    model: str
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    container: Any = None
    mcp_servers: list[Any] | None = None
    context_management: dict[str, Any] | None = None
    speed: str | None = None
    # accepted and of no effect
    cache_control: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None

    def chat(self) -> ChatBody:
        """The same request to the chat API. Raises BadRequest and NotBuiltYet."""
        for name in UNBUILT:
            if getattr(self, name):
                raise NotBuiltYet(f"{name} is not built", name)
        transcript = Transcript()
        if text := system_text(self.system):
            transcript.add({"role": "system", "content": text})
        for i, message in enumerate(self.messages):
            add_message(transcript, message, f"messages.{i}")
        asked: dict[str, Any] = {"model": self.model, "messages": transcript.close(), "stream": False}
        if self.messages[-1].get("role") == "assistant":  # its text is to be gone on with
            asked |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.tools:
            asked["tools"] = [declared(tool, f"tools.{i}") for i, tool in enumerate(self.tools)]
        asked |= self.choice() | self.effort() | self.format()
        return chat_body(asked | self.limits())

    def limits(self) -> dict[str, Any]:
        """Length and sampling."""
        return {}

    def choice(self) -> dict[str, Any]:
        if self.tool_choice is None:
            return {}
        kind = string(self.tool_choice, "type", "tool_choice")
        single = {"parallel_tool_calls": False} if flag(self.tool_choice, "disable_parallel_tool_use", "tool_choice") \
            else {}  # fmt: skip
        if kind == "tool":
            name = string(self.tool_choice, "name", "tool_choice")
            return {"tool_choice": {"type": "function", "function": {"name": name}}, **single}
        if kind not in CHOICES:
            raise BadRequest(f"tool_choice.type is {shorten(kind)}; use auto, any, tool or none", "tool_choice.type")
        return {"tool_choice": CHOICES[kind], **single}

    def effort(self) -> dict[str, Any]:
        """How much to think, and whether to show it."""
        asked: dict[str, Any] = {}
        output = self.output_config or {}
        if (effort := output.get("effort")) is not None:
            asked["reasoning_effort"] = effort
        if self.thinking is None:
            return asked
        kind = string(self.thinking, "type", "thinking")
        if kind == "disabled":
            asked["reasoning_effort"] = "none"
        elif kind == "enabled":
            budget = self.thinking.get("budget_tokens")
            if type(budget) is not int or budget < LEAST_BUDGET:
                raise BadRequest(
                    f"thinking.budget_tokens is {shorten(budget)}; it must be {LEAST_BUDGET} or more",
                    "thinking.budget_tokens",
                )
            asked["thinking_token_budget"] = budget
        elif kind != "adaptive":
            raise BadRequest(f"thinking.type is {shorten(kind)}; use enabled, adaptive or disabled", "thinking.type")
        display = self.thinking.get("display")
        if display not in (None, "summarized", "omitted"):
            raise BadRequest(f"thinking.display is {shorten(display)}; use summarized or omitted", "thinking.display")
        return {**asked, "include_reasoning": display != "omitted"}

    def format(self) -> dict[str, Any]:
        """A schema that the answer must follow."""
        wanted = (self.output_config or {}).get("format", self.output_format)
        if wanted is None:
            return {}
        kind = string(fields(wanted, "output_config.format"), "type", "output_config.format")
        if kind != "json_schema":
            raise NotBuiltYet(f"output_config.format {shorten(kind)} is not built; use json_schema", "output_config")
        schema = fields(wanted.get("schema"), "output_config.format.schema")
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


class MessagesBody(CountBody):
    """Body of `POST /v1/messages`."""

    max_tokens: Int32
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    stream: bool = False
    service_tier: str | None = None  # of no effect
    inference_geo: str | None = None  # of no effect

    def limits(self) -> dict[str, Any]:
        names = ("max_tokens", "temperature", "top_p", "top_k")
        return {name: getattr(self, name) for name in names} | {"stop": self.stop_sequences}

    def effort(self) -> dict[str, Any]:
        asked = super().effort()
        budget = asked.get("thinking_token_budget", 0)
        if budget and budget >= self.max_tokens:
            raise BadRequest(
                f"thinking.budget_tokens is {budget:,}; it must be below max_tokens, which is {self.max_tokens:,}",
                "thinking.budget_tokens",
            )
        return asked


def system_text(system: str | list[dict[str, Any]] | None) -> str | list[Message]:
    if not isinstance(system, list):
        return system or ""
    return [{"type": "text", "text": text_of(block, f"system.{i}")} for i, block in enumerate(system)]


def text_of(block: object, path: str) -> str:
    kind = fields(block, path).get("type")
    if kind != "text":
        raise BadRequest(f"{path}.type is {shorten(kind)}; only text is possible here", f"{path}.type")
    return string(fields(block, path), "text", path)


def add_message(transcript: Transcript, message: dict[str, Any], path: str) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise BadRequest(
            f"{path}.role is {shorten(role)}; use user or assistant, and the field system for instructions",
            f"{path}.role",
        )
    if isinstance(content, str):
        if role == "user":
            transcript.add({"role": "user", "content": content})
        else:
            transcript.say(content)
        return
    if not isinstance(content, list) or (not content and role == "user"):
        raise BadRequest(
            f"{path}.content is {shorten(content)}; it must be a string or a list of blocks", f"{path}.content"
        )
    if role == "assistant":
        for j, block in enumerate(content):
            add_spoken(transcript, fields(block, f"{path}.content.{j}"), f"{path}.content.{j}")
        return
    parts: list[Message] = []
    for j, block in enumerate(content):
        place = f"{path}.content.{j}"
        if fields(block, place).get("type") != "tool_result":
            parts.append(part(block, place))
            continue
        if parts:
            transcript.add({"role": "user", "content": parts})
            parts = []
        transcript.answer(
            string(block, "tool_use_id", place), result(block.get("content"), place), flag(block, "is_error", place)
        )
    if parts:
        transcript.add({"role": "user", "content": parts})


def add_spoken(transcript: Transcript, block: dict[str, Any], path: str) -> None:
    """A block of the assistant's."""
    match block.get("type"):
        case "text":
            transcript.say(string(block, "text", path))
        case "thinking":
            transcript.think(string(block, "thinking", path))
        case "tool_use":
            arguments = fields(block.get("input", {}), f"{path}.input")
            transcript.call(string(block, "id", path), string(block, "name", path), written(arguments, f"{path}.input"))
        case kind:
            raise NotBuiltYet(
                f"{path}.type is {shorten(kind)}; an assistant has text, thinking and tool_use here", f"{path}.type"
            )


def part(block: dict[str, Any], path: str) -> Message:
    """A block of the user's, or of a tool's result, as a part of a chat message."""
    match block.get("type"):
        case "text":
            return {"type": "text", "text": string(block, "text", path)}
        case "image":
            return {"type": "image_url", "image_url": {"url": image_url(block.get("source"), f"{path}.source")}}
        case kind:
            raise NotBuiltYet(f"{path}.type is {shorten(kind)}; text and image are known here", f"{path}.type")


def image_url(source: object, path: str) -> str:
    given = fields(source, path)
    match given.get("type"):
        case "base64":
            return f"data:{string(given, 'media_type', path)};base64,{string(given, 'data', path)}"
        case "url":
            return string(given, "url", path)
        case kind:
            raise NotBuiltYet(f"{path}.type is {shorten(kind)}; base64 and url are known here", f"{path}.type")


def result(content: object, path: str) -> str | list[Message]:
    """What a tool gave."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest(f"{path}.content must be a string or a list of blocks", f"{path}.content")
    return [part(fields(b, f"{path}.content.{j}"), f"{path}.content.{j}") for j, b in enumerate(content)]


def declared(tool: dict[str, Any], path: str) -> Message:
    """A tool as the chat API declares it."""
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise NotBuiltYet(f"{path}.type is {shorten(kind)}; only custom tools are built", f"{path}.type")
    function = {
        "name": string(tool, "name", path),
        "parameters": fields(tool.get("input_schema"), f"{path}.input_schema"),
    }
    if tool.get("description") is not None:
        function["description"] = string(tool, "description", path)
    return {"type": "function", "function": function}
