"""A fake engine that yields listed tokens, and a server around it: in this process, or on a real socket."""

import asyncio
import contextlib
import itertools
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
import uvicorn

from inkcap.base.config import EngineConfig, ModelConfig, ServerConfig
from inkcap.base.errors import EngineFault, QueueFull
from inkcap.base.request import EngineInfo, EngineStats, Finish, GenerateRequest, Logprobs, TokenDelta
from inkcap.chat.tokens import END_MESSAGE, END_TURN, MODEL, STOP_TOKENS, TEXT, THINKING, Tokenizer, read_rank_file
from inkcap.server.app import create_app
from inkcap.server.run import web_settings

MAX_LENGTH = 4096
DEADLINE_S = 20.0


class Stream:
    """What the fake engine has made for one sequence; the reader takes all of it at once."""

    def __init__(self, engine: "FakeEngine", request: GenerateRequest, answer: Iterator[int]) -> None:
        self.engine = engine
        self.request = request
        self.answer = answer
        self.made = 0
        self.waiting: list[TokenDelta] = []
        self.ended = False
        self.news = asyncio.Event()

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> list[TokenDelta]:
        while not self.waiting:
            if self.ended:
                raise StopAsyncIteration
            if self.engine.fault is not None:
                raise EngineFault(self.engine.fault)
            self.news.clear()
            await self.news.wait()
        taken, self.waiting = self.waiting, []
        return taken

    def step(self) -> None:
        """One more token."""
        params = self.request.params
        token = next(self.answer)
        stops = (set() if params.ignore_eos else STOP_TOKENS) | set(params.stop_token_ids)
        finish = Finish.STOP if token in stops else None
        self.made += 1
        if finish is None and self.made == self.request.max_tokens:
            finish = Finish.LENGTH
        first = self.made == 1
        prompt = None
        if first and params.prompt_logprobs is not None:
            prompt = [None, *(entry(i, params.prompt_logprobs) for i in self.request.token_ids[1:])]
        self.push(
            TokenDelta(
                self.request.request_id,
                [token],
                logprobs=None if params.logprobs is None else [entry(token, params.logprobs)],
                finish=finish,
                stop_token=token if finish is Finish.STOP else None,
                cached_tokens=3 if first else None,
                queue_seconds=0.5 if first else None,
                preemptions=1 if self.made < 3 else 0,
                prompt_logprobs=prompt,
            )
        )

    def push(self, delta: TokenDelta) -> None:
        self.waiting.append(delta)
        self.ended = delta.finish is not None
        if self.ended:
            self.engine.open.pop(self.request.request_id, None)
        self.news.set()


def entry(token: int, alternatives: int) -> Logprobs:
    """A made-up distribution: the token first, then ids that follow it."""
    others = [token % 1000 + i + 1 for i in range(alternatives - 1)]
    listed = [token, token, *others] if alternatives else [token]
    return Logprobs(listed, [-0.5, -0.5, *(-1.0 - i for i in range(len(others)))][: len(listed)], 1)


class FakeEngine:
    """Gives each sequence one token a step. `answer` makes a sequence's tokens; `pace_s` is the time of a step."""

    def __init__(self) -> None:
        self.info: EngineInfo | None = EngineInfo(
            max_length=MAX_LENGTH,
            vocab_size=200_058,
            rows=64,
            step_tokens=2048,
            dtype="float32",
            cache_dtype="float32",
            device="cpu",
            family="inkling",
            cache_groups={"full": 100, "window": 50},
        )
        self.fault: str | None = None
        self.answer: Callable[[GenerateRequest], Iterable[int]] = lambda _: itertools.repeat(13)
        self.capacity = 10_000
        self.pace_s = 0.0
        self.open: dict[str, Stream] = {}
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.stepper: asyncio.Task[None] | None = None
        self.numbers = EngineStats()

    def submit(self, request: GenerateRequest) -> AsyncIterator[list[TokenDelta]]:
        if self.fault is not None:
            raise EngineFault(self.fault)
        if len(self.open) >= self.capacity:
            raise QueueFull(f"{self.capacity} sequences wait already; try again", retry_after=2)
        assert request.request_id not in self.open, "ids of sequences are unique"
        stream = Stream(self, request, iter(self.answer(request)))
        self.open[request.request_id] = stream
        self.requests.append(request)
        if self.stepper is None or self.stepper.done():
            self.stepper = asyncio.ensure_future(self.steps())
        return stream

    async def steps(self) -> None:
        while self.open and self.fault is None:
            await asyncio.sleep(self.pace_s)
            for stream in list(self.open.values()):
                stream.step()

    def abort(self, request_id: str) -> None:
        if stream := self.open.pop(request_id, None):
            self.aborted.append(request_id)
            stream.push(TokenDelta(request_id, [], finish=Finish.ABORT))

    async def stats(self) -> EngineStats:
        return self.numbers

    def die(self, why: str) -> None:
        self.fault = why
        for stream in self.open.values():
            stream.news.set()


