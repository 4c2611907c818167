"""POST /chat/completions and /completions."""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from dflash_mlx.params import SamplingParams
from dflash_mlx.server.calls import Offer
from dflash_mlx.server.chat_frames import ChatFrames
from dflash_mlx.server.facts import Facts
from dflash_mlx.server.frames import Answer, CompletionFrames, Frames
from dflash_mlx.server.refusals import Refusal
from dflash_mlx.server.replies import Reply
from dflash_mlx.server.requests import Request, nearest_level, parse, read_chat, read_completion
from dflash_mlx.server.service import Service

log = logging.getLogger(__name__)

Read = Callable[[Any, SamplingParams], Request]


def routes(service: Service) -> list[Route]:
    """The two routes."""
    chat = partial(_answer, service, read_chat, ChatFrames, "chatcmpl-")
    completion = partial(_answer, service, read_completion, CompletionFrames, "cmpl-")
    return [
        Route("/chat/completions", chat, methods=["POST"]),
        Route("/completions", completion, methods=["POST"]),
    ]


async def _answer(
    service: Service, read: Read, kind: Callable[[Answer], Frames], prefix: str, http: HttpRequest
) -> Response:
    request_id: str = http.state.request_id
    facts = service.engine.ready()
    request = read(parse(await http.body()), facts.defaults)
    if request.unknown:
        log.debug("%s: fields without a meaning here: %s", request_id, ", ".join(request.unknown))
    if service.strict_model and request.model not in (None, service.model):
        raise unknown_model(request.model, service.model)
    offer = _offer(request, facts)
    level = nearest_level(request.effort, facts.reasoning_levels)
    prepared = await service.engine.prepare(
        request.prompt,
        request.params,
        block_size=request.block_size,
        speculative=request.speculative,
        reasoning=level,
        variables=request.variables,
        tools=request.tools,
    )
    answer = Answer(
        id=prefix + request_id,
        created=int(time.time()),
        model=service.model,
        include_usage=request.include_usage,
        include_dflash=request.include_dflash,
        logprobs=request.params.top_logprobs is not None,
        offer=offer,
        facts=_reasoning_facts(request, level),
    )
    return Reply(
        service.engine,
        prepared,
        kind(answer),
        stream=request.stream,
        heartbeat=service.heartbeat,
        request_id=request_id,
        finish=partial(_log, request_id, time.monotonic()),
    )


def unknown_model(asked: str | None, model: str) -> Refusal:
    """What `--strict-model` answers."""
    return Refusal(
        404, f"model is {asked!r}: this server has {model!r}", param="model", code="model_not_found"
    )


def _offer(request: Request, facts: Facts) -> Offer | None:
    if not request.tools:
        return None
    if facts.syntax is None:
        raise Refusal(
            400,
            "this model cannot call tools, or not in a way that is known here: leave tools out, or send "
            "tool_choice 'none'",
            param="tools",
            code="unsupported_parameter",
        )
    return Offer(facts.syntax, request.tools, request.parallel)


def _reasoning_facts(request: Request, level: str | None) -> dict[str, Any]:
    if request.effort is None:
        return {}
    return {"reasoning_effort": {"asked": request.effort, "given": level}}


def _log(request_id: str, start: float, frames: Frames, error: BaseException | None) -> None:
    """A line for every answer, without a word of its text."""
    tally, seconds = frames.tally, time.monotonic() - start
    if error is not None:
        log.warning("%s failed after %.1f s: %s", request_id, seconds, type(error).__name__)
        log.debug("traceback of %s", request_id, exc_info=error)
        return
    tau = "" if tally.tau is None else f", tau {tally.tau:.2f}"
    log.info(
        "%s %s: prompt %d tokens, reply %d tokens%s, %.1f s",
        request_id,
        tally.finish_reason,
        tally.prompt_tokens,
        tally.tokens,
        tau,
        seconds,
    )
