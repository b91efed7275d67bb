"""Trainers of diffusion models: verl-omni's `POST /verl_omni`, and UniRL's reward service below `/unirl`.

verl-omni      reward_functions.NAME.server_url=http://host:port/verl_omni, its http_scorer_client
UniRL          base_url: http://host:port/unirl
"""

from __future__ import annotations

import base64
import binascii
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field, ValidationError, model_validator

from vlmrm.conversation import Outcome, Sample
from vlmrm.errors import MediaError, RowError
from vlmrm.formats.pickles import read_pickle
from vlmrm.formats.wire import Item, write_item
from vlmrm.serving.errors import InvalidRequest
from vlmrm.serving.gateway import gateway_of
from vlmrm.serving.media import MediaResolver
from vlmrm.serving.protocols.common import check_lengths, read_items, score_items, score_rewards
from vlmrm.serving.strict_json import StrictRoute
from vlmrm.settings import describe_errors

router = APIRouter(route_class=StrictRoute)

# verl-omni -----------------------------------------------------------------------------------------------------------


class Pickled(BaseModel):
    """What verl-omni and flow_grpo post as a pickle, of which nothing but plain data is read."""

    images: list[bytes] = Field(min_length=1)
    prompts: list[str]
    metadata: dict[str, Any] = Field({}, max_length=0, description="No reward here reads any: leave it empty.")

    @model_validator(mode="after")
    def _check_lengths(self) -> Pickled:
        check_lengths(self.images, "images", prompts=self.prompts)
        return self


PICKLE: dict[str, Any] = {"schema": {"type": "string", "format": "binary", "description": "A pickle of plain data."}}
BODY: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/octet-stream": PICKLE}}}


@router.post("/verl_omni", tags=["verl-omni"], openapi_extra=BODY, response_class=Response)
@router.post("/{reward}/verl_omni", tags=["verl-omni"], openapi_extra=BODY, response_class=Response)
async def verl_omni(request: Request, reward: str | None = None) -> Response:
    """Return a pickle of `{"scores": [number]}`, in order."""
    gateway = gateway_of(request)
    settings = gateway.authorized_reward(request, reward)
    body = await run_sync(_unpickle, await request.body())
    gateway.check_count(len(body.images))

    def write(row: tuple[str, bytes]) -> Item:
        return write_item(Sample(row[0], image=gateway.media.image(row[1])))

    items = await run_sync(read_items, list(zip(body.prompts, body.images, strict=True)), write)
    scores = await score_items(gateway, settings, items)
    return Response(pickle.dumps({"scores": scores}), media_type="application/octet-stream")


def _unpickle(data: bytes) -> Pickled:
    try:
        return Pickled.model_validate(read_pickle(data))
    except ValidationError as error:
        raise InvalidRequest(f"{describe_errors(error.errors(), Pickled)}.") from None
