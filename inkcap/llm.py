"""The engine, called from Python: `LLM(model).generate(prompts)`, `.chat(messages)`, and both as async streams."""

import asyncio
import itertools
import random
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import msgspec
from tqdm import tqdm

from inkcap.base.checkpoint import find_checkpoint, read_generation_defaults
from inkcap.base.config import CacheConfig, EngineConfig, SchedConfig, environment_defaults
from inkcap.base.errors import BadRequest, EngineFault, NotBuiltYet
from inkcap.base.flags import config_from_tree
from inkcap.base.matching import probe
from inkcap.base.request import EngineInfo, EngineStats, GenerateRequest, Logprobs, SamplingParams, TokenDelta
from inkcap.base.turn import TurnRules
from inkcap.chat.effort import choose_effort
from inkcap.chat.grammar import Wish, read_wish
from inkcap.chat.output import Answer, ChatOutput, TextOutput
from inkcap.chat.render import Rendered, RenderOptions, render
from inkcap.chat.tokens import Tokenizer
from inkcap.chat.tools import Call
from inkcap.engine.local import LocalEngine, Sink
from inkcap.engine.requests import expand

OFFLINE_WAITING = 1 << 30  # sequences
Prompt = str | Mapping[str, Any] | Sequence[int]
Prompts = Prompt | Sequence[Prompt]
Messages = Sequence[Mapping[str, Any]]


class Logprob(NamedTuple):
    """What one token was worth at one position."""

    logprob: float
    rank: int | None  # 1 = most likely
    decoded_token: str | None  # None without a tokenizer


@dataclass
class CompletionOutput:
    """One of the `n` continuations of a prompt, so far."""

    index: int
    text: str = ""  # of a chat answer: what is for the user, without thinking and tool calls
    token_ids: list[int] = field(default_factory=list)  # all that were generated, the stop token included
    cumulative_logprob: float | None = None  # sum over `token_ids`, when log-probabilities were asked for
    logprobs: list[dict[int, Logprob]] | None = None  # per token: itself and the alternatives
    finish_reason: str | None = None  # stop, length, tool_calls, abort, error; None: it goes on
    stop_reason: int | str | None = None  # the stop id or stop string of the request that ended it
    reasoning: str | None = None  # thinking of a chat answer
    tool_calls: list[Call] = field(default_factory=list)

    def snapshot(self) -> "CompletionOutput":
        """A copy that no longer grows."""
        logprobs = None if self.logprobs is None else list(self.logprobs)
        return CompletionOutput(
            **{**vars(self), "token_ids": list(self.token_ids), "logprobs": logprobs, "tool_calls": [*self.tool_calls]}
        )


@dataclass
class RequestOutput:
    """A prompt and its continuations, in order of index."""

    request_id: str
    prompt: str | None  # None for a prompt given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # [0] is None
    num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache, by the first sequence
    finished: bool = False