class Site:
    """A server on a real socket in a thread of its own. `do` runs a function in the server's thread."""

    def __init__(self, engine: FakeEngine, config: EngineConfig, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.app = create_app(engine, config, tokenizer)
        self.service = self.app.state.service
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # so that slow readers are felt soon
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = uvicorn.Server(web_settings(self.app, config.server))
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        until(lambda: self.server.started)

    def run(self) -> None:
        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            await self.server.serve(sockets=[self.socket])

        asyncio.run(serve())

    def do(self, work: Callable[[], object]) -> object:
        async def call() -> object:
            return work()

        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(DEADLINE_S)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()


class Process:
    """A running server: Python with `words`, which end in a checkpoint and flags. `log` grows as it writes."""

    def __init__(self, words):
        words = [sys.executable, *words, "--port", "0", "--served-model-name", "demo"]
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
        self.log = ""
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        until(lambda: "listening" in self.log)
        self.url = re.search(r"listening on (\S+)", self.log)[1]

    def read(self):
        for line in self.process.stderr:
            self.log += line

    def ready(self):
        until(lambda: httpx.get(self.url + "/health").status_code == 200)
        return self

    def engine(self):
        """The process id of the engine."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[1] == str(self.process.pid):
                return int(stat.parent.name)
        raise AssertionError("no engine process")

    def ended(self):
        """Its exit code, once it has ended."""
        code = self.process.wait(20)
        self.reader.join(20)
        return code

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.reader.join(20)
        self.process.stderr.close()


class Follower(threading.Thread):
    """Sends one request and keeps status and text; `text` grows while a stream comes."""

    def __init__(self, url, body):
        super().__init__(daemon=True)
        self.url, self.body, self.status, self.text = url, body, None, ""
        self.start()

    def run(self):
        with httpx.stream("POST", self.url + "/v1/chat/completions", json=self.body, timeout=30) as response:
            self.status = response.status_code
            for piece in response.iter_text():
                self.text += piece

    def whole(self):
        self.join(20)
        assert not self.is_alive()
        return self.text


def until(condition: Callable[[], object], seconds: float = DEADLINE_S) -> None:
    """Wait for a condition; fail at the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    spec = find_spec("tml_renderers")
    assert spec is not None
    assert spec.origin is not None
    return Tokenizer(read_rank_file(Path(spec.origin).parent / "data" / "o200k_base.tiktoken"))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def settings() -> dict[str, object]:
    """Fields of ServerConfig; a test module or a test overrides this fixture to change them."""
    return {}


@pytest.fixture
def config(settings: dict[str, object]) -> EngineConfig:
    model = ModelConfig(path="/models/demo", served_names=("demo", "alias"))
    return EngineConfig(model=model, server=ServerConfig(**settings))


@pytest.fixture
def app(engine, config, tokenizer):
    return create_app(engine, config, tokenizer)


@pytest.fixture
def call(app):
    """Send one request to the application and give the response; no socket."""

    async def send(method: str, path: str, options: dict) -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, **options)

    with asyncio.Runner() as runner:
        yield lambda method, path, **options: runner.run(send(method, path, options))
        runner.run(app.state.service.grammars.close())


@pytest.fixture
def site(engine, config, tokenizer) -> Iterator[Site]:
    with contextlib.closing(Site(engine, config, tokenizer)) as running:
        yield running


@pytest.fixture
def chat_answer(engine, tokenizer):
    """Make the engine think the first text and say the second, then end its turn."""

    def set_answer(thinking: str, text: str) -> list[int]:
        ids = [MODEL, THINKING, *tokenizer.encode_text(thinking), END_MESSAGE] if thinking else []
        ids += [MODEL, TEXT, *tokenizer.encode_text(text), END_MESSAGE, END_TURN]
        engine.answer = lambda _: ids
        return ids

    return set_answer


@pytest.fixture
def text_answer(engine, tokenizer):
    """Make the engine say a text over and over."""

    def set_answer(text: str) -> list[int]:
        ids = tokenizer.encode_text(text)
        engine.answer = lambda _: itertools.cycle(ids)
        return ids

    return set_answer
