"""Everything about the server that is no generation: models, health, metrics, version, tokenizing."""

import contextlib

import msgspec
from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from inkcap.base.errors import BadRequest, EngineFault
from inkcap.base.request import EngineStats
from inkcap.chat.tokens import END_TURN, ORDINARY
from inkcap.server import errors, metrics
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
    service.metrics.grammar_rejects = service.grammars.rejected
    return Response(service.metrics.text(stats, service.engine.info), media_type=metrics.TYPE)


@router.get("/version")
async def version() -> Response:
    """The version of inkcap."""
    return json_reply({"version": VERSION})


@router.get("/load")
async def load(request: Request) -> Response:
    """The number of requests that generate now."""
    return json_reply({"server_load": len(service_of(request).runs)})


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """What a client must know to tokenize by itself; only where the server was told to answer this."""
    service = service_of(request)
    if not service.config.server.tokenizer_info:
        raise HTTPException(404, "start the server with --enable-tokenizer-info-endpoint to have this path")
    info = service.engine.info
    table = service.tokenizer
    return json_reply(
        {
            "tokenizer_class": "O200kBase",
            "vocab_size": len(table.token_bytes),
            "model_max_length": info.max_length if info else None,
            "bos_token": None,
            "eos_token": table.token_text(END_TURN),
            "eos_token_id": END_TURN,
            "pad_token": None,
            "unk_token": None,
            "chat_template": None,  # conversations are rendered by /tokenize
            "added_tokens_decoder": {
                str(i): {"content": table.token_text(i), "special": True}
                for i in range(ORDINARY, len(table.token_bytes))
            },
        }
    )


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


async def not_built(request: Request) -> Response:
    """501 for a path that clients of these APIs know and this version lacks."""
    message = f"{request.method} {errors.shorten(request.url.path)} is not built in this version"
    return errors.reply(errors.body(message, 501), request.scope)


NOT_BUILT = (
    "/inference/v1/generate", "/invocations", "/is_sleeping", "/pause", "/pooling", "/rerank", "/reset_mm_cache",
    "/reset_prefix_cache", "/resume", "/score", "/server_info", "/sleep", "/start_profile", "/stop_profile",
    "/update_weights", "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/batches",
    "/v1/chat/completions/batch", "/v1/chat/completions/render", "/v1/embeddings", "/v1/files",
    "/v1/images/generations", "/v1/load_lora_adapter", "/v1/messages/batches", "/v1/moderations", "/v1/realtime",
    "/v1/rerank", "/v1/responses/compact", "/v1/score", "/v1/unload_lora_adapter", "/wake_up",
)  # fmt: skip
for path in NOT_BUILT:
    router.add_api_route(path, not_built, methods=["GET", "POST"], include_in_schema=False)