class LLM:
    """A loaded model. Close it, or use it in a `with`, to free it before the program ends.

    `model` is a directory, a hub id, or a whole EngineConfig, which takes no further options. Raises SetupError.
    """

    def __init__(
        self,
        model: str | Path | EngineConfig,
        *,
        dtype: str = "auto",
        device: str = "auto",
        numerics: str = "w4a16",
        tensor_parallel_size: int = 1,
        max_model_len: int | None = None,
        max_num_seqs: int = SchedConfig.rows,
        max_num_batched_tokens: int = SchedConfig.step_tokens,
        enable_prefix_caching: bool = True,
        kv_cache_dtype: str = CacheConfig.dtype,
        cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float = CacheConfig.gpu_utilization,
        deterministic: bool = False,
        seed: int = 0,
        threads: int | None = None,
        revision: str | None = None,
        download: bool = False,
        skip_tokenizer_init: bool = False,
    ) -> None:
        if isinstance(model, EngineConfig):
            config = model
        else:
            sections: dict[str, dict[str, Any]] = {
                "model": {
                    "path": str(model),
                    "dtype": dtype,
                    "device": device,
                    "numerics": numerics,
                    "max_length": max_model_len,
                    "seed": seed,
                    "threads": threads,
                    "deterministic": deterministic,
                    "revision": revision,
                    "download": download,
                },
                "parallel": {"tp": tensor_parallel_size},
                "cache": {
                    "prefix": enable_prefix_caching,
                    "dtype": kv_cache_dtype,
                    "memory_bytes": cache_memory_bytes,
                    "gpu_utilization": gpu_memory_utilization,
                },
                "sched": {"rows": max_num_seqs, "step_tokens": max_num_batched_tokens},
                "ops": environment_defaults().get("ops", {}),
            }
            config = config_from_tree(sections)
        # Whoever calls offline has all prompts at hand: any number of them may wait.
        self.config = replace(config, sched=replace(config.sched, waiting=OFFLINE_WAITING))
        directory = find_checkpoint(config.model.path, revision=config.model.revision, download=config.model.download)
        self.tokenizer = None if skip_tokenizer_init else Tokenizer.load(directory)
        self._defaults = read_generation_defaults(directory).stated()
        self._seeds = random.Random(config.model.seed)
        self._ids = itertools.count()
        self.engine = LocalEngine(self.config)
        self._finalizer = weakref.finalize(self, self.engine.close)

    @property
    def info(self) -> EngineInfo:
        """What the engine can do."""
        return self.engine.info

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json states, and our defaults for the rest."""
        return msgspec.convert(self._defaults, SamplingParams)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Continue each prompt; results in the order of the prompts.

        A prompt is a string, a list of token ids, {"prompt": str} or {"prompt_token_ids": [...]}; `prompts` is one or a
        list of them. `sampling_params` is for all or one per prompt. Raises BadRequest before anything runs, and
        EngineFault when the engine stops.
        """
        listed: list[Any] = [prompts] if single(prompts) else list(prompts)
        runs = [
            self._run(self._prompt(prompt, f"prompt {i}"), params, priority)
            for i, (prompt, params) in enumerate(zip(listed, self._params(sampling_params, len(listed)), strict=True))
        ]
        return self._finish(runs, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[object] | None = None,
        tool_choice: str | Mapping[str, object] | None = None,
        response_format: Mapping[str, object] | None = None,
        structured_outputs: Mapping[str, object] | None = None,
        thinking_token_budget: int | None = None,
        reasoning_effort: str | float | None = None,
        continue_final_message: bool = False,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them. Without `sampling_params` an answer may fill the context.

        `outputs[i].text` is what is for the user; thinking stands in `.reasoning`, calls in `.tool_calls`. Formats,
        tool choice and budget are enforced as the server does; here grammars are compiled without a deadline.
        """
        several = len(messages) > 0 and not isinstance(messages[0], Mapping)
        listed: Sequence[Any] = messages if several else [messages]
        params = self._params(sampling_params, len(listed), max_tokens=None)
        wish = read_wish(
            tools=tools,
            tool_choice=tool_choice,
            formats={"response_format": response_format, "structured_outputs": structured_outputs},
            thinking=thinking_token_budget,
        )
        prompts = [self._rendered(one, tools, reasoning_effort, continue_final_message, wish) for one in listed]
        runs = [self._run(prompt, one, 0) for prompt, one in zip(prompts, params, strict=True)]
        return self._finish(runs, use_tqdm)

    def generate_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """Continue one prompt; yields all that there is so far, each time that there is more. Leaving it aborts."""
        (params,) = self._params(sampling_params, 1)
        return self._stream(self._run(self._prompt(prompt, "prompt"), params, priority))

    def chat_async(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[object] | None = None,
        tool_choice: str | Mapping[str, object] | None = None,
        response_format: Mapping[str, object] | None = None,
        structured_outputs: Mapping[str, object] | None = None,
        thinking_token_budget: int | None = None,
        reasoning_effort: str | float | None = None,
        continue_final_message: bool = False,
    ) -> AsyncIterator[RequestOutput]:
        """Answer one conversation, as `generate_async` does."""
        (params,) = self._params(sampling_params, 1, max_tokens=None)
        wish = read_wish(
            tools=tools,
            tool_choice=tool_choice,
            formats={"response_format": response_format, "structured_outputs": structured_outputs},
            thinking=thinking_token_budget,
        )
        prompt = self._rendered(messages, tools, reasoning_effort, continue_final_message, wish)
        return self._stream(self._run(prompt, params, 0))

    def stats(self) -> EngineStats:
        """Counters and gauges of the engine."""
        return self.engine.stats()

    def close(self) -> None:
        """Free the model. What still runs ends with EngineFault. May be called again."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finish(self, runs: list["Run"], use_tqdm: bool) -> list[RequestOutput]:
        arrived: SimpleQueue[list[TokenDelta] | EngineFault] = SimpleQueue()
        owners = {request.request_id: run for run in runs for request in run.requests}
        unfinished = len(runs)
        try:
            for run in runs:
                run.submit(self.engine, arrived.put)
            with tqdm(total=len(runs), unit="prompt", disable=not use_tqdm) as bar:
                while unfinished:
                    for delta in taken(arrived.get()):
                        run = owners[delta.request_id]
                        if not run.result.finished and run.feed(delta):
                            unfinished -= 1
                            bar.update()
        finally:
            for run in runs:
                run.leave()
        return [run.result for run in runs]

    async def _stream(self, run: "Run") -> AsyncIterator[RequestOutput]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[list[TokenDelta] | EngineFault] = asyncio.Queue()

        def sink(part: list[TokenDelta] | EngineFault) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrived.put_nowait, part)

        try:
            run.submit(self.engine, sink)
            while not run.result.finished:
                for delta in taken(await arrived.get()):
                    run.feed(delta)
                while not arrived.empty():
                    for delta in taken(arrived.get_nowait()):
                        run.feed(delta)
                yield run.snapshot()
        finally:
            run.leave()

    def _run(self, prompt: "Prepared", params: SamplingParams, priority: int) -> "Run":
        if self.tokenizer is None and params.stop:
            raise BadRequest("stop strings need a tokenizer, and this LLM runs without one; use stop_token_ids", "stop")
        requests = expand(
            prompt.token_ids,
            params,
            info=self.engine.info,
            request_id=f"llm-{next(self._ids)}",
            draw_seed=lambda: self._seeds.getrandbits(63),
            encode=None if self.tokenizer is None else self.tokenizer.encode_text,
            priority=priority,
            max_logprobs=self.config.server.max_logprobs,
            rules=prompt.rules,
        )
        return Run(prompt, requests, self.tokenizer)

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, prompts: int, **defaults: object
    ) -> list[SamplingParams]:
        if given is None:
            return [msgspec.convert({**defaults, **self._defaults}, SamplingParams)] * prompts
        if isinstance(given, SamplingParams):
            return [given] * prompts
        if isinstance(given, Mapping) or not isinstance(given, Sequence):
            raise BadRequest(f"sampling_params is a {type(given).__name__}; give SamplingParams or a list of them")
        if len(given) != prompts:
            raise BadRequest(f"{len(given)} sampling_params for {prompts} prompts; give one, or one per prompt")
        for i, params in enumerate(given):
            if not isinstance(params, SamplingParams):
                raise BadRequest(f"sampling_params[{i}] is a {type(params).__name__}; it must be SamplingParams")
        return list(given)

    def _prompt(self, prompt: Prompt, where: str) -> "Prepared":
        text: object = None
        ids: object = prompt
        if isinstance(prompt, str):
            text, ids = prompt, None
        elif isinstance(prompt, Mapping):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            for key in prompt:
                if key in ("multi_modal_data", "mm_processor_kwargs"):
                    raise NotBuiltYet(f"{where} has {key!r}: images and audio cannot be used yet", key)
                if key not in ("prompt", "prompt_token_ids"):
                    raise BadRequest(f"{where} has the unknown key {key!r}; known are 'prompt' and 'prompt_token_ids'")
            if text is None and ids is None:
                raise BadRequest(f"{where} has neither 'prompt' nor 'prompt_token_ids'")
        if text is not None and not isinstance(text, str):
            raise BadRequest(f"{where} has a {type(text).__name__} as 'prompt'; it must be a string")
        if ids is None and text is not None:
            if self.tokenizer is None:
                raise BadRequest(f"{where} is text, and this LLM runs without a tokenizer; give token ids")
            ids = self.tokenizer.encode_text(text)
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
            raise BadRequest(
                f"{where} is a {type(ids).__name__}; give a string, a list of token ids or a dict of either"
            )
        return Prepared(text, list(ids))

    def _rendered(
        self,
        messages: Messages,
        tools: Sequence[object] | None,
        reasoning_effort: str | float | None,
        continue_final_message: bool,
        wish: Wish,
    ) -> "Prepared":
        if self.tokenizer is None:
            raise BadRequest("chat needs a tokenizer, and this LLM runs without one; use generate with token ids")
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
            raise BadRequest("messages must be a list of messages like {'role': 'user', 'content': 'Hi'}", "messages")
        server = self.config.server
        options = RenderOptions(
            tools_position=server.tool_declare_position,
            prime_model_role=server.prime_model_role,
            continue_final_message=continue_final_message,
        )
        effort = choose_effort(messages, server.default_effort, reasoning_effort)
        rendered = render(self.tokenizer, messages, tools, effort, options)
        errors = {grammar: why for grammar, _ in wish.grammars() if (why := probe(grammar))}
        return Prepared(None, rendered.token_ids, rendered, wish.rules(rendered.start, errors))


