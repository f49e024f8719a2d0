"""What trainers ask of a server whose weights change, in SGLang's shapes: pause, continue, other
weights from a disk, and what they are called.

Knows nothing of prompts or text. Who makes which token is told where answers are made.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal
from uuid import uuid4

from fastapi import APIRouter, Request, Response
from msgspec import Meta

from common.errors import RequestError
from common.frontend.bodies.body import Body, read, refused, schema_of
from common.frontend.bodies.fields import JsonObject
from common.frontend.context import FrontendContext
from common.frontend.http.errors import json_response
from common.frontend.http.headers import has_body
from common.weights import VERSION_LENGTH_MAX, ServedWeights

PAUSE_PATH = "/pause_generation"
CONTINUE_PATH = "/continue_generation"
UPDATE_PATH = "/update_weights_from_disk"
VERSION_PATH = "/update_weight_version"
PAUSED = "generation was paused"
ABORTED = "the weights are updated"
UPDATED = "Succeeded to update model weights."
PATH_LENGTH_MAX = 4096

Version = Annotated[str, Meta(min_length=1, max_length=VERSION_LENGTH_MAX)]


class PauseFields(Body, frozen=True):
    """abort: open requests end with what they have. retract: those that decode give their pages
    back. in_place: they keep them. Requests that come meanwhile wait."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueFields(Body, frozen=True):
    """torch_empty_cache: of SGLang's; here nothing is kept that it would give back."""

    torch_empty_cache: bool = True


NotFollowed = refused("is_async", "token_step", "manifest")


class UpdateFields(Body, frozen=True):
    """model_path: a directory that every machine of this server can read, with a checkpoint of the
    served model's config. weight_version: what these weights are called from then on; as before if
    absent. abort_all_requests: else they go on with the new weights. keep_pause: compute nothing
    until /continue_generation."""

    model_path: Annotated[str, Meta(min_length=1, max_length=PATH_LENGTH_MAX)]
    load_format: Literal["auto", "dummy"] = "auto"
    abort_all_requests: bool = False
    weight_version: Version | None = None
    keep_pause: bool = False
    flush_cache: bool = True
    torch_empty_cache: bool = False
    recapture_cuda_graph: bool = False


class VersionFields(Body, frozen=True):
    """new_version: what the weights are called from now on. abort_all_requests: as SGLang, true
    unless said otherwise."""

    new_version: Version
    abort_all_requests: bool = True


PAUSE = schema_of(PauseFields)
CONTINUE = schema_of(ContinueFields)
UPDATE = schema_of(UpdateFields, NotFollowed)
VERSION = schema_of(VersionFields)


def build_router(context: FrontendContext) -> APIRouter:
    router = APIRouter()
    updates = Updates(context)

    @router.post(PAUSE_PATH)
    async def pause_generation(request: Request) -> Response:
        """Plan no more steps. Answered once nothing is computed."""
        mode = "abort"
        if has_body(request.scope):
            mode = await context.bodies.read(request, lambda body: read(PauseFields, body).mode)
        paused = asyncio.create_task(context.scheduler.calls.pause(retracts=mode == "retract"))
        await asyncio.sleep(0)  # the scheduler is told before requests end, so that none begins
        if mode == "abort":
            context.scheduler.cancel_matching("", PAUSED)
        await paused
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    @router.post(CONTINUE_PATH)
    async def continue_generation(request: Request) -> Response:
        """Go on after a pause; harmless without one."""
        if has_body(request.scope):
            await context.bodies.read(request, lambda body: read(ContinueFields, body))
        await context.scheduler.calls.go_on()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    @router.post(UPDATE_PATH)
    async def update_weights_from_disk(request: Request) -> Response:
        """Load other weights and compute with them. Requests that are open go on with the new
        ones; cached prefixes are forgotten. After a failure the weights before are served."""
        fields = await context.bodies.read(request, read_update)
        return await updates.from_disk(fields)

    @router.post(VERSION_PATH)
    async def update_weight_version(request: Request) -> Response:
        """Call the weights differently, as after an update with the same files."""
        fields = await context.bodies.read(request, lambda body: read(VersionFields, body))
        return await updates.rename(fields)

    @router.get("/weight_version")
    @router.get("/get_weight_version")
    async def weight_version() -> Response:
        return json_response({"weight_version": context.scheduler.calls.weights.version})

    return router


def read_update(body: JsonObject) -> UpdateFields:
    """Raises: RequestError."""
    check_not_followed(body)
    fields = read(UpdateFields, body)
    if not Path(fields.model_path).is_dir():
        raise RequestError(
            f"model_path={fields.model_path!r}: must be a directory of this server's machine",
            field="model_path",
        )
    return fields


def check_not_followed(body: JsonObject) -> None:
    """Raises: RequestError naming a field whose wish can't be met."""
    read(NotFollowed, body)
    if body.get("flush_cache") is False:
        raise RequestError(
            "flush_cache=false: must be true: what other weights have computed is never read",
            field="flush_cache",
        )


class Updates:
    """Other weights, or another name for them; one at a time."""

    def __init__(self, context: FrontendContext) -> None:
        self._context = context

    async def from_disk(self, fields: UpdateFields) -> Response:
        """Raises: RequestError 503 if it can't be begun, or takes too long."""
        scheduler = self._context.scheduler
        weights = ServedWeights(
            model_path=str(Path(fields.model_path).resolve()),
            load_format=fields.load_format,
            version=fields.weight_version or scheduler.calls.weights.version,
            load_id=uuid4().hex,
        )
        if fields.keep_pause:
            await scheduler.calls.pause(retracts=False)
        return await self._run(weights, UPDATED, {}, aborts=fields.abort_all_requests)

    async def rename(self, fields: VersionFields) -> Response:
        """Raises: RequestError 503, as `from_disk`."""
        weights = ServedWeights(version=fields.new_version, load_id=uuid4().hex)
        message = f"Weight version updated to {fields.new_version}"
        named: JsonObject = {"new_version": fields.new_version}
        return await self._run(weights, message, named, aborts=fields.abort_all_requests)

    async def _run(
        self, weights: ServedWeights, message: str, named: JsonObject, *, aborts: bool
    ) -> Response:
        """What SGLang answers: 400 with the reason if nothing has changed, and that as an error in
        the shape of all others too."""
        scheduler = self._context.scheduler
        scheduler.check_can_submit()
        if aborts:
            scheduler.cancel_matching("", ABORTED)
        done = await scheduler.calls.update_weights(weights)
        answer: JsonObject = {
            "success": done.is_done,
            "message": message if done.is_done else done.message,
            "num_paused_requests": scheduler.open_request_count if done.is_done else 0,
            **named,
        }
        if done.is_done:
            return json_response(answer)
        return json_response({**answer, "error": {"message": done.message}}, 400)
