"""State of a server and commands of its operator: health, info, loads, abort, flush.

Field names follow SGLang's, which routers and benches read. Knows nothing of prompts or text.
"""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import structs

from common.config import EngineType, Role, shown_settings
from common.errors import RequestError
from common.frontend.bodies.body import Body, read, schema_of
from common.frontend.bodies.fields import JsonObject
from common.frontend.context import FrontendContext
from common.frontend.http.answers import answered_as
from common.frontend.http.errors import json_response
from common.frontend.requests.generation import model_names
from common.frontend.requests.scrape import (
    ask_state,
    describe_group,
    not_ready_reason,
    pool_token_count,
    take_snapshot,
    used_token_count,
)
from common.metrics.server import CONTENT_TYPE
from common.protocol.frontend import Failed, State
from common.request import SamplingParams

PROBE_TIMEOUT_S = 20.0  # SGLang's; the time that a health check waits for one token
FLUSH_TIMEOUT_S_MAX = 600.0


def build_router(context: FrontendContext) -> APIRouter:
    router = APIRouter()
    _add_health(router, context)
    _add_info(router, context)
    _add_loads(router, context)
    _add_commands(router, context)
    return router


# ---- health ------------------------------------------------------------------------------------


def _add_health(router: APIRouter, context: FrontendContext) -> None:
    @router.get("/health")
    @router.get("/ready")
    async def health() -> Response:
        """200 if a request could be served now. Cheap: answers from the last state."""
        return _health(context)

    @router.get("/ping")
    async def ping() -> Response:
        """200 as long as the server's processes answer, ready or not."""
        trouble = context.scheduler.trouble()
        if trouble:
            raise RequestError(trouble, status=503)
        return json_response({"status": "alive"})

    @router.get("/health_generate")
    async def health_generate() -> Response:
        """200 if one token was generated just now. A prefill server has no request of its own to
        generate for: it answers as /health does, which sees a stalled engine."""
        response = _health(context)
        if context.config.role is Role.DECODE:
            await _generate_one(context)
        return response


def _health(context: FrontendContext) -> Response:
    reason = not_ready_reason(context)
    if reason:
        raise RequestError(reason, status=503)
    state = context.scheduler.state
    assert state is not None, "a server without a state is not ready"
    # As it was commanded last: the scheduler's own state is heard of a little later.
    paused = {"is_paused": True} if context.scheduler.calls.is_paused else {}
    return json_response({"status": "ok", "step_count": state.step_count, **paused})


async def _generate_one(context: FrontendContext) -> None:
    """Raises: RequestError 503 unless the pair generates a token in time."""
    if context.scheduler.calls.is_paused:
        raise RequestError("generation is paused: POST /continue_generation", status=503)
    sampling = SamplingParams(max_new_tokens=1, seed=0, temperature=0.0, ignore_eos=True)
    handle = context.submit(
        [0],
        sampling,
        budget_s=PROBE_TIMEOUT_S,
        rid=f"HEALTH_CHECK_{uuid4().hex}",
        is_measured=False,
    )
    with handle:
        async for message in handle:
            if isinstance(message, Failed):
                raise RequestError(f"no token could be generated: {message.message}", status=503)


# ---- info --------------------------------------------------------------------------------------


def _add_info(router: APIRouter, context: FrontendContext) -> None:
    architecture = _read_architecture(context.config.model_path)

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info() -> Response:
        return json_response(_model_info(context, architecture))

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> Response:
        return json_response(await _server_info(context, architecture))

    @router.get("/v1/models")
    async def models() -> Response:
        names = (context.config.served_model_name, *context.config.model_aliases)
        cards = [_model_card(context, name) for name in names]
        return json_response({"object": "list", "data": cards})

    @router.get("/v1/models/{model:path}")
    async def model_card(model: str) -> Response:
        config = context.config
        served = (config.served_model_name, *config.model_aliases)
        known = model_names(config.served_model_name, config.model_aliases, config.model_path)
        if model not in known:
            text = f"model {model!r} is not served here; {served[0]!r} is"
            raise RequestError(text, field="model", status=404)
        return json_response(_model_card(context, model if model in served else served[0]))


