"""`POST /v1/chat/completions`: messages in, an answer with thinking, text and tool calls out, streamed or whole."""

import time
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from inkcap.base.request import SamplingParams
from inkcap.chat.grammar import Wish, read_wish
from inkcap.chat.output import Answer, ChatDelta, ChatOutput, LogprobReader, TokenLogprob
from inkcap.chat.parse import Content, Event, Thought
from inkcap.chat.render import Rendered
from inkcap.chat.tools import Call, CallPiece
from inkcap.server import replies
from inkcap.server.body import JsonRoute, body_size
from inkcap.server.errors import ErrorBody
from inkcap.server.generation import Arrived, Run
from inkcap.server.prompt import chat_prompt
from inkcap.server.replies import MARK, ChatStreamChoice, ChatStreamDelta, Framer, encode
from inkcap.server.schema import ChatBody
from inkcap.server.service import Service, service_of
from inkcap.server.sse import DONE, EventStream, event, unless_gone

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: ChatBody) -> Response:
    """An answer to a conversation."""
    service = service_of(request)
    identity = body.request_id or request.state.request_id
    answering = await begin(service, body, identity, body_size(request), pieces=body.stream)
    if body.stream:
        return EventStream(ChatStream(answering))
    try:
        return await unless_gone(request.receive, answering.whole())
    finally:
        answering.close()


async def begin(
    service: Service,
    body: ChatBody,
    request_id: str,
    size: int,
    prefix: str = "chatcmpl-",
    pieces: bool = False,
) -> "Answering":
    """Check a conversation, render it and submit it: the one way in for every API that has conversations.

    `size` is the body's, in bytes; `prefix` begins the reply's id; `pieces`: the arguments of calls may be
    told as they come. Raises what `Service.start` raises, and BadRequest.
    """
    service.ready()
    model = service.model(body.model)
    body.refuse_unbuilt()
    service.note_unknown(body.unknown())
    legacy = body.adopt_functions()
    wish = await service.off_loop(size, lambda: chat_wish(body))
    prompt = await chat_prompt(service, body, size)
    rules = wish.rules(prompt.start, await service.grammars.errors(wish.grammars()))
    ids = prompt.token_ids[-body.truncate_prompt_tokens :] if body.truncate_prompt_tokens else prompt.token_ids
    params = body.params(service.defaults)
    run = service.start(
        [ids], params, request_id=request_id, priority=body.priority, salt=body.cache_salt or "", rules=rules
    )
    manner = Manner(legacy=legacy, named=wish.choice == "named", pieces=pieces and rules is not None)
    return Answering(service, body, run, prompt, params, f"{prefix}{request_id}", model, manner)


def chat_wish(body: ChatBody) -> Wish:
    """What the body asks of its answer. Raises BadRequest."""
    return read_wish(
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel=body.parallel_tool_calls,
        formats=body.formats(),
        thinking=body.thinking_token_budget,
    )


@dataclass(frozen=True)
class Manner:
    """How a reply tells of calls."""

    legacy: bool  # as `function_call`, in answer to `functions`
    named: bool  # the request named the tool, so calling it is no reason to have stopped
    pieces: bool  # calls are told as they come, since grammars hold them to their form


