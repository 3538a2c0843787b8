"""`/v1/responses`: an answer as a list of items, whole, as typed events, or in the background; kept for later."""

import asyncio
import time
import uuid
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from inkcap.base.errors import BadRequest, ContextTooLong, InkcapError, NotBuiltYet
from inkcap.base.log import logger
from inkcap.chat.output import ChatDelta
from inkcap.chat.parse import Content, Thought
from inkcap.chat.tools import CallPiece, CallStart
from inkcap.server.body import JsonRoute, body_size
from inkcap.server.chat import Answering, begin
from inkcap.server.conversation import Message, Transcript
from inkcap.server.errors import ErrorBody, describe, shorten
from inkcap.server.generation import Arrived
from inkcap.server.prompt import chat_prompt
from inkcap.server.replies import encode
from inkcap.server.responses_body import ResponsesBody, input_messages, turns_of
from inkcap.server.responses_items import (
    Called,
    Fault,
    Incomplete,
    InputDetails,
    Item,
    OutputDetails,
    OutputText,
    Reasoned,
    ReasoningText,
    Reply,
    Said,
    Usage,
)
from inkcap.server.service import Service, service_of
from inkcap.server.sse import EventStream, named_event, unless_gone

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/responses")
async def create(request: Request, body: ResponsesBody) -> Response:
    """An answer to a conversation, in the shape of the Responses API."""
    service = service_of(request)
    service.note_unknown(body.unknown() + [f"text.{key}" for key in body.text or () if key != "format"])
    body.refuse_unbuilt()
    service.responses.resolve(body.input)
    earlier = service.responses.earlier(body.previous_response_id)
    size = body_size(request)
    name = request.state.request_id
    if f"resp_{name}" in service.responses.entries:  # a caller's id, used again
        name = uuid.uuid4().hex
    answering = await fitting(service, body, earlier, name, size)
    responding = Responding(body, answering, earlier, size)
    if body.kept:
        service.responses.keep(responding)
    if body.background:
        task = asyncio.ensure_future(responding.in_background())
        service.responses.background.add(task)
        task.add_done_callback(service.responses.background.discard)
        return json_reply(responding.reply())
    if body.stream:
        return EventStream(responding)
    try:
        return await unless_gone(request.receive, responding.whole())
    finally:
        responding.close()