def _read_architecture(model_path: str) -> dict[str, object]:
    """model_type and architectures as the checkpoint's config.json says them."""
    document = msgspec.json.decode((Path(model_path) / "config.json").read_bytes())
    return {key: document.get(key) for key in ("model_type", "architectures")}


def _disaggregation_mode(context: FrontendContext) -> str:
    """As SGLang spells it: "null" is a server that does both halves."""
    engine_type = context.config.engine_type
    return "null" if engine_type is EngineType.UNIFIED else str(engine_type)


def _model_info(context: FrontendContext, architecture: dict[str, object]) -> dict[str, object]:
    config, weights = context.config, context.scheduler.calls.weights
    return {
        "model_path": weights.model_path or config.model_path,
        "served_model_name": config.served_model_name,
        "tokenizer_path": config.tokenizer_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": weights.version,
        "load_format": weights.load_format,
        "reasoning_parser": config.reasoning_parser or None,
        "tool_call_parser": config.tool_call_parser or None,
        "disaggregation_mode": _disaggregation_mode(context),
        "has_image_understanding": False,
        "has_audio_understanding": False,
        **architecture,
    }


async def _server_info(
    context: FrontendContext, architecture: dict[str, object]
) -> dict[str, object]:
    """The settings, and the state of the scheduler and the workers."""
    config = context.config
    info = context.scheduler.server_info
    seen = await ask_state(context)
    workers = info.workers if info else []
    return {
        **shown_settings(config),
        **architecture,
        "version": context.version,
        "uptime_s": context.clock.wall() - context.started_wall_s,
        "status": not_ready_reason(context) or "ready",
        "dp_size": 1,
        "disaggregation_mode": _disaggregation_mode(context),
        "disaggregation_bootstrap_port": config.bootstrap_port,
        "max_total_num_tokens": pool_token_count(seen.state),
        "max_running_requests": info.running_max if info else config.max_running_requests,
        "max_request_token_count": info.request_token_max if info else None,
        "vocab_size": info.vocab_size if info else None,
        "eos_token_ids": info.eos_token_ids if info else None,
        "fingerprint": info.fingerprint if info else {},
        "weight_version": context.scheduler.calls.weights.version,
        "is_paused": seen.state.is_paused if seen.state else False,
        "incarnation": info.incarnation if info else "",
        "workers": workers,
        "ucx_in_use": [
            {key: value for key, value in worker.items() if key.startswith("ucx")}
            for worker in workers
        ],
        "is_state_fresh": seen.is_fresh,
        "peers": [structs.asdict(peer) for peer in seen.state.peers] if seen.state else [],
        "page_groups": [describe_group(g) for g in seen.state.page_groups] if seen.state else [],
        "prefix_cache": _prefix_cache(seen.state),
        "internal_states": [
            {
                "queues": seen.state.queues if seen.state else {},
                "counters": seen.state.counters if seen.state else {},
                "step_count": seen.state.step_count if seen.state else 0,
            }
        ],
    }


def _prefix_cache(state: State | None) -> dict[str, object] | None:
    """None before the scheduler has said anything of it."""
    cache = state.prefix_cache if state else None
    return structs.asdict(cache) if cache is not None else None


def _model_card(context: FrontendContext, name: str) -> dict[str, object]:
    info = context.scheduler.server_info
    return {
        "id": name,
        "object": "model",
        "created": int(context.started_wall_s),
        "owned_by": "baton",
        "root": context.config.model_path,
        "parent": None,
        "max_model_len": info.request_token_max if info else context.config.context_length,
    }


# ---- loads and metrics -------------------------------------------------------------------------


