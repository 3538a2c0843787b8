"""Body of `/v1/responses`, and what it says as a chat request. What has no counterpart is refused by name."""

from typing import Annotated, Any

from pydantic import Field

from inkcap.base.errors import BadRequest, NotBuiltYet
from inkcap.server.conversation import Message, Transcript, chat_body, fields, string
from inkcap.server.errors import shorten
from inkcap.server.schema import Body, ChatBody, Int32

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "stop", "stop_token_ids", "ignore_eos", "logit_bias", "thinking_token_budget", "priority", "cache_salt",
)  # fmt: skip
UNBUILT = ("prompt", "conversation", "context_management", "moderation")
ROLES = ("user", "system", "developer", "assistant")
# What `include` may ask for: reasoning comes back in the open, so that it can be sent again; the others are of what no
# response here has.
INCLUDED = (
    "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)  # fmt: skip
Items = str | list[dict[str, Any]]


class ResponsesBody(Body):
    """Body of `POST /v1/responses`. The sampling parameters of the chat API are accepted too."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    max_output_tokens: Int32 | None = None
    stream: bool = False
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None
    truncation: str | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    prompt: Any = None
    conversation: Any = None
    context_management: Any = None
    moderation: Any = None
    # accepted and of no effect
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    service_tier: str | None = None
    stream_options: dict[str, Any] | None = None
    max_tool_calls: int | None = None  # of tools that a server runs; this one runs none
    # the chat API's
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logit_bias: dict[str, float] | None = None
    thinking_token_budget: int | None = None
    priority: Int32 = 0
    cache_salt: Annotated[str, Field(max_length=128)] | None = None

    @property
    def kept(self) -> bool:
        """Whether the response can be asked for later."""
        return self.store is not False

    def refuse_unbuilt(self) -> None:
        """Raise NotBuiltYet for the first feature this version lacks, BadRequest for fields in contradiction."""
        for name in UNBUILT:
            if getattr(self, name) is not None:
                raise NotBuiltYet(f"{name} is not built", name)
        if self.truncation not in (None, "disabled", "auto"):
            raise BadRequest(f"truncation is {shorten(self.truncation)}; use auto or disabled", "truncation")
        if self.top_logprobs:
            raise NotBuiltYet("top_logprobs is not built here; /v1/chat/completions has it", "top_logprobs")
        for wanted in self.include or ():
            if wanted not in INCLUDED:
                raise NotBuiltYet(f"include {shorten(wanted)} is not built", "include")
        if self.background and self.stream:
            raise NotBuiltYet("background responses cannot be streamed yet; leave out one of the two", "background")
        if self.background and not self.kept:
            raise BadRequest("background needs store: the response is fetched later", "background")

    def chat(self, earlier: list[Message], dropped: int = 0) -> ChatBody:
        """The same request to the chat API; `earlier` are the messages that it follows. Raises BadRequest.

        The first `dropped` user messages and what answers them are left out.
        """
        messages: list[Message] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        asked: dict[str, Any] = {name: getattr(self, name) for name in SAMPLING}
        conversation = latest([*earlier, *input_messages(self.input)], dropped)
        asked |= {"model": self.model, "messages": [*messages, *conversation]}
        asked["max_tokens"] = self.max_output_tokens
        if self.tools:
            asked["tools"] = [declared(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)]
            asked |= {"parallel_tool_calls": self.parallel_tool_calls, "tool_choice": choice(self.tool_choice)}
        elif self.tool_choice not in (None, "auto", "none"):
            raise BadRequest("tool_choice is given but tools is empty", "tool_choice")
        if self.reasoning is not None:
            asked["reasoning_effort"] = self.reasoning.get("effort")
        if (wanted := (self.text or {}).get("format")) is not None:
            asked["response_format"] = text_format(fields(wanted, "text.format"))
        return chat_body(asked)


def turns_of(messages: list[Message]) -> list[int]:
    """Where the turns of a conversation begin: its user messages."""
    return [at for at, message in enumerate(messages) if message["role"] == "user"]


def latest(messages: list[Message], dropped: int) -> list[Message]:
    """A conversation without its first turns, but for what the system says in them."""
    if not dropped:
        return messages
    begin = turns_of(messages)[dropped]
    return [message for message in messages[:begin] if message["role"] in ("system", "developer")] + messages[begin:]


def text_format(wanted: dict[str, Any]) -> dict[str, Any]:
    """`text.format` as `response_format`."""
    if string(wanted, "type", "text.format") != "json_schema":
        return wanted
    described = {key: wanted[key] for key in ("name", "schema", "strict", "description") if key in wanted}
    return {"type": "json_schema", "json_schema": described}


def declared(tool: dict[str, Any], path: str) -> Message:
    """A tool as the chat API declares it."""
    if tool.get("type") != "function":
        raise NotBuiltYet(f"{path}.type is {shorten(tool.get('type'))}; only function tools are built", f"{path}.type")
    keys = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in keys if key in tool}}


def choice(given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """`tool_choice` as the chat API has it."""
    if not isinstance(given, dict):
        return given
    match given.get("type"):
        case "function":
            return {"type": "function", "function": {"name": string(given, "name", "tool_choice")}}
        case "allowed_tools":
            tools = given.get("tools")
            if not isinstance(tools, list):
                raise BadRequest("tool_choice.tools is not a list", "tool_choice.tools")
            names = [string(fields(t, f"tool_choice.tools[{i}]"), "name", f"tool_choice.tools[{i}]")
                     for i, t in enumerate(tools)]  # fmt: skip
            allowed = [{"type": "function", "function": {"name": name}} for name in names]
            mode = string(given, "mode", "tool_choice")
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
        case kind:
            raise NotBuiltYet(f"tool_choice.type {shorten(kind)} is not built; use function", "tool_choice")


def input_messages(items: Items) -> list[Message]:
    """The chat messages of a request's input."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    transcript = Transcript()
    for i, item in enumerate(items):
        add_item(transcript, item, f"input[{i}]")
    return transcript.close()


def add_item(transcript: Transcript, item: dict[str, Any], path: str) -> None:
    match item.get("type", "message"):
        case "message":
            add_message(transcript, item, path)
        case "reasoning":
            for key in ("content", "summary"):
                if text := "".join(texts(item.get(key), f"{path}.{key}")):
                    transcript.think(text)
                    break
        case "function_call":
            arguments = string(item, "arguments", path)
            transcript.call(string(item, "call_id", path), string(item, "name", path), arguments)
        case "function_call_output":
            output = item.get("output")
            if isinstance(output, list):
                output = [part(fields(p, f"{path}.output[{j}]"), f"{path}.output[{j}]") for j, p in enumerate(output)]
            elif not isinstance(output, str):
                raise BadRequest(f"{path}.output is {shorten(output)}; it must be a string or a list", f"{path}.output")
            transcript.answer(string(item, "call_id", path), output)
        case kind:
            raise NotBuiltYet(
                f"{path}.type {shorten(kind)} is not built; use message, reasoning, function_call or "
                "function_call_output",
                f"{path}.type",
            )


def add_message(transcript: Transcript, item: dict[str, Any], path: str) -> None:
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise BadRequest(f"{path}.role is {shorten(role)}; use one of {', '.join(ROLES)}", f"{path}.role")
    if role == "assistant":
        for text in [content] if isinstance(content, str) else texts(content, f"{path}.content"):
            transcript.say(text)
    elif isinstance(content, str):
        transcript.add({"role": role, "content": content})
    elif isinstance(content, list) and content:
        parts = [part(fields(p, f"{path}.content[{j}]"), f"{path}.content[{j}]") for j, p in enumerate(content)]
        transcript.add({"role": role, "content": parts})
    else:
        raise BadRequest(f"{path}.content is {shorten(content)}; it must be a string or a list", f"{path}.content")


def texts(parts: object, path: str) -> list[str]:
    """Text of the parts of what an assistant said or thought."""
    if not isinstance(parts, list | None):
        raise BadRequest(f"{path} is not a list", path)
    found: list[str] = []
    for i, one in enumerate(parts or ()):
        given = fields(one, f"{path}[{i}]")
        key = "refusal" if given.get("type") == "refusal" else "text"
        found.append(string(given, key, f"{path}[{i}]"))
    return found


def part(given: dict[str, Any], path: str) -> Message:
    """A part of a message as the chat API has it."""
    match given.get("type"):
        case "input_text" | "output_text" | "text":
            return {"type": "text", "text": string(given, "text", path)}
        case "input_image" if given.get("file_id") is None:
            return {"type": "image_url", "image_url": {"url": string(given, "image_url", path)}}
        case "input_audio":
            return given
        case kind:
            raise NotBuiltYet(f"{path}.type {shorten(kind)} is not built; use input_text", f"{path}.type")
