"""GET /models, /health and /metrics."""

from dataclasses import asdict
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from dflash_mlx import __version__
from dflash_mlx.server.engine import Status
from dflash_mlx.server.generation import unknown_model
from dflash_mlx.server.metrics import prometheus
from dflash_mlx.server.refusals import CONTENT_TYPE, RETRY_AFTER, encode
from dflash_mlx.server.service import Service


def routes(service: Service) -> list[Route]:
    """All that only tells."""
    return [
        Route("/models", partial(_models, service)),
        Route("/models/{id:path}", partial(_model, service)),
        Route("/health", partial(_health, service)),
        Route("/metrics", partial(_metrics, service)),
    ]


async def _models(service: Service, request: Request) -> Response:
    return _json({"object": "list", "data": [_describe(service)]})


async def _model(service: Service, request: Request) -> Response:
    asked = request.path_params["id"]
    if service.strict_model and asked != service.model:
        raise unknown_model(asked, service.model)
    return _json(_describe(service))


def _describe(service: Service) -> dict[str, Any]:
    facts = service.engine.status.facts
    context = facts.context_window if facts is not None else None
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "dflash-chat",
        "context_window": context,
        "max_model_len": context,
    }


async def _health(service: Service, request: Request) -> Response:
    status = service.engine.status
    if status.state == "ok":
        return _json(health(service, status))
    return _json(health(service, status), 503, {"retry-after": str(RETRY_AFTER)})


def health(service: Service, status: Status) -> dict[str, Any]:
    """Everything that a person or a program may want to know about this server."""
    facts = status.facts
    progress = (
        None
        if status.progress is None
        else dict(zip(("phase", "done", "total"), status.progress, strict=True))
    )
    return {
        "status": status.state,
        "message": status.message,
        "progress": progress,
        "model": service.model,
        "drafter": service.drafter,
        "base_url": service.base_url,
        "block_size": facts.block_size if facts else None,
        "speculative": facts.speculative if facts else service.drafter is not None,
        "exactness": facts.exactness if facts else None,
        "kernels": "; ".join(facts.fallbacks) or None if facts else None,
        "context_window": facts.context_window if facts else None,
        "notes": list(facts.notes) if facts else [],
        "queue": service.engine.queue,
        "memory": asdict(service.engine.memory),
        "plain_tokens_per_second": facts.plain_tokens_per_second if facts else None,
        "reasoning_levels": list(facts.reasoning_levels) if facts else [],
        "tools": bool(facts and facts.syntax),
        "version": __version__,
    }


async def _metrics(service: Service, request: Request) -> Response:
    engine = service.engine
    gauges = {
        "queue_running": engine.queue["running"],
        "queue_waiting": engine.queue["waiting"],
        "memory_active_bytes": engine.memory.active,
        "memory_peak_bytes": engine.memory.peak,
    }
    return PlainTextResponse(prometheus(engine.counts, gauges), media_type="text/plain; version=0.0.4")


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, media_type=CONTENT_TYPE)
