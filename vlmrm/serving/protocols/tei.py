"""Text Embeddings Inference: `POST /predict`, and `/NAME/predict` where several rewards are served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from vlmrm.formats.rollouts import read_tei_input
from vlmrm.serving.protocols.common import probability, score_conversations
from vlmrm.serving.strict_json import StrictRoute

router = APIRouter(route_class=StrictRoute, tags=["Text Embeddings Inference"])


class PredictRequest(BaseModel):
    """One input, or a batch as a list of lists.

    An input is a rendered conversation, `text` or `[text]`, or a prompt and its answer, `[text, text]`.
    """

    inputs: str | list[str] | list[list[str]]
    raw_scores: bool = False
    truncate: bool | None = Field(None, description="Ignored: nothing is truncated here.")
    truncation_direction: str | None = None

    @property
    def is_batch(self) -> bool:
        return isinstance(self.inputs, list) and all(isinstance(content, list) for content in self.inputs)


class Prediction(BaseModel):
    """σ of the raw logit, or with `raw_scores` the logit itself."""

    score: float
    label: str = "LABEL_0"


@router.post("/predict")
@router.post("/{reward}/predict")
async def predict(
    body: PredictRequest, request: Request, reward: str | None = None
) -> list[Prediction] | list[list[Prediction]]:
    """Return a list of one prediction; for a batch, such a list for each input."""
    single = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    inputs: Any = single if body.is_batch else [single]
    raw = await score_conversations(request, reward, inputs, read_tei_input)
    predictions = [[Prediction(score=score if body.raw_scores else probability(score))] for score in raw]
    return predictions if body.is_batch else predictions[0]
