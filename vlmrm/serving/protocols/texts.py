"""Trainers that post texts to one reward, named by the address `/NAME/...` where several are served.

OpenRLHF       `POST /get_reward`             --reward.remote_url http://host:port/get_reward --data.label_key label
LLaMA-Factory  `POST /v1/score/evaluation`    reward_model_type: api; reward_model: http://host:port/v1/score/evaluation
slime, miles   `POST /remote_rm`              --rm-type remote_rm --rm-url http://host:port/remote_rm
"""

from __future__ import annotations

import uuid
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, model_validator

from vlmrm.formats.rollouts import read_openrlhf_query, read_slime_sample, zip_columns
from vlmrm.formats.texts import read_text
from vlmrm.serving.gateway import gateway_of
from vlmrm.serving.protocols.common import check_lengths, probability, score_conversations
from vlmrm.serving.strict_json import Column, StrictRoute
from vlmrm.settings import Strict

router = APIRouter(route_class=StrictRoute)

# OpenRLHF ------------------------------------------------------------------------------------------------------------


class GetRewardRequest(Strict):
    """`query` is the rendered prompt with its answer. A label may be `{"prompt", "images", "videos"}`, or its JSON."""

    query: Column[str]
    prompts: Column[str] | None = None
    labels: Column[Any] | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> GetRewardRequest:
        check_lengths(self.query, "queries", prompts=self.prompts, labels=self.labels)
        return self


class GetRewardAnswer(BaseModel):
    """Raw logits as `rewards`, σ of them as `scores`: OpenRLHF's dynamic filtering needs those between 0 and 1."""

    rewards: list[float]
    scores: list[float]
    extra_logs: dict[str, list[float]]


@router.post("/get_reward", tags=["OpenRLHF"])
@router.post("/{reward}/get_reward", tags=["OpenRLHF"])
async def get_reward(body: GetRewardRequest, request: Request, reward: str | None = None) -> GetRewardAnswer:
    """Return the reward of each query, in order."""
    rows = zip_columns(body.query, body.prompts, body.labels)
    if not rows:  # of several servers OpenRLHF 0.11.0 sends all but the first nothing, and needs every answer
        gateway_of(request).authorized_reward(request, reward)
        return GetRewardAnswer(rewards=[], scores=[], extra_logs={})
    raw = await score_conversations(request, reward, rows, lambda row: read_openrlhf_query(row[1], row[0], row[2]))
    return GetRewardAnswer(rewards=raw, scores=[probability(score) for score in raw], extra_logs={"raw_score": raw})


# LLaMA-Factory -------------------------------------------------------------------------------------------------------

ANY = "model"  # LLaMA-Factory's trainer sends this name whatever is served


class ScoreEvaluationRequest(Strict):
    """Rendered conversations."""

    model: str = ANY
    messages: Column[str] = Field(min_length=1)
    max_length: None = Field(None, description="Nothing is truncated here: leave it out.")


class ScoreEvaluationAnswer(BaseModel):
    """Raw logits."""

    id: str
    object: Literal["score.evaluation"] = "score.evaluation"
    model: str
    scores: list[float]


@router.post("/v1/score/evaluation", tags=["LLaMA-Factory"])
@router.post("/{reward}/v1/score/evaluation", tags=["LLaMA-Factory"])
async def score_evaluation(
    body: ScoreEvaluationRequest, request: Request, reward: str | None = None
) -> ScoreEvaluationAnswer:
    """Return the raw logit of each conversation, in order."""
    name = reward if reward is not None or body.model == ANY else body.model
    scores = await score_conversations(request, name, body.messages, read_text)
    return ScoreEvaluationAnswer(id=f"scoreval-{uuid.uuid4().hex}", model=body.model, scores=scores)


# slime ---------------------------------------------------------------------------------------------------------------


class Rollout(Strict):
    """A finished sample. Its label may be `{"prompt", "images", "videos"}`, or its JSON; any other is not read."""

    prompt: str | Column[dict[str, Any]]
    response: str
    label: Any = None


@router.post("/remote_rm", tags=["slime"])
@router.post("/{reward}/remote_rm", tags=["slime"])
async def remote_rm(body: Rollout, request: Request, reward: str | None = None) -> float:
    """Return the raw logit as a bare number, as slime takes the whole answer for the reward."""
    rows = [(body.prompt, body.response, body.label)]
    [score] = await score_conversations(request, reward, rows, lambda row: read_slime_sample(*row))
    return score
