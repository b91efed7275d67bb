"""Flow-Factory's remote rewards: `POST /compute`, and `/NAME/health`, `/NAME/compute` of each reward.

A client has `server_url: http://host:port` where one reward is served, or `http://host:port/NAME`. It asks for its
health once, before training, and gives up at once where that fails; it sends a request again at once after any status
from 400 on. So what would fail again is answered 200 with its text, and a full queue is waited for.
"""

from __future__ import annotations

from typing import Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Request

from vlmrm.errors import RowError
from vlmrm.serving.app import serving
from vlmrm.serving.protocols.flow_factory.schema import ComputeAnswer, ComputeRequest
from vlmrm.serving.protocols.flow_factory.service import items_of
from vlmrm.serving.protocols.whole import raw_scores
from vlmrm.serving.refusals import InvalidRequest, RewardFailed
from vlmrm.serving.service import NotServing, TooLarge, UnknownReward
from vlmrm.serving.strict_json import parsed
from vlmrm.serving.worker.discretion import without_paths

router = APIRouter(tags=["Flow-Factory"])

BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": ComputeRequest.model_json_schema()}}}
}


@router.get("/{reward}/health")
async def health(request: Request, reward: str) -> dict[str, str]:
    """200 once the reward can be computed, so that a trainer that starts too early hears of it and not later."""
    app = serving(request)
    settings = app.authorized_reward(request, reward)
    if not app.service.ready(settings.name):
        raise NotServing(f"the reward {reward} is not loaded yet: see /ready.")
    return {"status": "ok"}


@router.post("/compute", response_model_exclude_none=True, openapi_extra=BODY)
@router.post("/{reward}/compute", response_model_exclude_none=True, openapi_extra=BODY)
async def compute(request: Request, reward: str | None = None) -> ComputeAnswer:
    """`{"rewards": [number] * B}` in order, or `{"error": text}`. All samples are one group of a groupwise reward."""
    app = serving(request)
    try:
        settings = app.authorized_reward(request, reward)
        body = await run_sync(parsed, ComputeRequest, await request.body(), app.settings.limits)
        app.check_count(len(body.prompt))
        items = await run_sync(items_of, body, app.intake)
        return ComputeAnswer(rewards=await raw_scores(app, settings, items))
    except (UnknownReward, InvalidRequest, TooLarge, RowError, RewardFailed) as error:
        return ComputeAnswer(error=without_paths(str(error)))
