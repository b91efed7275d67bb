"""LLaMA-Factory's reward API: `POST /v1/score/evaluation`, and below `/NAME` where several rewards are served.

reward_model_type: api
reward_model: http://host:port/v1/score/evaluation
"""

from __future__ import annotations

import uuid
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from vlmrm.formats.texts import read_text
from vlmrm.serving.protocols.common import score_conversations
from vlmrm.serving.strict_json import StrictRoute

router = APIRouter(route_class=StrictRoute, tags=["LLaMA-Factory"])

ANY = "model"  # LLaMA-Factory's trainer sends this name whatever is served


class ScoreEvaluationRequest(BaseModel):
    """Rendered conversations."""

    model: str = ANY
    messages: list[str] = Field(min_length=1)
    max_length: None = Field(None, description="Nothing is truncated here: leave it out.")


class ScoreEvaluationAnswer(BaseModel):
    """Raw logits."""

    id: str
    object: Literal["score.evaluation"] = "score.evaluation"
    model: str
    scores: list[float]


@router.post("/v1/score/evaluation")
@router.post("/{reward}/v1/score/evaluation")
async def score_evaluation(
    body: ScoreEvaluationRequest, request: Request, reward: str | None = None
) -> ScoreEvaluationAnswer:
    """Return the raw logit of each conversation, in order."""
    name = reward if reward is not None or body.model == ANY else body.model
    scores = await score_conversations(request, name, body.messages, read_text)
    return ScoreEvaluationAnswer(id=f"scoreval-{uuid.uuid4().hex}", model=body.model, scores=scores)