class Answering:
    """One request on its way from tokens to chunks or to a reply."""

    def __init__(
        self,
        service: Service,
        body: ChatBody,
        run: Run,
        prompt: Rendered,
        params: SamplingParams,
        identity: str,
        model: str,
        manner: Manner,
    ) -> None:
        self.service = service
        self.body = body
        self.run = run
        self.params = params
        self.identity = identity
        self.model = model
        self.manner = manner
        self.created = int(time.time())
        show_ids = body.return_tokens_as_token_ids
        self.outputs = [ChatOutput(service.tokenizer, params, prompt, show_ids, manner.pieces) for _ in run.tracks]

    def close(self) -> None:
        """Abort what still runs, and count what the parsers saw."""
        self.run.close()
        metrics = self.service.metrics
        for output in self.outputs:
            metrics.reasoning_tokens += output.reasoning_tokens
            metrics.malformed_tool_calls += output.parser.malformed_calls
            metrics.undeclared_tool_calls += output.parser.undeclared_calls
            metrics.bare_text_blocks += output.parser.bare_texts
            metrics.tool_call_parses += output.parser.calls + output.parser.malformed_calls
        self.outputs = []

    def usage(self) -> replies.Usage:
        completion = sum(output.completion_tokens for output in self.outputs)
        reasoning = sum(output.reasoning_tokens for output in self.outputs)
        return self.run.usage(completion, reasoning)

    def remember(self, output: ChatOutput) -> None:
        """Keep a finished answer, so that its tokens come back when the conversation does."""
        answer, prompt = output.answer, self.run.tracks[0].request.token_ids
        said = (answer.reasoning or "", answer.content or "", answer.calls)
        self.service.replays.add(prompt, output.tokens, *said, salt=self.body.cache_salt or "")

    def read(self, arrived: Arrived) -> list[tuple[int, ChatDelta]]:
        """What each sequence adds to its answer: its index and its events."""
        found: list[tuple[int, ChatDelta]] = []
        for index, deltas in arrived:
            delta = self.outputs[index].feed(replies.merged(deltas))
            if delta.abort:
                self.run.stop(index)
            if delta.finish_reason in ("stop", "tool_calls", "length") and delta.stop_reason is None:
                self.remember(self.outputs[index])
            found.append((index, delta))
        return found

    async def whole(self) -> Response:
        """The reply, once everything is there."""
        parts = [Part() for _ in self.outputs]
        async for arrived in self.run.arrivals():
            for index, delta in self.read(arrived):
                parts[index].add(delta)
        reply = replies.ChatReply(
            self.identity,
            self.created,
            self.model,
            [self.choice(index, part) for index, part in enumerate(parts)],
            self.usage(),
        )
        first = self.run.tracks[0]
        if self.body.prompt_logprobs is not None and first.prompt_logprobs is not None:
            reader = LogprobReader(self.service.tokenizer, False, show_ids=self.body.return_tokens_as_token_ids)
            reply.prompt_logprobs = replies.prompt_logprobs(reader.read(first.request.token_ids, first.prompt_logprobs))
        if self.body.return_token_ids:
            reply.prompt_token_ids = first.request.token_ids
        return Response(encode(reply), media_type="application/json")

    def finish_reason(self, reason: str | None) -> str | None:
        """As this API names it."""
        if reason != "tool_calls":
            return reason
        return "stop" if self.manner.named else "function_call" if self.manner.legacy else reason

    def choice(self, index: int, part: "Part") -> replies.ChatChoice:
        answer = part.answer
        thought = answer.reasoning if self.body.include_reasoning else None
        calls = [replies.ToolCall(call.id, replies.CallFunction(call.name, call.arguments)) for call in answer.calls]
        content = answer.content
        if content is None and not calls:
            content = ""
        message = replies.ChatMessage(content, thought, thought, calls)
        if self.manner.legacy and calls:
            message.function_call, message.tool_calls = calls[0].function, []
        return replies.ChatChoice(
            index,
            message,
            replies.chat_logprobs(part.logprobs) if self.body.logprobs else None,
            self.finish_reason(part.finish_reason),
            part.stop_reason,
            part.tokens if self.body.return_token_ids else msgspec.UNSET,
        )