def _add_loads(router: APIRouter, context: FrontendContext) -> None:
    @router.get("/get_load")
    async def get_load() -> Response:
        """An array with one entry per data parallel rank: routers sum over it."""
        load = _load(context)
        return json_response(
            [
                {
                    "dp_rank": 0,
                    "num_reqs": load["num_total_reqs"],
                    "num_waiting_reqs": load["num_waiting_reqs"],
                    "num_tokens": load["num_used_tokens"],
                }
            ]
        )

    @router.get("/v1/loads")
    async def loads() -> Response:
        load = _load(context)
        return json_response(
            {
                "timestamp": context.clock.wall(),
                "version": context.version,
                "dp_rank_count": 1,
                "loads": [load],
            }
        )

    @router.api_route(
        "/metrics",
        methods=["GET", "HEAD"],
        response_class=Response,
        responses=answered_as(CONTENT_TYPE),
    )
    async def metrics() -> Response:
        exposition = context.metrics.expose(await take_snapshot(context))
        return Response(exposition, media_type=CONTENT_TYPE)


def _load(context: FrontendContext) -> dict[str, object]:
    """The load as heard last, in the words of SGLang's /v1/loads."""
    state = context.scheduler.state
    info = context.scheduler.server_info
    queues = state.queues if state else {}
    used, capacity = used_token_count(state), pool_token_count(state)
    running, waiting = queues.get("running", 0), queues.get("waiting", 0)
    return {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": context.scheduler.open_request_count,
        "num_used_tokens": used,
        "max_total_num_tokens": capacity,
        "token_usage": used / max(1, capacity),
        "gen_throughput": context.metrics.throughput,
        "max_running_requests": info.running_max if info else None,
        "disaggregation": {
            "mode": _disaggregation_mode(context),
            "prefill_bootstrap_queue_reqs": queues.get("bootstrap", 0),
            "prefill_inflight_queue_reqs": queues.get("inflight", 0),
            "decode_prealloc_queue_reqs": queues.get("prealloc", 0),
            "decode_transfer_queue_reqs": queues.get("transfer", 0),
            "decode_retracted_queue_reqs": queues.get("retracted", 0),
        },
    }


# ---- commands ----------------------------------------------------------------------------------


class AbortFields(Body, frozen=True):
    """The prefix of the rids to abort, or abort_all."""

    rid: str = ""
    abort_all: bool = False


ABORT = schema_of(AbortFields)


def rid_to_abort(body: JsonObject) -> str:
    """The prefix of the rids to abort; "" is all of them. Raises: RequestError."""
    given = read(AbortFields, body)
    if not given.rid and not given.abort_all:
        raise RequestError("rid must be a non-empty string, or abort_all true", field="rid")
    return "" if given.abort_all else given.rid


def _add_commands(router: APIRouter, context: FrontendContext) -> None:
    @router.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        """Abort the open requests whose rid starts with `rid`, or all of them."""
        rid = await context.bodies.read(request, rid_to_abort)
        count = context.scheduler.cancel_matching(rid)
        return json_response({"success": True, "aborted_count": count})

    @router.post("/flush_cache")
    async def flush_cache(request: Request) -> Response:
        """Forget the prefixes and checkpoints that this server has cached: 200 if done, 400 if
        requests are under way. Its peers keep theirs."""
        done = await context.scheduler.calls.flush_cache(_flush_timeout_s(request))
        if not done.is_done:
            raise RequestError(done.message or "cached pages are still in use; try again")
        role = context.config.role
        message = done.message or f"the {role} server has no prefix cached; its peers keep theirs"
        return json_response({"success": True, "message": message})


def _flush_timeout_s(request: Request) -> float:
    given = request.query_params.get("timeout", "")
    if not given:
        return 30.0
    try:
        timeout_s = float(given)
    except ValueError:
        timeout_s = -1.0
    if not 0 < timeout_s <= FLUSH_TIMEOUT_S_MAX:
        raise RequestError(
            f"timeout={given!r}: must be seconds in 0..{FLUSH_TIMEOUT_S_MAX:g}", field="timeout"
        )
    return timeout_s
