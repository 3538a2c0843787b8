"""What `/v1/responses` answers with: items, usage, and the response around them. Encoded by msgspec."""

from typing import Any

from msgspec import Struct


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[None] = []
    logprobs: list[None] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class Said(Struct, tag_field="type", tag="message"):
    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class Reasoned(Struct, tag_field="type", tag="reasoning"):
    id: str
    status: str
    content: list[ReasoningText]
    summary: list[None] = []
    encrypted_content: None = None


class Called(Struct, tag_field="type", tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str


Item = Said | Reasoned | Called


class InputDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Fault(Struct):
    code: str
    message: str


class Incomplete(Struct):
    reason: str


class Reply(Struct):
    """A response, as far as it is."""

    id: str
    created_at: int
    completed_at: int | None
    status: str
    model: str
    output: list[Item]
    error: Fault | None
    incomplete_details: Incomplete | None
    usage: Usage | None
    instructions: str | None
    max_output_tokens: int | None
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    temperature: float
    top_p: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    metadata: dict[str, str]
    store: bool
    background: bool
    user: str | None
    truncation: str
    object: str = "response"
    service_tier: str = "default"