def taken(part: list[TokenDelta] | EngineFault) -> list[TokenDelta]:
    """The deltas; raises what came instead of them."""
    if isinstance(part, EngineFault):
        raise part
    return part


def single(prompts: object) -> bool:
    """Whether this is one prompt: text, a dict, or token ids, rather than a list of prompts."""
    if isinstance(prompts, str | Mapping):
        return True
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise BadRequest(f"prompts is a {type(prompts).__name__}; give a string, token ids, a dict or a list of them")
    return len(prompts) > 0 and isinstance(prompts[0], int)


class Prepared(NamedTuple):
    """A prompt as token ids. `rendered` for a chat: how its answer is to be read."""

    text: str | None
    token_ids: list[int]
    rendered: Rendered | None = None
    rules: TurnRules | None = None


class Run:
    """The sequences of one prompt on the engine, and the result they grow."""

    def __init__(self, prompt: Prepared, requests: list[GenerateRequest], tokenizer: Tokenizer | None) -> None:
        self.requests = requests
        self.result = RequestOutput(
            request_id=requests[0].request_id if len(requests) == 1 else requests[0].request_id.rpartition("-")[0],
            prompt=prompt.text,
            prompt_token_ids=requests[0].token_ids,
            outputs=[CompletionOutput(i) for i in range(len(requests))],
        )
        self._tokenizer = tokenizer
        self._writers = {
            request.request_id: Writer(output, request.params, tokenizer, prompt.rendered)
            for request, output in zip(requests, self.result.outputs, strict=True)
        }
        self._engine: LocalEngine | None = None
        self._running: set[str] = set()  # sequences that the engine still works on

    def submit(self, engine: LocalEngine, sink: Sink) -> None:
        """Hand all sequences to the engine."""
        self._engine = engine
        for request in self.requests:
            engine.submit(request, sink)
            self._running.add(request.request_id)

    def feed(self, delta: TokenDelta) -> bool:
        """Add what came. Returns whether the whole prompt is finished; raises EngineFault for a failed sequence."""
        if delta.error is not None:
            raise EngineFault(f"request {delta.request_id} failed: {delta.error}")
        if delta.finish is not None:
            self._running.discard(delta.request_id)
        first = delta.request_id == self.requests[0].request_id
        if first and delta.cached_tokens is not None:
            self.result.num_cached_tokens = delta.cached_tokens
        if first and delta.prompt_logprobs is not None:
            self.result.prompt_logprobs = [
                None if entry is None else named(entry, self._tokenizer) for entry in delta.prompt_logprobs
            ]
        if self._writers[delta.request_id].feed(delta):
            assert self._engine is not None, "a delta came before the request was sent"
            self._engine.abort(delta.request_id)
        self.result.finished = all(output.finish_reason is not None for output in self.result.outputs)
        return self.result.finished

    def leave(self) -> None:
        """Abort what still runs."""
        for request_id in self._running:
            assert self._engine is not None, "running without an engine"
            self._engine.abort(request_id)

    def snapshot(self) -> RequestOutput:
        """A copy that no longer grows."""
        return RequestOutput(**{**vars(self.result), "outputs": [one.snapshot() for one in self.result.outputs]})


