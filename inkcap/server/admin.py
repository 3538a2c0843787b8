"""Everything about the server that is no generation: models, health, metrics, version, tokenizing."""

import contextlib

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from inkcap.base.errors import BadRequest, EngineFault
from inkcap.base.request import EngineStats
from inkcap.server import metrics
from inkcap.server.body import JsonRoute, body_size
from inkcap.server.prompt import chat_prompt, encoded
from inkcap.server.schema import DetokenizeBody, TokenizeBody
from inkcap.server.service import VERSION, Service, service_of

router = APIRouter(route_class=JsonRoute)


def json_reply(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def model_entry(service: Service, name: str) -> dict[str, object]:
    info = service.engine.info
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "inkcap",
        "root": service.config.model.path,
        "parent": None,
        "max_model_len": info.max_length if info else None,
        "permission": [],
    }


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The names this server answers to."""
    service = service_of(request)
    return json_reply({"object": "list", "data": [model_entry(service, name) for name in service.names]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """One of them."""
    service = service_of(request)
    return json_reply(model_entry(service, service.model(name)))


@router.get("/health")
@router.get("/ping")
@router.post("/ping")
async def health(request: Request) -> Response:
    """200 with no body while the server takes requests; 503 while it loads, drains, or when its engine is dead."""
    state = service_of(request).state
    return Response(status_code=200) if state == "ready" else json_reply({"status": state}, 503)


@router.get("/metrics")
async def scrape(request: Request) -> Response:
    """Prometheus text."""
    service = service_of(request)
    stats = EngineStats()
    if service.engine.info is not None and service.engine.fault is None:
        with contextlib.suppress(EngineFault):  # it died this moment: the server's own numbers still count
            stats = await service.engine.stats()
    return Response(service.metrics.text(stats, service.engine.info), media_type=metrics.TYPE)


@router.get("/version")
async def version() -> Response:
    """The version of inkcap."""
    return json_reply({"version": VERSION})


@router.get("/load")
async def load(request: Request) -> Response:
    """The number of requests that generate now."""
    return json_reply({"server_load": len(service_of(request).runs)})


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeBody) -> Response:
    """Ids of a prompt, or of messages as they would be rendered."""
    service = service_of(request)
    service.model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("give either prompt or messages", "prompt")
    if body.messages is not None:
        ids = (await chat_prompt(service, body, body_size(request))).token_ids
    else:
        ids = await encoded(service, body.prompt or "", "prompt")
    info = service.engine.info
    return json_reply(
        {
            "count": len(ids),
            "max_model_len": info.max_length if info else None,
            "tokens": ids,
            "token_strs": [service.tokenizer.token_text(i) for i in ids] if body.return_token_strs else None,
        }
    )


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeBody) -> Response:
    """Text of ids."""
    service = service_of(request)
    service.model(body.model)
    return json_reply({"prompt": service.tokenizer.decode(body.tokens)})
