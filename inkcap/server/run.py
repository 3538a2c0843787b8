"""`inkcap serve`: starts the engine process, answers HTTP from the first second, and ends in an orderly way.

SIGTERM and SIGINT drain: open requests may finish until the deadline, then they are cut off; a second signal cuts them
off at once. When the engine dies every open request gets an error, /health says 503, and the exit code is 1.
"""

import asyncio
import contextlib
import gc
import json
import logging
import shlex
import signal
import socket
import ssl
import time
from collections.abc import Iterator, Sequence

import uvicorn
import uvloop
from fastapi import FastAPI

from inkcap.base.checkpoint import choose_generation_defaults, find_checkpoint
from inkcap.base.config import EngineConfig, ServerConfig
from inkcap.base.errors import ConfigInvalid
from inkcap.base.log import logger, start_logging
from inkcap.base.request import EngineInfo
from inkcap.chat.tokens import Tokenizer
from inkcap.engine.child import ENGINE_PROGRAM, Child
from inkcap.engine.client import EngineClient
from inkcap.server.app import create_app
from inkcap.server.protocol import limited_protocol
from inkcap.server.service import Service

LOOK_SECONDS = 0.05  # between two looks at what is still open
FAULT_LOOK_SECONDS = 0.25  # between two looks whether the engine is alive; requests are told at once
LAST_ANSWERS_SECONDS = 5.0  # for requests to be told that the engine died or that they were cut off
COLLECT_EVERY = (2000, 10, 50)  # objects, and collections of each younger generation
LINGER_SECONDS = 1.0  # for which /health shows 503 after the engine died, so that a balancer sees why
KEEP_ALIVE_SECONDS = 65  # longer than the 60 s that load balancers keep idle connections


def run(config: EngineConfig, print_curl: bool = False, notes: Sequence[str] = (), engine: Child | None = None) -> int:
    """Serve until told to stop; the exit code. `print_curl`: once it answers, print a command that shows it.

    `notes`: what is to be said about the configuration. `engine`: its process, if it has begun. Raises SetupError when
    it cannot start.
    """
    start_logging("server", config.server.log_level, config.server.log_format)
    for note in notes:
        logger.info("%s", note)
    return uvloop.run(serve_checkpoint(config, print_curl, child=engine))