async def fitting(service: Service, body: ResponsesBody, earlier: list[Message], name: str, size: int) -> Answering:
    """Submit a conversation; with truncation, as many of its last turns as fit. Raises what `begin` does."""
    turns = len(turns_of([*earlier, *input_messages(body.input)])) if body.truncation == "auto" else 0
    dropped = 0
    while True:
        try:
            return await begin(service, body.chat(earlier, dropped), name, size, "resp_", pieces=body.stream)
        except ContextTooLong:
            dropped += max(1, (turns - dropped) // 4)  # a quarter of them at once, or this would take long
            if dropped >= turns:
                raise


@router.get("/v1/responses/{response_id}")
async def retrieve(request: Request, response_id: str, stream: bool = False) -> Response:
    """A response that is kept, as far as it is."""
    if stream:
        raise NotBuiltYet("a kept response cannot be streamed yet; ask without stream", "stream")
    return json_reply(service_of(request).responses.get(response_id).reply())


@router.get("/v1/responses/{response_id}/input_items")
async def input_items(
    request: Request,
    response_id: str,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """The items of a kept response's input, its own ones; `after` is the id of the last one seen."""
    response = service_of(request).responses.get(response_id)
    assert isinstance(response, Responding), "nothing else is kept"
    items = response.input_items()
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise BadRequest(f"after is {shorten(after)}, which is no item of this response", "after")
    start = ids.index(after) + 1 if after is not None else 0
    page = items[start : start + limit]
    edges = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return json_reply({"object": "list", "data": page, "has_more": len(items) > start + limit, **edges})


@router.post("/v1/responses/input_tokens")
async def input_tokens(request: Request, body: ResponsesBody) -> Response:
    """Tokens of the prompt that the same fields would make."""
    service = service_of(request)
    body.refuse_unbuilt()
    service.responses.resolve(body.input)
    chat = body.chat(service.responses.earlier(body.previous_response_id))
    service.model(chat.model)
    prompt = await chat_prompt(service, chat, body_size(request))
    return json_reply({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})


@router.delete("/v1/responses/{response_id}")
async def delete(request: Request, response_id: str) -> Response:
    """Forget a response; one that runs ends."""
    service_of(request).responses.forget(response_id)
    return json_reply({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(request: Request, response_id: str) -> Response:
    """End a response that runs. One that was cancelled stays so; one that has ended is a 400."""
    response = service_of(request).responses.get(response_id)
    assert isinstance(response, Responding), "nothing else is kept"
    if not response.running and response.status != "cancelled":
        raise BadRequest(f"the response is {response.status} already; only one that runs can be cancelled")
    response.cancel()
    return json_reply(response.reply())


def json_reply(value: object) -> Response:
    return Response(encode(value), media_type="application/json")


class Responding:
    """One response on its way from tokens to items, and afterwards as it is kept."""

    idle = b""

    def __init__(self, body: ResponsesBody, answering: Answering, earlier: list[Message], size_bytes: int) -> None:
        """`earlier`: messages of the responses that it follows. `size_bytes`: of the request's body."""
        self.body = body
        self.answering = answering
        self.run = answering.run
        self.earlier = earlier
        self.size_bytes = size_bytes
        self.identity = answering.identity
        self.status = "in_progress"
        self.output: list[Item] = []
        self.open = False  # the last item may still grow
        self.fault: Fault | None = None
        self.usage: Usage | None = None
        self.completed_at: int | None = None
        self.sequence = 0  # of events

    @property
    def running(self) -> bool:
        return self.status == "in_progress"

    def reply(self) -> Reply:
        body, params = self.body, self.answering.params
        reasoning = {"effort": None, "summary": None} | (body.reasoning or {})
        return Reply(
            id=self.identity,
            created_at=self.answering.created,
            completed_at=self.completed_at,
            status=self.status,
            model=self.answering.model,
            output=self.output,
            error=self.fault,
            incomplete_details=Incomplete("max_output_tokens") if self.status == "incomplete" else None,
            usage=self.usage,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning=reasoning,
            temperature=params.temperature,
            top_p=params.top_p,
            text={"format": {"type": "text"}} | (body.text or {}),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            metadata=body.metadata or {},
            store=body.kept,
            background=bool(body.background),
            user=body.user,
            truncation=body.truncation or "disabled",
        )

    def input_items(self) -> list[dict[str, Any]]:
        """The request's input as items, each with an id."""
        items = self.body.input
        if isinstance(items, str):
            items = [{"role": "user", "content": [{"type": "input_text", "text": items}]}]
        name = self.identity.removeprefix("resp_")
        return [{"type": "message", "id": f"item_{name}_{i}", **item} for i, item in enumerate(items)]

    def conversation(self) -> list[Message]:
        """All messages up to this response, its own included, without its instructions."""
        transcript = Transcript()
        for item in self.output:
            if isinstance(item, Called):
                transcript.call(item.call_id, item.name, item.arguments)
            else:
                text = "".join(part.text for part in item.content)
                transcript.say(text) if isinstance(item, Said) else transcript.think(text)
        return [*self.earlier, *input_messages(self.body.input), *transcript.close()]

    def cancel(self) -> None:
        if self.running:
            self.end("cancelled")
            self.run.abort()

    def close(self) -> None:
        """Abort what still runs: its client left, or the server ends."""
        if self.running:
            self.end("cancelled")
        self.answering.close()

    async def in_background(self) -> None:
        try:
            await self.whole()
        except InkcapError as error:
            self.fail(describe(error))
        except Exception as error:  # the border of the process: whoever asks for it sees that it failed
            logger.exception("a background response failed: %s", type(error).__name__)
            self.fail(describe(error))
        finally:
            self.close()

    async def whole(self) -> Response:
        """The reply, once everything is there."""
        try:
            async for arrived in self.run.arrivals():
                for _, delta in self.answering.read(arrived):
                    self.feed(delta)
        except InkcapError as error:
            self.fail(describe(error))
            raise
        return json_reply(self.reply())

    def opening(self) -> bytes:
        return self.event("response.created", response=self.reply()) + self.event(
            "response.in_progress", response=self.reply()
        )

    def tell(self, arrived: Arrived) -> bytes:
        return b"".join([event for _, delta in self.answering.read(arrived) for event in self.feed(delta)])

    def closing(self) -> bytes:
        kind = "completed" if self.status == "completed" else "incomplete"
        return self.event(f"response.{kind}", response=self.reply())

    def failure(self, error: ErrorBody) -> bytes:
        """The last event of a stream that failed."""
        self.fail(error)
        return self.event("response.failed", response=self.reply())

    def fail(self, error: ErrorBody) -> None:
        if self.running:
            self.fault = Fault("server_error", error.error.message)
            self.end("failed")

    def event(self, kind: str, **fields: object) -> bytes:
        """One event; they are numbered from 0."""
        number, self.sequence = self.sequence, self.sequence + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **fields})

    def feed(self, delta: ChatDelta) -> list[bytes]:
        """Take one delta; gives its events. What comes after a cancellation is dropped."""
        out: list[bytes] = []
        for event in delta.events if self.running else ():
            if isinstance(event, Content):
                out += self.grow(Said, event.text)
            elif isinstance(event, Thought):
                out += self.grow(Reasoned, event.text)
            elif isinstance(event, CallPiece):
                out.append(self.argue(event.text))
            elif isinstance(event, CallStart):
                out += self.call(event.id, event.name)
            else:
                out += [*self.call(event.id, event.name), self.argue(event.arguments), *self.finish_item("completed")]
        if delta.finish_reason is not None and self.running:
            status = "incomplete" if delta.finish_reason == "length" else "completed"
            out += self.finish_item(status)
            self.end(status)
        return out

    def grow(self, kind: type[Said] | type[Reasoned], text: str) -> list[bytes]:
        """Add text to the last item, or begin another one."""
        out: list[bytes] = []
        if not (self.open and isinstance(self.output[-1], kind)):
            out += self.finish_item("completed")
            if kind is Said:
                item, part = Said(self.item_id("msg"), "in_progress", []), OutputText("")
                begun: Item = Said(item.id, item.status, [])
                item.content.append(part)
            else:
                item, part = Reasoned(self.item_id("rs"), "in_progress", []), ReasoningText("")
                begun = Reasoned(item.id, item.status, [])
                item.content.append(part)
            self.output.append(item)
            self.open = True
            out.append(self.event("response.output_item.added", output_index=self.index, item=begun))
            out.append(self.event("response.content_part.added", part=part, **self.place(item)))
        item = self.output[-1]
        assert not isinstance(item, Called), "a call does not grow"
        item.content[0].text += text
        self.size_bytes += len(text)
        place = self.place(item)
        if kind is Said:
            out.append(self.event("response.output_text.delta", delta=text, logprobs=[], **place))
        else:
            out.append(self.event("response.reasoning_text.delta", delta=text, **place))
        return out

    def call(self, identity: str, name: str) -> list[bytes]:
        """Begin a call."""
        out = self.finish_item("completed")
        item = Called(self.item_id("fc"), "in_progress", identity, name, "")
        self.output.append(item)
        self.open = True
        return [*out, self.event("response.output_item.added", output_index=self.index, item=item)]

    def argue(self, text: str) -> bytes:
        """A piece of the arguments of the call that is open."""
        item = self.output[-1]
        assert isinstance(item, Called), "arguments belong to a call"
        item.arguments += text
        self.size_bytes += len(text)
        place = {"item_id": item.id, "output_index": self.index}
        return self.event("response.function_call_arguments.delta", delta=text, **place)

    def finish_item(self, status: str) -> list[bytes]:
        """The end of the item that is open, if one is."""
        if not self.open:
            return []
        self.open = False
        item = self.output[-1]
        item.status = status
        out: list[bytes] = []
        if isinstance(item, Called):
            kind = "response.function_call_arguments.done"
            place = {"item_id": item.id, "output_index": self.index}
            out.append(self.event(kind, arguments=item.arguments, name=item.name, **place))
        else:
            part, place = item.content[0], self.place(item)
            if isinstance(item, Said):
                out.append(self.event("response.output_text.done", text=part.text, logprobs=[], **place))
            else:
                out.append(self.event("response.reasoning_text.done", text=part.text, **place))
            out.append(self.event("response.content_part.done", part=part, **place))
        out.append(self.event("response.output_item.done", output_index=self.index, item=item))
        return out

    @property
    def index(self) -> int:
        """Of the last item."""
        return len(self.output) - 1

    def place(self, item: Item) -> dict[str, object]:
        return {"item_id": item.id, "output_index": self.index, "content_index": 0}

    def item_id(self, kind: str) -> str:
        return f"{kind}_{self.identity.removeprefix('resp_')}_{len(self.output)}"

    def end(self, status: str) -> None:
        """Set the last status, and count."""
        if self.open:
            self.output[-1].status = "incomplete"
            self.open = False
        self.status = status
        self.completed_at = int(time.time()) if status == "completed" else None
        used = self.answering.usage()
        cached = used.prompt_tokens_details.cached_tokens if used.prompt_tokens_details else 0
        thought = used.completion_tokens_details.reasoning_tokens if used.completion_tokens_details else 0
        self.usage = Usage(
            used.prompt_tokens, InputDetails(cached), used.completion_tokens, OutputDetails(thought), used.total_tokens
        )
