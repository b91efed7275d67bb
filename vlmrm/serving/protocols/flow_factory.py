"""Flow-Factory's remote rewards: `POST /compute`, and `/NAME/health`, `/NAME/compute` of each reward.

A client has `server_url: http://host:port` where one reward is served, or `http://host:port/NAME`. It checks the
health once, before training, and gives up where that fails; it retries a request at once after any status from 400 on.
So an error that would repeat is a 200 with its text, and a full queue is waited for.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, model_validator

from vlmrm.conversation import Sample
from vlmrm.errors import RowError
from vlmrm.formats.flow_factory import data_uri
from vlmrm.formats.wire import Item, write_item
from vlmrm.serving.errors import InvalidRequest, RewardFailed
from vlmrm.serving.gateway import gateway_of
from vlmrm.serving.media import MediaResolver
from vlmrm.serving.protocols.common import check_lengths, media_read, score_inputs
from vlmrm.serving.service import NotServing, TooLarge, UnknownReward
from vlmrm.serving.strict_json import Column, parse_as
from vlmrm.serving.worker.channel import redact_paths
from vlmrm.settings import nearest


class ComputeRequest(BaseModel):
    """B samples as columns; an image is base64 of a PNG file, or a data URI of one, a video the list of its frames.

    Its contract has servers ignore unknown keys; those that look like a typing error are refused.
    """

    prompt: Column[str] = Field(min_length=1)
    response: Column[str] | None = None
    image: Column[str] | None = None
    video: Column[Column[str]] | None = None
    condition_images: Column[Column[str]] | None = None
    condition_videos: Column[Column[Column[str]]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, content: Any) -> Any:
        for key in content if isinstance(content, dict) else ():
            if key not in cls.model_fields and (near := nearest(key, cls.model_fields, 0.7)):
                raise ValueError(f"unknown key {key[:60]} (did you mean {near}?)")
        return content

    @model_validator(mode="after")
    def _check_lengths(self) -> ComputeRequest:
        check_lengths(self.prompt, "prompts", response=self.response, **self.columns())
        return self

    def columns(self) -> dict[str, list[Any]]:
        """Return the columns of media that were sent, by name."""
        names = ("image", "video", "condition_images", "condition_videos")
        return {name: column for name in names if (column := getattr(self, name)) is not None}


class ComputeAnswer(BaseModel):
    """Either `rewards` or `error`."""

    rewards: list[float] | None = None
    error: str | None = None


router = APIRouter(tags=["Flow-Factory"])

BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": ComputeRequest.model_json_schema()}}}
}


@router.get("/{reward}/health")
async def health(request: Request, reward: str) -> dict[str, str]:
    """Answer 200 once the reward can be computed, so that a trainer that starts too early fails at its start."""
    gateway = gateway_of(request)
    settings = gateway.authorized_reward(request, reward)
    if not gateway.service.health(settings.name).ready:
        raise NotServing(f"the reward {reward} is not loaded yet: see /ready.")
    return {"status": "ok"}


@router.post("/compute", response_model_exclude_none=True, openapi_extra=BODY)
@router.post("/{reward}/compute", response_model_exclude_none=True, openapi_extra=BODY)
async def compute(request: Request, reward: str | None = None) -> ComputeAnswer:
    """Return `{"rewards": [number] * B}` in order, or `{"error": text}`; all samples are one group."""
    gateway = gateway_of(request)
    try:
        settings = gateway.authorized_reward(request, reward)
        body = await parse_as(ComputeRequest, await request.body(), gateway.settings.limits)
        rows = range(len(body.prompt))
        write = partial(_item, body, gateway.media)
        return ComputeAnswer(rewards=await score_inputs(gateway, settings, rows, write, noun="sample"))
    except (UnknownReward, InvalidRequest, TooLarge, RowError, RewardFailed) as error:
        return ComputeAnswer(error=redact_paths(str(error)))


def _item(body: ComputeRequest, media: MediaResolver, index: int) -> Item:
    """Return a sample, in the one group of all; raises RowError where its media cannot be read."""
    # A sample without conditions has an empty list, which is left out.
    columns = {name: _reference(column[index]) for name, column in body.columns().items() if column[index]}
    response = None if body.response is None else body.response[index]
    return write_item(media_read(media, Sample(body.prompt[index], response, **columns)), "request")


def _reference(value: Any) -> Any:
    """Return base64, however deep in lists, as data URIs."""
    return data_uri(value) if isinstance(value, str) else tuple(map(_reference, value))
