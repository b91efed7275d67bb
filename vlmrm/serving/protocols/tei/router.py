"""Text Embeddings Inference: `POST /predict`, and `/NAME/predict` where several rewards are served."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request

from vlmrm.data.messages import to_messages
from vlmrm.data.schema import Message
from vlmrm.errors import RowError
from vlmrm.scoring.rendered_text import messages_of
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
    raw = await conversation_scores(request, reward, [body.only()] if batch is None else batch, _conversation)
    found = [[Prediction(score=score if body.raw_scores else probability(score))] for score in raw]
    return found[0] if batch is None else found


def _conversation(texts: Sequence[str]) -> list[Message]:
    if len(texts) == 1:
        return messages_of(texts[0])
    if len(texts) == 2:
        return [*to_messages(texts[0], "user"), *to_messages(texts[1], "assistant")]
    raise RowError(f"an input has {len(texts)} texts: send a rendered conversation, or a prompt and its answer")
