"""LLaMA-Factory's reward API: `POST /v1/score/evaluation`, and below `/NAME` where several rewards are served.

reward_model_type: api
reward_model: http://host:port/v1/score/evaluation
"""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request

from vlmrm.formats.chatml import read_text
from vlmrm.serving.protocols.llama_factory.schema import ScoreEvaluationAnswer, ScoreEvaluationRequest
from vlmrm.serving.protocols.whole import conversation_scores
from vlmrm.serving.strict_json import StrictRoute

router = APIRouter(route_class=StrictRoute, tags=["LLaMA-Factory"])

ANY = "model"  # what the trainer calls whichever model answers


@router.post("/v1/score/evaluation")
@router.post("/{reward}/v1/score/evaluation")
async def score_evaluation(
    body: ScoreEvaluationRequest, request: Request, reward: str | None = None
) -> ScoreEvaluationAnswer:
    """The raw logit of each conversation, in order."""
    name = reward if reward is not None or body.model == ANY else body.model
    scores = await conversation_scores(request, name, body.messages, read_text)
    return ScoreEvaluationAnswer(id=f"scoreval-{uuid.uuid4().hex}", model=body.model, scores=scores)
