"""Text Embeddings Inference: `POST /predict`, and `/NAME/predict` where several rewards are served."""

from __future__ import annotations

from fastapi import APIRouter, Request

from vlmrm.formats.tei import read_input
from vlmrm.serving.protocols.tei.schema import Prediction, PredictRequest
from vlmrm.serving.protocols.whole import conversation_scores, probability
from vlmrm.serving.strict_json import StrictRoute

router = APIRouter(route_class=StrictRoute, tags=["Text Embeddings Inference"])


@router.post("/predict")
@router.post("/{reward}/predict")
async def predict(
    body: PredictRequest, request: Request, reward: str | None = None
) -> list[Prediction] | list[list[Prediction]]:
    """A list of one prediction; of a batch, one such list for each input."""
    batch = body.batch()
    raw = await conversation_scores(request, reward, [body.only()] if batch is None else batch, read_input)
    found = [[Prediction(score=score if body.raw_scores else probability(score))] for score in raw]
    return found[0] if batch is None else found
