"""`POST /v1/completions`: prompts as text or token ids, alone or in batches, continued as raw text."""

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from inkcap.base.errors import BadRequest
from inkcap.base.request import Logprobs, SamplingParams
from inkcap.base.turn import TurnRules
from inkcap.chat.grammar import read_format, text_rules
from inkcap.chat.output import LogprobReader, TextDelta, TextOutput, TokenLogprob
from inkcap.server import replies
from inkcap.server.body import JsonRoute
from inkcap.server.errors import ErrorBody
from inkcap.server.generation import Arrived, Run
from inkcap.server.prompt import text_prompts
from inkcap.server.replies import Framer, TextChoice, encode
from inkcap.server.schema import CompletionBody
from inkcap.server.service import Service, service_of
from inkcap.server.sse import DONE, EventStream, event, unless_gone

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions")
async def completions(request: Request, body: CompletionBody) -> Response:
    """Continuations of one prompt or several."""
    service = service_of(request)
    service.ready()
    model = service.model(body.model)
    body.refuse_unbuilt()
    service.note_unknown(body.unknown())
    prompts = await text_prompts(service, body.prompt, body.truncate_prompt_tokens is not None)
    if body.truncate_prompt_tokens:
        prompts = [ids[-body.truncate_prompt_tokens :] for ids in prompts]
    params = body.params(service.defaults)
    rules = await text_format(service, body)
    identity = body.request_id or request.state.request_id
    run = service.start(
        prompts, params, request_id=identity, priority=body.priority, salt=body.cache_salt or "", rules=rules
    )
    completing = Completing(service, body, run, params, f"cmpl-{identity}", model)
    if body.stream:
        return EventStream(completing)
    try:
        return await unless_gone(request.receive, completing.whole())
    finally:
        completing.close()


async def text_format(service: Service, body: CompletionBody) -> TurnRules | None:
    """The rules that hold a completion to the format it asks for. Raises BadRequest."""
    grammar, param = read_format(body.formats())
    if not grammar:
        return None
    if (why := (await service.grammars.errors([(grammar, param)])).get(grammar)) is not None:
        raise BadRequest(f"{param} cannot be enforced: {why}", param)
    return text_rules(grammar)


class Echoed:
    """A prompt as text, and its tokens as log-probability entries."""

    def __init__(self, service: Service, body: CompletionBody, ids: list[int], logprobs: list[Logprobs | None]) -> None:
        self.text = service.tokenizer.decode(ids, body.skip_special_tokens)
        self.ids = ids
        reader = LogprobReader(service.tokenizer, body.skip_special_tokens, show_ids=body.return_tokens_as_token_ids)
        self.entries: list[TokenLogprob | None] = reader.read(ids, logprobs) if logprobs else []


class Completing:
    """One request on its way from tokens to chunks or to a reply. Choice `index` continues prompt `index // n`."""

    idle = b""

    def __init__(
        self, service: Service, body: CompletionBody, run: Run, params: SamplingParams, identity: str, model: str
    ) -> None:
        self.service = service
        self.body = body
        self.run = run
        self.identity = identity
        self.model = model
        self.created = int(time.time())
        self.outputs = [TextOutput(service.tokenizer, params, body.return_tokens_as_token_ids) for _ in run.tracks]
        self.echoed: dict[int, Echoed] = {}  # by choice, once its first token came
        options = body.stream_options
        self.running_usage = options is not None and options.continuous_usage_stats
        self.last_usage = options is not None and options.include_usage
        self.framer = Framer("text_completion", identity, self.created, model, self.last_usage)

    def close(self) -> None:
        """Abort what still runs."""
        self.run.close()

    def usage(self) -> replies.Usage:
        return self.run.usage(sum(output.completion_tokens for output in self.outputs))

    def feed(self, index: int, delta: TextDelta) -> TextChoice:
        """The choice that one delta adds; the first one of an echoed prompt begins with the prompt."""
        choice = TextChoice(index, delta.text, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
        logprobs = delta.logprobs or []
        if self.body.echo:
            if index not in self.echoed:
                track = self.run.tracks[index]
                given = track.prompt_logprobs or []
                echo = self.echoed[index] = Echoed(self.service, self.body, track.request.token_ids, given)
                choice.text = echo.text + delta.text
                if self.body.logprobs is not None:
                    choice.logprobs = self.echo_logprobs(echo)
            base = len(self.echoed[index].text)
        else:
            base = 0
        if self.body.logprobs is not None:
            entries = [(entry.chosen.token, entry) for entry in logprobs]
            more = replies.text_logprobs(entries, base, [entry.offset for entry in logprobs])
            choice.logprobs = more if choice.logprobs is None else replies.joined([choice.logprobs, more])
        if self.body.return_token_ids:
            choice.token_ids = delta.tokens
        return choice

    def echo_logprobs(self, echo: Echoed) -> replies.TextLogprobs:
        tokenizer, as_ids = self.service.tokenizer, self.body.return_tokens_as_token_ids
        shown = [f"token_id:{token}" if as_ids else tokenizer.token_text(token) for token in echo.ids]
        offsets = [entry.offset if entry else 0 for entry in echo.entries]
        return replies.text_logprobs(list(zip(shown, echo.entries, strict=True)), 0, offsets)

    def read(self, arrived: Arrived) -> list[TextChoice]:
        """What each sequence adds to its choice."""
        found: list[TextChoice] = []
        for index, deltas in arrived:
            delta = self.outputs[index].feed(replies.merged(deltas))
            if delta.abort:
                self.run.stop(index)
            found.append(self.feed(index, delta))
        return found

    def opening(self) -> bytes:
        return b""

    def tell(self, arrived: Arrived) -> bytes:
        """A chunk for each choice that has something."""
        return b"".join(
            [
                self.framer.chunk([choice], self.usage() if self.running_usage else None)
                for choice in self.read(arrived)
                if choice.text or choice.finish_reason or choice.logprobs or choice.token_ids
            ]
        )

    def closing(self) -> bytes:
        return self.framer.chunk([], self.usage()) + DONE if self.last_usage else DONE

    def failure(self, error: ErrorBody) -> bytes:
        return event(error) + DONE

    async def whole(self) -> Response:
        """The reply, once everything is there."""
        parts: list[list[TextChoice]] = [[] for _ in self.outputs]
        async for arrived in self.run.arrivals():
            for choice in self.read(arrived):
                parts[choice.index].append(choice)
        choices = [self.choice(index, part) for index, part in enumerate(parts)]
        reply = replies.TextReply(self.identity, self.created, self.model, choices, self.usage())
        return Response(encode(reply), media_type="application/json")

    def choice(self, index: int, parts: list[TextChoice]) -> TextChoice:
        """Its parts put together."""
        last, track = parts[-1], self.run.tracks[index]
        choice = TextChoice(
            index,
            "".join([part.text for part in parts]),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
        )
        if self.body.logprobs is not None:
            choice.logprobs = replies.joined([part.logprobs for part in parts if part.logprobs is not None])
        if self.body.return_token_ids:
            choice.token_ids = [token for part in parts for token in part.token_ids or []]
            choice.prompt_token_ids = track.request.token_ids
        if self.body.prompt_logprobs is not None and track.prompt_logprobs is not None:
            reader = LogprobReader(self.service.tokenizer, False, show_ids=self.body.return_tokens_as_token_ids)
            choice.prompt_logprobs = replies.prompt_logprobs(
                reader.read(track.request.token_ids, track.prompt_logprobs)
            )
        return choice
