"""cosmos-rl's reward service: `POST /api/reward/enqueue` answers with an id, `POST /api/reward/pull` with scores.

A client retries a request 60 times within an hour, with growing pauses: older ones after any status from 400 on, that
of 0.4.7 only after 408, 425, 429 and from 500 on. So a pull waits a little for its result and then answers 425, where
cosmos-rl's service answers 400; a permanent error is a 200 without scores. `/push` and `/latent_attr` of that service,
by which anyone could set scores and load weights, do not exist.
"""

from __future__ import annotations

import os
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from vlmrm.serving.errors import InvalidRequest
from vlmrm.serving.gateway import gateway_of
from vlmrm.serving.protocols.cosmos.payload import Pull
from vlmrm.serving.protocols.cosmos.service import enqueue, pull, read_request
from vlmrm.serving.strict_json import parse

RESULTS = "/api/reward/pull"  # asks for what has been accepted

router = APIRouter(prefix="/api/reward", tags=["cosmos-rl"])

BODY = {"type": "string", "format": "binary", "description": "<JSON>, a line end, .npy or safetensors"}
ENQUEUE: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/octet-stream": {"schema": BODY}}}
}
SCHEMA = {"schema": Pull.model_json_schema()}
PULL: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/x-www-form-urlencoded": SCHEMA, "application/json": SCHEMA},
    }
}
PULL_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"description": "There is no such result, or the request is wrong."},
    425: {"description": "There is no result yet: its `state` is queued or running."},
}


@router.post("/ping")
@router.post("/pin")
async def ping(request: Request) -> dict[str, str]:
    """Answer whether the service is there and accepts the token, whatever the body."""
    gateway_of(request).authorized_rewards(request)
    return {"message": "Ping request received"}


@router.post("/enqueue", openapi_extra=ENQUEUE)
async def enqueue_samples(request: Request) -> dict[str, str]:
    """Return `{"uuid"}` once every reward is accepted; with `replica_id` where a load balancer routes by it."""
    gateway = gateway_of(request)
    gateway.authorized_rewards(request)
    metadata, media = await read_request(gateway, await request.body())
    rewards = [gateway.authorized_reward(request, name) for name in metadata.reward_fn]
    answer = {"uuid": await enqueue(gateway, rewards, metadata, media)}
    replica = os.environ.get("LEPTON_REPLICA_ID")
    return {**answer, "replica_id": replica} if replica else answer


@router.post("/pull", openapi_extra=PULL, responses=PULL_RESPONSES)
async def pull_scores(request: Request) -> JSONResponse:
    """Return the result of one reward, any number of times; 425 with its `state` until there is one."""
    gateway = gateway_of(request)
    gateway.authorized_rewards(request)
    body = await _read_pull(request)
    if body.type in gateway.service.rewards:
        gateway.authorized_reward(request, body.type)
    status, answer = await pull(gateway, body.uuid, body.type, gateway.settings.long_poll)
    if status == 200:
        gateway.authorized_reward(request, answer["type"])
    return JSONResponse(answer, status)


async def _read_pull(request: Request) -> Pull:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json":
        content = await parse(await request.body(), gateway_of(request).settings.limits)
    else:
        content = dict(await request.form(max_files=0, max_fields=10))
    try:
        return Pull.model_validate(content)
    except ValidationError:
        raise InvalidRequest("a pull needs a uuid, and a type: send both as a form or as JSON.") from None