class ChatStream:
    """An answer as chunks of the chat API."""

    idle = b""

    def __init__(self, answering: Answering) -> None:
        self.answering = answering
        self.run = answering.run
        self.close = answering.close
        body, options = answering.body, answering.body.stream_options
        self.running_usage = options is not None and options.continuous_usage_stats
        self.last_usage = options is not None and options.include_usage
        self.framer = Framer(
            "chat.completion.chunk", answering.identity, answering.created, answering.model, self.last_usage
        )
        self.include_reasoning = body.include_reasoning
        self.token_ids = body.return_token_ids
        self.legacy = answering.manner.legacy
        self.plain = not (self.running_usage or self.token_ids or body.logprobs)
        self.around: dict[tuple[int, type[Event]], list[bytes]] = {}  # chunks but for their text, by choice and event

    def opening(self) -> bytes:
        role = ChatStreamDelta(role="assistant", content="")
        return b"".join([self.chunk(ChatStreamChoice(index, role)) for index in range(len(self.run.tracks))])

    def tell(self, arrived: Arrived) -> bytes:
        out: list[bytes] = []
        for index, delta in self.answering.read(arrived):
            if self.plain and delta.finish_reason is None and len(delta.events) == 1:
                out.append(self.single(index, delta.events[0]))
            else:
                out += [self.chunk(choice) for choice in self.choices(index, delta)]
        return b"".join(out)

    def closing(self) -> bytes:
        return self.framer.chunk([], self.answering.usage()) + DONE if self.last_usage else DONE

    def failure(self, error: ErrorBody) -> bytes:
        return event(error) + DONE

    def single(self, index: int, event: Event) -> bytes:
        """The chunk of most tokens: text, and nothing else."""
        if not isinstance(event, Content | Thought):
            return self.chunk(ChatStreamChoice(index, stream_delta(event, self.legacy)))
        if isinstance(event, Thought) and not self.include_reasoning:
            return b""
        key = index, type(event)
        if key not in self.around:
            self.around[key] = self.framer.around(ChatStreamChoice(index, stream_delta(type(event)(MARK))))
        return encode(event.text).join(self.around[key])

    def chunk(self, choice: ChatStreamChoice) -> bytes:
        return self.framer.chunk([choice], self.answering.usage() if self.running_usage else None)

    def choices(self, index: int, delta: ChatDelta) -> list[ChatStreamChoice]:
        """The chunks' choices for one delta: one per event, and one for the end."""
        found = [
            ChatStreamChoice(index, stream_delta(event, self.legacy))
            for event in delta.events
            if self.include_reasoning or not isinstance(event, Thought)
        ]
        if not found and delta.finish_reason is None and (delta.logprobs or (self.token_ids and delta.tokens)):
            found.append(ChatStreamChoice(index, ChatStreamDelta()))
        if delta.finish_reason is not None:
            reason = self.answering.finish_reason(delta.finish_reason)
            found.append(ChatStreamChoice(index, ChatStreamDelta(), None, reason, delta.stop_reason))
        if found and delta.logprobs is not None:
            found[0].logprobs = replies.chat_logprobs(delta.logprobs)
        if found and self.token_ids:
            found[0].token_ids = delta.tokens
        return found


class Part:
    """One choice of a reply that is not streamed."""

    def __init__(self) -> None:
        self.answer = Answer()
        self.logprobs: list[TokenLogprob] = []
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def add(self, delta: ChatDelta) -> None:
        self.answer.add(delta.events)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs or ()
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


def stream_delta(event: Event, legacy: bool = False) -> ChatStreamDelta:
    """One event. `legacy`: calls as `function_call`."""
    if isinstance(event, Content):
        return ChatStreamDelta(content=event.text)
    if isinstance(event, Thought):
        return ChatStreamDelta(reasoning=event.text, reasoning_content=event.text)
    if isinstance(event, CallPiece):
        more = replies.CallArguments(event.text)
        if legacy:
            return ChatStreamDelta(function_call=more)
        return ChatStreamDelta(tool_calls=[replies.ToolCallDelta(event.index, more)])
    function = replies.CallFunction(event.name, event.arguments if isinstance(event, Call) else "")
    if legacy:
        return ChatStreamDelta(function_call=function)
    return ChatStreamDelta(tool_calls=[replies.ToolCallDelta(event.index, function, event.id, "function")])
