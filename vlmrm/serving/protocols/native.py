"""`POST /v1/rewards`: the service's own protocol, as JSON or multipart/form-data."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import ConfigDict, Field, model_validator
from starlette.formparsers import MultiPartParser

from vlmrm.conversation import Outcome, Sample
from vlmrm.errors import CheckpointError, RowError
from vlmrm.formats.openai import read_conversation
from vlmrm.formats.wire import Item
from vlmrm.scoring.transforms import Transform, transform_named, win_rate
from vlmrm.serving.errors import InvalidRequest
from vlmrm.serving.gateway import Gateway, gateway_of, gather_rewards, json_answer
from vlmrm.serving.media import MediaResolver
from vlmrm.serving.responses import ErrorDetail, error_of
from vlmrm.serving.settings import Limits
from vlmrm.serving.strict_json import Column, StrictRoute, body_of
from vlmrm.settings import Strict

TransformName = Literal["raw", "sigmoid", "zscore", "rank", "win_rate", "normalized", "percentile", "probability"]


class RewardItem(Strict):
    """One answer to be rewarded: `messages`, a conversation that ends with it, or a sample by its columns."""

    model_config = ConfigDict(strict=True)

    id: str | None = None
    group: str | int | None = Field(None, description="Answers of one prompt, for rank, zscore and win_rate.")
    messages: Column[dict[str, Any]] | None = None
    prompt: str | None = None
    response: str | None = None
    image: Any = None
    video: Any = None
    condition_images: Column[Any] | None = None
    condition_videos: Column[Any] | None = None
    metadata: dict[str, Any] | None = None


class RewardRequest(Strict):
    """`model` may be left out where one reward is served; `models` are several rewards of the same items."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    models: list[str] | None = Field(None, min_length=1, max_length=64)
    items: Column[RewardItem] = Field(min_length=1)
    transform: TransformName = "raw"
    priority: int = Field(0, ge=-100, le=100)
    timeout: float = Field(600.0, gt=0, le=3600, description="Seconds after which the request is cancelled.")

    @model_validator(mode="after")
    def _check_models(self) -> RewardRequest:
        if self.models is not None and (self.model is not None or len(set(self.models)) < len(self.models)):
            raise ValueError("models go without model, and each once")
        return self


class ItemReward(Strict):
    """`score` is `raw` transformed; both are null where `error` is set."""

    index: int
    id: str | None
    object: Literal["reward"] = "reward"
    score: float | None
    raw: float | None
    group: str | int | None
    rank: int | None = Field(description="Position in the group, 0 for the best.")
    win_rate: float | None = Field(description="In the group, of a model trained here, whose scores are logits.")
    error: str | None
    details: dict[str, Any] | None = Field(None, description="Further values of the reward, under its own names.")


class RewardAnswer(Strict):
    id: str
    object: Literal["list"] = "list"
    model: str
    revision: str | None
    transform: TransformName
    data: list[ItemReward]
    timing_ms: dict[str, float]


class RewardsAnswer(Strict):
    """By name, the answer of each of `models`, or its error, which is not the others'."""

    object: Literal["rewards"] = "rewards"
    rewards: dict[str, RewardAnswer]
    errors: dict[str, ErrorDetail]


JSON_PART = "request"
PARTS = {JSON_PART: {"type": "string", "description": "The JSON; media may be `attachment:NAME`."}}
FILE = {"type": "string", "format": "binary", "description": "The file NAME."}
SCHEMA = {"type": "object", "required": [JSON_PART], "properties": PARTS, "additionalProperties": FILE}
FORM = body_of({"multipart/form-data": SCHEMA})

MultiPartParser.spool_max_size = sys.maxsize  # nothing of a request is written to a disk, which may be full


