"""The FastAPI application: middleware, error handlers and routes around one `Service`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from inkcap.base.config import EngineConfig
from inkcap.chat.tokens import Tokenizer
from inkcap.engine.api import Engine
from inkcap.server import admin, chat, completions, errors, messages, page, responses, throughput
from inkcap.server.middleware import BodyCheck, Envelope, KeyCheck
from inkcap.server.service import VERSION, Service
from inkcap.server.sse import ClientLeft

CLIENT_CLOSED = 499  # nobody reads it; it stands in the metrics


async def on_client_left(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)


def create_app(
    engine: Engine, config: EngineConfig, tokenizer: Tokenizer, defaults: Mapping[str, object] | None = None
) -> FastAPI:
    """The application over a running engine, or one that is still loading.

    `defaults`: sampling parameters for requests that give none. The service is at `app.state.service`.
    """
    service = Service(engine, config, tokenizer, defaults)
    settings = config.server

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        reporter = asyncio.ensure_future(throughput.report(service)) if settings.log_stats else None
        yield
        if reporter is not None:
            reporter.cancel()
            await asyncio.gather(reporter, return_exceptions=True)
        service.responses.end()
        if service.tracing is not None:
            await asyncio.to_thread(service.tracing.close)
        await asyncio.gather(service.grammars.close(), return_exceptions=True)

    stack = [Middleware(Envelope, metrics=service.metrics, tracing=service.tracing)]
    if settings.cors_origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.cors_origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Retry-After"],
            )
        )
    if settings.api_key is not None:
        stack.append(Middleware(KeyCheck, key=settings.api_key))
    stack.append(Middleware(BodyCheck, limit_bytes=settings.body_bytes))
    app = FastAPI(
        title="inkcap",
        version=VERSION,
        description="OpenAI-compatible API for Inkling models.",
        lifespan=lifespan,
        openapi_url="/openapi.json" if settings.docs else None,
        docs_url=None,  # `page` has one that asks nobody else
        redoc_url=None,
        middleware=stack,
    )
    app.state.service = service
    errors.install(app)
    app.add_exception_handler(ClientLeft, on_client_left)
    for part in (chat, completions, responses, messages, admin, page):
        app.include_router(part.router)
    return app