async def serve_checkpoint(
    config: EngineConfig,
    print_curl: bool = False,
    program: Sequence[str] = ENGINE_PROGRAM,
    child: Child | None = None,
) -> int:
    """`run`, inside an event loop. `program` is what the engine process runs, unless it is there: `child`."""
    model = config.model
    directory = find_checkpoint(model.path, revision=model.revision, download=model.download)
    server = config.server
    defaults = choose_generation_defaults(directory, server.generation_config, server.generation_override)
    check_tls(server)
    listener = listen(config.server.host, config.server.port)
    started = time.monotonic()
    engine = await EngineClient.start(config, program, child)
    try:
        tokenizer = Tokenizer.load(directory)  # while the engine process begins
        app = create_app(engine, config, tokenizer, defaults)
        serving = asyncio.ensure_future(serve_app(app, listener))
        loading = asyncio.ensure_future(engine.ready())
        await asyncio.wait((serving, loading), return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and loading.exception() is None:
            # what lives as long as the process is not to be looked at again: a full collection takes up to 100 ms, and
            # with a crowd of requests alive still 50, so it comes once in a million objects
            gc.collect()
            gc.freeze()
            gc.set_threshold(*COLLECT_EVERY)
            logger.info("ready after %.1f s: %s", time.monotonic() - started, facts(loading.result()))
            if print_curl:
                print(curl_line(config, listener, app.state.service.names[0]), flush=True)
        elif loading.done():
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            loading.result()  # raises why it could not start
        else:
            loading.cancel()
        return await serving
    finally:
        listener.close()
        await engine.close()


def facts(info: EngineInfo) -> str:
    """The engine in one line."""
    blocks = ", ".join(f"{count} {group}" for group, count in sorted(info.cache_groups.items()))
    return (
        f"{info.family} in {info.dtype} on {info.device}, context {info.max_length:,} tokens, {info.rows} rows, "
        f"cache in {info.cache_dtype}, blocks up to {blocks}"
    )


def curl_line(config: EngineConfig, listener: socket.socket, model: str) -> str:
    """A command for a shell that asks this server for an answer."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32, "stream": True}
    key = " -H 'Authorization: Bearer '\"$INKCAP_API_KEY\"" if config.server.api_key else ""
    place = address(listener).replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")
    data = shlex.quote(json.dumps(body))
    url = f"{scheme(config.server)}://{place}/v1/chat/completions"
    return f"curl -N {url}{key} -H 'Content-Type: application/json' -d {data}"


def scheme(server: ServerConfig) -> str:
    return "https" if server.ssl_certfile else "http"


def check_tls(server: ServerConfig) -> None:
    """Raise ConfigInvalid for TLS files that cannot be used, before the engine starts."""
    if server.ssl_certfile is None:
        if server.ssl_keyfile is not None or server.ssl_ca_certs is not None or server.ssl_cert_reqs:
            raise ConfigInvalid("TLS is asked for, but there is no certificate: give --ssl-certfile")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile, password=no_password)
        if server.ssl_ca_certs is not None:
            context.load_verify_locations(server.ssl_ca_certs)
    except (OSError, ValueError) as error:
        raise ConfigInvalid(
            f"TLS cannot start with certificate {server.ssl_certfile!r} and key {server.ssl_keyfile!r}: {error}"
        ) from None


def no_password() -> str:
    raise ValueError("the key has a password; give one without")


def web_settings(app: FastAPI, options: ServerConfig) -> uvicorn.Config:
    """Uvicorn's side of the configuration."""
    return uvicorn.Config(
        app,
        http=limited_protocol(options.header_bytes, options.header_count),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(LAST_ANSWERS_SECONDS),
        root_path=options.root_path,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        ssl_ca_certs=options.ssl_ca_certs,
        ssl_cert_reqs=options.ssl_cert_reqs,
        ssl_ciphers=options.ssl_ciphers or "TLSv1",  # which uvicorn takes for the library's own choice
    )


async def serve_app(app: FastAPI, listener: socket.socket) -> int:
    """Serve an application of `create_app` on a bound socket until a signal or the engine's death; the exit code."""
    service: Service = app.state.service
    options = service.config.server
    web_log = logging.getLogger("uvicorn")
    web_log.handlers[:], web_log.propagate = logger.handlers, False
    web_log.setLevel(options.web_log_level.upper())
    server = Server(web_settings(app, options))
    stop, hurry = asyncio.Event(), asyncio.Event()
    with signals(stop, hurry):
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        logger.info(
            "listening on %s://%s for %s", scheme(service.config.server), address(listener), ", ".join(service.names)
        )
        try:
            told = asyncio.ensure_future(stop.wait())
            while not (told.done() or serving.done() or service.engine.fault is not None):
                await asyncio.wait((told, serving), timeout=FAULT_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            told.cancel()
            if service.engine.fault is None:
                await drain(service, service.config.server.drain_seconds, hurry)
            else:
                await tell_of_death(service)
        finally:
            server.should_exit = True
            await serving
    return 1 if service.engine.fault is not None else 0


async def drain(service: Service, seconds: float, hurry: asyncio.Event) -> tuple[int, int]:
    """Take no new requests and let open ones finish for `seconds`, or until `hurry`; then cut them off.

    Gives how many finished and how many were cut off, and logs it.
    """
    service.draining = True
    opened = set(service.runs)
    started = time.monotonic()
    if opened:
        logger.info("draining: %d requests have up to %g s to finish", len(opened), seconds)
    while service.runs and not hurry.is_set() and time.monotonic() - started < seconds:
        await asyncio.sleep(LOOK_SECONDS)
    cut = sorted(service.runs, key=lambda run: run.started)
    for run in cut:
        run.cut("the server is shutting down and this request was cut off; send it again elsewhere")
    await until_closed(service)
    finished = len(opened.difference(cut))
    names = ", ".join(run.tracks[0].request.request_id for run in cut)
    logger.info(
        "drained in %.1f s: %d requests finished, %d cut off%s",
        time.monotonic() - started,
        finished,
        len(cut),
        f": {names}" if cut else "",
    )
    return finished, len(cut)


async def tell_of_death(service: Service) -> None:
    """Let every open request have its error, and /health its 503, before the server goes."""
    logger.error("the engine is gone (%s); the server ends with exit code 1", service.engine.fault)
    await until_closed(service)
    await asyncio.sleep(LINGER_SECONDS)


async def until_closed(service: Service) -> None:
    """Wait until no request generates, but not for long."""
    deadline = time.monotonic() + LAST_ANSWERS_SECONDS
    while service.runs and time.monotonic() < deadline:
        await asyncio.sleep(LOOK_SECONDS)


class Server(uvicorn.Server):
    """Uvicorn without its signal handlers: when to stop is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def signals(stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    """The first SIGTERM or SIGINT sets `stop`, the next one `hurry`."""
    loop = asyncio.get_running_loop()

    def received() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address. Raises ConfigInvalid."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as error:
        raise ConfigInvalid(f"server.host {host!r} is no address of this machine: {error}") from None
    try:
        listener.bind(place)
    except OSError as error:
        listener.close()
        raise ConfigInvalid(f"cannot listen on {host} port {port}: {error.strerror}; choose another --port") from None
    return listener


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
