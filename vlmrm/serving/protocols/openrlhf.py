"""OpenRLHF's remote reward: `POST /get_reward`, and `/NAME/get_reward` where several rewards are served.

--reward.remote_url http://host:port/get_reward --data.label_key label
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, model_validator

from vlmrm.formats.rollouts import read_openrlhf_query, zip_columns
from vlmrm.serving.protocols.common import check_lengths, probability, score_conversations
from vlmrm.serving.strict_json import StrictRoute

router = APIRouter(route_class=StrictRoute, tags=["OpenRLHF"])


class GetRewardRequest(BaseModel):
    """`query` is the rendered prompt with its answer. A label may be `{"prompt", "images", "videos"}`, or its JSON."""

    query: list[str] = Field(min_length=1)
    prompts: list[str] | None = None
    labels: list[Any] | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> GetRewardRequest:
        check_lengths(self.query, "queries", prompts=self.prompts, labels=self.labels)
        return self


class GetRewardAnswer(BaseModel):
    """Raw logits as `rewards`, σ of them as `scores`: OpenRLHF's dynamic filtering needs those between 0 and 1."""

    rewards: list[float]
    scores: list[float]
    extra_logs: dict[str, list[float]]


@router.post("/get_reward")
@router.post("/{reward}/get_reward")
async def get_reward(body: GetRewardRequest, request: Request, reward: str | None = None) -> GetRewardAnswer:
    """Return the reward of each query, in order."""
    rows = zip_columns(body.query, body.prompts, body.labels)
    raw = await score_conversations(request, reward, rows, lambda row: read_openrlhf_query(row[1], row[0], row[2]))
    return GetRewardAnswer(rewards=raw, scores=[probability(score) for score in raw], extra_logs={"raw_score": raw})