class MultipartRoute(StrictRoute):
    """A route of JSON, or of a form: the JSON as the part `request`, and files that `attachment:NAME` refers to."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def either(request: Request) -> Response:
            request.state.attachments = {}
            if request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
                parts = await _parts(request, request.app.state.gateway.settings.limits)
                request = Request({**request.scope, "headers": [(b"content-type", b"application/json")]})
                request._body = parts.pop(JSON_PART)
                request.state.attachments = parts
            return await handle(request)

        return either


async def _parts(request: Request, limits: Limits) -> dict[str, bytes]:
    form = await request.form(max_files=limits.max_items + 1, max_fields=16, max_part_size=limits.max_body_bytes)
    parts: dict[str, bytes] = {}
    for name, value in form.multi_items():
        if name in parts:
            raise InvalidRequest(f"the form has two parts called {name[:60]!r}: give each a name of its own.")
        if isinstance(value, str) and name != JSON_PART:
            raise InvalidRequest(f"the form has the field {name[:60]!r}, which is no file: put it into {JSON_PART}.")
        parts[name] = value.encode("utf-8", "replace") if isinstance(value, str) else await value.read()
    if JSON_PART not in parts:
        raise InvalidRequest(f"the form has no part {JSON_PART}: send the JSON as one.")
    return parts


router = APIRouter(route_class=MultipartRoute)


@router.post("/v1/rewards", openapi_extra=FORM, response_model=RewardAnswer | RewardsAnswer)
async def rewards(body: RewardRequest, request: Request) -> Response:
    """Return scores of conversations or samples, in request order; an item that cannot be scored has its own error."""
    gateway = gateway_of(request)
    names = [gateway.authorized_reward(request, name).name for name in body.models or [body.model]]
    gateway.check_count(len(body.items))
    media = gateway.media.with_attachments(request.state.attachments)
    items = await gateway.written(body.items, partial(_item, media))
    if (unread := media.unread()) and not any(isinstance(item, RowError) for item in items):
        raise InvalidRequest(f"the form has the file {unread[0][:60]!r}, to which no item refers: leave it out.")
    answers, failed = await gather_rewards({name: _score(gateway, body, name, items) for name in names})
    if body.models is None:
        return json_answer(answers[names[0]])
    errors = {name: error_of(error) for name, error in failed.items()}
    return json_answer(RewardsAnswer(rewards=answers, errors=errors))


async def _score(gateway: Gateway, body: RewardRequest, name: str, items: Sequence[Item | RowError]) -> RewardAnswer:
    started = time.perf_counter()
    # A wrong transform is refused before anything is computed, where the worker's info is known.
    if info := gateway.info(name):
        _transform(body, info)
    result = await gateway.score(name, items, priority=body.priority, timeout=body.timeout)
    return RewardAnswer(
        id=f"rw-{result.job_id or uuid.uuid4().hex}",
        model=name,
        revision=result.revision,
        transform=body.transform,
        data=_data(body, result.outcomes, gateway.info(name)),
        timing_ms={"total": round(1000 * (time.perf_counter() - started), 3)},
    )


def _item(media: MediaResolver, item: RewardItem) -> Item:
    if item.messages is not None:
        beside = item.model_dump(exclude={"messages", "group", "id"}, exclude_none=True)
        if beside:
            raise RowError(f"it has messages and {next(iter(beside))}, which would not be read: send one of them")
        return media.item(read_conversation(item.messages), item.group)
    if item.prompt is None:
        raise RowError("it has neither messages nor a prompt")
    conditions = (tuple(item.condition_images or ()), tuple(item.condition_videos or ()))
    written = media.item(Sample(item.prompt, item.response, item.image, item.video, *conditions), item.group)
    return written if item.metadata is None else {**written, "metadata": item.metadata}


def _data(body: RewardRequest, outcomes: Sequence[Outcome], info: dict[str, Any]) -> list[ItemReward]:
    """Return the rewards of items, transformed within each group among those that have a score."""
    transform, are_logits = _transform(body, info), info.get("kind") == "conversations"
    groups: dict[Any, list[int]] = {}
    for index, (item, outcome) in enumerate(zip(body.items, outcomes, strict=True)):
        if outcome.error is None:
            groups.setdefault(("alone", index) if item.group is None else item.group, []).append(index)
    figures: dict[int, tuple[float, int, float | None]] = {}  # score, rank, win rate
    for indices in groups.values():
        scores = np.array([outcomes[index].score for index in indices], dtype=np.float64)
        ranks = (-scores).argsort(kind="stable").argsort()
        win_rates = win_rate(scores).tolist() if are_logits else [None] * len(indices)
        triples = zip(transform(scores).tolist(), ranks.tolist(), win_rates, strict=True)
        figures.update(zip(indices, triples, strict=True))
    data = []
    for index, (item, outcome) in enumerate(zip(body.items, outcomes, strict=True)):
        score, *of_group = figures.get(index, (None, None, None))
        rank, rate = (None, None) if item.group is None else of_group
        of_item: dict[str, Any] = {"index": index, "id": item.id, "group": item.group, "rank": rank, "win_rate": rate}
        details = dict(outcome.extra) or None
        data.append(ItemReward(score=score, raw=outcome.score, error=outcome.error, details=details, **of_item))
    return data


def _transform(body: RewardRequest, info: dict[str, Any]) -> Transform:
    """Return the transform of a group's scores; raises InvalidRequest where the reward lacks what it needs."""
    try:
        return transform_named(body.transform, info)
    except CheckpointError as error:
        raise InvalidRequest(str(error)) from error