class Writer:
    """Tokens of one sequence to its CompletionOutput."""

    def __init__(
        self, output: CompletionOutput, params: SamplingParams, tokenizer: Tokenizer | None, rendered: Rendered | None
    ) -> None:
        self.output = output
        self._tokenizer = tokenizer
        # Log-probabilities are named here, in the offline API's own form.
        quiet = msgspec.structs.replace(params, logprobs=None)
        self._text = None if tokenizer is None or rendered is not None else TextOutput(tokenizer, quiet)
        self._chat = None if tokenizer is None or rendered is None else ChatOutput(tokenizer, quiet, rendered)
        self._answer = Answer()
        if params.logprobs is not None:
            output.logprobs, output.cumulative_logprob = [], 0.0

    def feed(self, delta: TokenDelta) -> bool:
        """Add what came; returns whether the text ended before the engine knows, so that it must be aborted."""
        output = self.output
        if output.finish_reason is not None:
            return False
        if self._chat is not None:
            read = self._chat.feed(delta)
            self._answer.add(read.events)
            output.text, output.reasoning = self._answer.content or "", self._answer.reasoning
            output.tool_calls = self._answer.calls
        elif self._text is not None:
            read = self._text.feed(delta)
            output.text += read.text
        else:
            output.token_ids += delta.tokens
            self._add_logprobs(delta.logprobs, len(delta.tokens))
            output.finish_reason = None if delta.finish is None else delta.finish.value
            output.stop_reason = delta.stop_token
            return False
        output.token_ids += read.tokens
        self._add_logprobs(delta.logprobs, len(read.tokens))
        output.finish_reason, output.stop_reason = read.finish_reason, read.stop_reason
        return read.abort

    def _add_logprobs(self, entries: list[Logprobs] | None, count: int) -> None:
        output = self.output
        if entries is None or output.logprobs is None or output.cumulative_logprob is None:
            return
        output.logprobs += [named(entry, self._tokenizer) for entry in entries[:count]]
        output.cumulative_logprob += sum(entry.logprobs[0] for entry in entries[:count])


def named(entry: Logprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """One position by token id. An alternative's rank is its place; the token's own is exact."""
    found = {
        token: Logprob(value, place, None if tokenizer is None else tokenizer.token_text(token))
        for place, (token, value) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True))
    }
    own = entry.token_ids[0]
    found[own] = found[own]._replace(rank=entry.rank)
    return found
