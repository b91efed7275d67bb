"""Requests and answers of `POST /v1/score/evaluation`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class ScoreEvaluationRequest(BaseModel):
    """Rendered conversations. LLaMA-Factory's trainer always says that the model is `model`."""

    model: str = "model"
    messages: list[str] = Field(min_length=1)
    max_length: None = Field(None, description="Nothing is cut off here: leave it out.")


class ScoreEvaluationAnswer(BaseModel):
    """Raw logits."""

    id: str
    object: Literal["score.evaluation"] = "score.evaluation"
    model: str
    scores: list[float]
