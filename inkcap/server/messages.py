"""`POST /v1/messages` and `/v1/messages/count_tokens`: the chat API in Anthropic's shape."""

import msgspec
from fastapi import APIRouter
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from inkcap.chat.output import ChatDelta
from inkcap.chat.parse import Content, Thought
from inkcap.chat.tools import CallPiece, CallStart
from inkcap.server import errors
from inkcap.server.body import JsonRoute, body_size
from inkcap.server.chat import Answering, begin
from inkcap.server.generation import Arrived
from inkcap.server.messages_body import CountBody, MessagesBody
from inkcap.server.prompt import chat_prompt
from inkcap.server.replies import encode
from inkcap.server.service import service_of
from inkcap.server.sse import EventStream, named_event, unless_gone

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/messages")
async def messages(request: Request, body: MessagesBody) -> Response:
    """An answer to a conversation, in Anthropic's shape."""
    service = service_of(request)
    service.note_unknown(body.unknown())
    identity = request.state.request_id
    answering = await begin(service, body.chat(), identity, body_size(request), "msg_", pieces=body.stream)
    speaking = Speaking(answering)
    if body.stream:
        return EventStream(speaking)
    try:
        return await unless_gone(request.receive, speaking.whole())
    finally:
        answering.close()


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, body: CountBody) -> Response:
    """Tokens of the prompt that the same fields would make."""
    service = service_of(request)
    service.model(body.model)
    service.note_unknown(body.unknown())
    prompt = await chat_prompt(service, body.chat(), body_size(request))
    return Response(encode({"input_tokens": len(prompt.token_ids)}), media_type="application/json")


class Usage(Struct):
    """Tokens of a message. What was found in the prefix cache is not counted as input again."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class Text(Struct, tag_field="type", tag="text"):
    text: str


class Thinking(Struct, tag_field="type", tag="thinking"):
    """`signature` is empty: this server takes thinking back as it is."""

    thinking: str
    signature: str = ""


class ToolUse(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw


Block = Text | Thinking | ToolUse
NOTHING = msgspec.Raw(b"{}")


def is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except msgspec.DecodeError:
        return False


class Reply(Struct):
    id: str
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage
    type: str = "message"
    role: str = "assistant"


PING = named_event("ping", {"type": "ping"})


class Speaking:
    """One answer as blocks: whole, or as events."""

    idle = PING

    def __init__(self, answering: Answering) -> None:
        self.answering = answering
        self.run = answering.run
        self.close = answering.close
        self.blocks: list[Block] = []
        self.open = False  # the last block may still grow
        self.arguments: list[str] = []  # of the last block, if it is a call
        self.called = False
        self.stop_reason: str | None = None
        self.stop_sequence: str | None = None

    def usage(self) -> Usage:
        used = self.answering.usage()
        cached = used.prompt_tokens_details.cached_tokens if used.prompt_tokens_details else 0
        return Usage(used.prompt_tokens - cached, used.completion_tokens, cached)

    def reply(self) -> Reply:
        answering = self.answering
        return Reply(
            answering.identity, answering.model, self.blocks, self.stop_reason, self.stop_sequence, self.usage()
        )

    async def whole(self) -> Response:
        """The reply, once everything is there."""
        async for arrived in self.run.arrivals():
            for _, delta in self.answering.read(arrived):
                self.feed(delta)
        return Response(encode(self.reply()), media_type="application/json")

    def opening(self) -> bytes:
        return named_event("message_start", {"type": "message_start", "message": self.reply()}) + PING

    def tell(self, arrived: Arrived) -> bytes:
        return b"".join([event for _, delta in self.answering.read(arrived) for event in self.feed(delta)])

    def closing(self) -> bytes:
        ending = {"stop_reason": self.stop_reason, "stop_sequence": self.stop_sequence}
        usage = self.usage()
        ended = named_event("message_delta", {"type": "message_delta", "delta": ending, "usage": usage})
        return ended + named_event("message_stop", {"type": "message_stop"})

    def failure(self, error: errors.ErrorBody) -> bytes:
        return named_event("error", errors.anthropic(error))

    def feed(self, delta: ChatDelta) -> list[bytes]:
        """Take one delta; gives its events."""
        out: list[bytes] = []
        for event in delta.events:
            if isinstance(event, Content):
                out += self.grow(Text(event.text), Text(""), {"type": "text_delta", "text": event.text})
            elif isinstance(event, Thought):
                if self.answering.body.include_reasoning:
                    piece = {"type": "thinking_delta", "thinking": event.text}
                    out += self.grow(Thinking(event.text), Thinking(""), piece)
            elif isinstance(event, CallPiece):
                out.append(self.argue(event.text))
            elif isinstance(event, CallStart):
                out.append(self.begin(ToolUse(event.id, event.name, NOTHING)))
            else:
                out += [self.begin(ToolUse(event.id, event.name, NOTHING)), self.argue(event.arguments), self.finish()]
        if delta.finish_reason is not None:
            out.append(self.finish())
            self.end(delta)
        return out

    def grow(self, block: Block, start: Block, piece: dict[str, str]) -> list[bytes]:
        """Add to the last block, or begin another one."""
        out: list[bytes] = []
        last = self.blocks[-1] if self.open else None
        if isinstance(last, Text) and isinstance(block, Text):
            last.text += block.text
        elif isinstance(last, Thinking) and isinstance(block, Thinking):
            last.thinking += block.thinking
        else:
            out.append(self.begin(start))
            self.blocks[-1] = block
        return [*out, self.delta(piece)]

    def begin(self, block: Block) -> bytes:
        """End the last block and begin `block`."""
        ended = self.finish()
        self.blocks.append(block)
        self.open = True
        self.arguments = []
        begun = {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": block}
        return ended + named_event("content_block_start", begun)

    def argue(self, text: str) -> bytes:
        """A piece of the arguments of the call that is open."""
        self.arguments.append(text)
        return self.delta({"type": "input_json_delta", "partial_json": text})

    def delta(self, piece: dict[str, str]) -> bytes:
        grown = {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": piece}
        return named_event("content_block_delta", grown)

    def finish(self) -> bytes:
        """The end of the block that is open, if one is."""
        if not self.open:
            return b""
        self.open = False
        block = self.blocks[-1]
        if isinstance(block, ToolUse):
            written = "".join(self.arguments)
            if is_object(written):
                block.input = msgspec.Raw(written.encode())
                self.called = True
            else:  # cut by the length: no input that a client could use, but not lost either
                self.blocks[-1] = Text(written)
        return named_event("content_block_stop", {"type": "content_block_stop", "index": len(self.blocks) - 1})

    def end(self, delta: ChatDelta) -> None:
        if isinstance(delta.stop_reason, str):
            self.stop_reason, self.stop_sequence = "stop_sequence", delta.stop_reason
        elif delta.finish_reason == "length":
            self.stop_reason = "max_tokens"
        else:
            self.stop_reason = "tool_use" if self.called else "end_turn"
