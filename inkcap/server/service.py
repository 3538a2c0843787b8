"""What every endpoint stands on: the engine, the tokenizer, the configuration, and whether requests are welcome."""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from starlette.requests import Request

import inkcap
from inkcap.base.config import EngineConfig
from inkcap.base.errors import BadRequest, Draining, EngineFault, Overloaded, UnknownModel
from inkcap.base.log import logger
from inkcap.base.request import EngineInfo, GenerateRequest, SamplingParams
from inkcap.base.turn import TurnRules
from inkcap.chat.replay import Replays
from inkcap.chat.tokens import Tokenizer
from inkcap.engine.api import Engine
from inkcap.engine.requests import expand, resolve_max_tokens
from inkcap.server.errors import shorten
from inkcap.server.generation import Run
from inkcap.server.grammars import Grammars
from inkcap.server.metrics import Metrics
from inkcap.server.responses_store import ResponseStore
from inkcap.server.spans import start_tracing

VERSION = inkcap.__version__
LOADING_RETRY_SECONDS = 5
STORED_BYTES = 256 << 20  # of responses that are kept
INLINE_CHARACTERS = 50_000  # longer text is tokenized in a thread (1 MB: 50 ms), so that others go on streaming
Result = TypeVar("Result")


class Service:
    """State of the server process. `draining` is set once, by the one who shuts it down."""

    def __init__(
        self, engine: Engine, config: EngineConfig, tokenizer: Tokenizer, defaults: Mapping[str, object] | None = None
    ) -> None:
        self.engine = engine
        self.config = config
        self.tokenizer = tokenizer
        self.longest_token = max(map(len, tokenizer.token_bytes))  # bytes, so characters at most
        self.defaults = dict(defaults or {})  # sampling parameters of the checkpoint's generation_config.json
        self.names = config.model.served_names or (config.model.path.rstrip("/").rpartition("/")[2],)
        self.metrics = Metrics(self.names[0])
        self.runs: set[Run] = set()  # requests that generate now
        self.grammars = Grammars()
        # answers of chats, to be given back by token
        self.replays = Replays(hidden=config.server.replay_hidden_reasoning)
        endpoint = config.server.trace_endpoint
        self.tracing = start_tracing(endpoint, self.names[0]) if endpoint is not None else None
        self.responses = ResponseStore(config.server.stored_responses, STORED_BYTES)
        self.draining = False
        self.created = int(time.time())
        self.reported: set[str] = set()  # unknown fields that were logged
        self.seeds = random.Random(config.model.seed)
        self.numbers = itertools.count()  # make ids of sequences unique even when callers repeat theirs

    @property
    def state(self) -> str:
        """loading, ready, draining or dead."""
        if self.engine.fault is not None:
            return "dead"
        if self.draining:
            return "draining"
        return "loading" if self.engine.info is None else "ready"

    def ready(self) -> EngineInfo:
        """Facts of the engine, once it serves. Raises EngineFault, Draining or Overloaded (while it loads)."""
        if self.engine.fault is not None:
            raise EngineFault(f"the engine stopped: {self.engine.fault}")
        if self.draining:
            raise Draining("the server is shutting down and takes no new requests")
        if self.engine.info is None:
            raise Overloaded("the model is still loading; /health answers 200 when it is done", LOADING_RETRY_SECONDS)
        return self.engine.info

    def model(self, name: str | None) -> str:
        """The name to answer with. Raises UnknownModel."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise UnknownModel(f"no model {shorten(name)} here; this server has {', '.join(self.names)}", "model")
        return name

    def start(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        salt: str = "",
        rules: TurnRules | None = None,
    ) -> Run:
        """Submit `params.n` sequences for each prompt; those of one prompt stand together. `rules`: of each answer.

        Raises BadRequest, ContextTooLong, Overloaded or EngineFault.
        """
        info = self.ready()
        limit = info.rows + self.config.sched.waiting
        if len(prompts) * params.n > limit:
            raise BadRequest(
                f"the request asks for {len(prompts) * params.n:,} sequences at once; this server holds {limit:,} "
                "(sched.rows + sched.waiting). Send fewer prompts or a smaller n."
            )
        number = next(self.numbers)
        requests: list[GenerateRequest] = []
        for index, ids in enumerate(prompts):
            if len(ids) >= info.max_length:
                resolve_max_tokens(len(ids), params, info)  # raises, before anyone looks at a million ids
            requests += expand(
                ids,
                params,
                info=info,
                request_id=f"{request_id}-{number}-{index}",
                draw_seed=lambda: self.seeds.getrandbits(63),
                encode=self.tokenizer.encode_text,
                salt=salt,
                priority=priority,
                max_logprobs=self.config.server.max_logprobs,
                rules=rules,
            )
        self.metrics.n.observe(params.n)
        return Run(self.engine, self.metrics, requests, self.runs, self.tracing.note if self.tracing else None)

    def note_unknown(self, fields: list[str]) -> None:
        """Log each unknown field of request bodies once; they are accepted, since clients send new ones."""
        for field in fields:
            if field not in self.reported and len(self.reported) < 100:
                self.reported.add(field)
                logger.warning("ignored an unknown request field: %s", shorten(field))

    async def off_loop(self, size: int, work: Callable[[], Result]) -> Result:
        """The result of `work` over `size` characters, computed in a thread when that would hold up other streams."""
        return work() if size <= INLINE_CHARACTERS else await asyncio.to_thread(work)


def service_of(request: Request) -> Service:
    """The service of the application that handles this request."""
    return request.app.state.service
