"""vLLM's routes for models that answer a number: `/classify`, `/pooling`, `/score`, and verl's `/v1/embeddings`.

Scores are σ of the raw logit unless `use_activation` is false, as there; an embedding is the raw logit itself.
"""

from __future__ import annotations

import base64
import time
import uuid
from typing import Any

import numpy as np
from fastapi import APIRouter, Request

from vlmrm.conversation import Conversation
from vlmrm.formats.answers import read_answer
from vlmrm.formats.chatml import read_text
from vlmrm.formats.openai import read_conversation
from vlmrm.serving.app import serving
from vlmrm.serving.protocols.vllm.schema import (
    Class,
    ClassifyRequest,
    Embedded,
    Listed,
    Pooled,
    PoolingOptions,
    PoolingRequest,
    Scored,
    ScoreRequest,
    TextAndImage,
)
from vlmrm.serving.protocols.whole import conversation_scores, probability
from vlmrm.serving.strict_json import StrictRoute

router = APIRouter(route_class=StrictRoute, tags=["vLLM"])


@router.post("/classify")
async def classify(body: ClassifyRequest, request: Request) -> Listed:
    """The only class of each conversation, with its probability."""
    scores = _activated(body, await _scores(body, request))
    return _listed("classify", body, request, [Class(index=n, probs=[score]) for n, score in enumerate(scores)])


@router.post("/pooling")
async def pooling(body: PoolingRequest, request: Request) -> Listed:
    """A list of one number for each conversation."""
    scores = _activated(body, await _scores(body, request))
    data = [Pooled(index=n, data=_encoded(body, score)) for n, score in enumerate(scores)]
    return _listed("pool", body, request, data)


@router.post("/v1/embeddings")
async def embeddings(body: PoolingRequest, request: Request) -> Listed:
    """An embedding of one dimension for each conversation: its raw logit."""
    scores = await _scores(body, request)
    data = [Embedded(index=n, embedding=_encoded(body, score)) for n, score in enumerate(scores)]
    return _listed("embd", body, request, data)


@router.post("/score")
@router.post("/v1/score")
async def score(body: ScoreRequest, request: Request) -> Listed:
    """The score of each answer to its prompt."""
    raw = await conversation_scores(
        request, body.model, body.pairs(), lambda pair: read_answer(*pair), priority=_priority(body)
    )
    data = [Scored(index=n, score=score) for n, score in enumerate(_activated(body, raw))]
    return _listed("score", body, request, data)


async def _scores(body: ClassifyRequest, request: Request) -> list[float]:
    rows: list[Any] = [body.messages] if body.messages is not None else _texts(body.input)
    return await conversation_scores(request, body.model, rows, _conversation, priority=_priority(body))


def _texts(given: Any) -> list[str | TextAndImage]:
    return given if isinstance(given, list) else [given]


def _conversation(row: str | TextAndImage | list[dict[str, Any]]) -> Conversation:
    if isinstance(row, list):
        return read_conversation(row)
    return read_text(row) if isinstance(row, str) else read_text(row.text, [row.image] if row.image else [])


def _activated(body: PoolingOptions, raw: list[float]) -> list[float]:
    return [probability(score) for score in raw] if body.activated() else raw


def _encoded(body: PoolingRequest, score: float) -> list[float] | str:
    """As vLLM's clients ask for it: numbers, or base64 of little-endian float32."""
    if body.encoding_format == "float":
        return [score]
    return base64.b64encode(np.array([score], "<f4").tobytes()).decode()


def _priority(body: PoolingOptions) -> int:
    """There lower goes first, here higher."""
    return max(-100, min(100, -body.priority))


def _listed(kind: str, body: PoolingOptions, request: Request, data: Any) -> Listed:
    name = serving(request).service.reward(body.model).name
    return Listed(id=f"{kind}-{uuid.uuid4().hex}", created=int(time.time()), model=name, data=data)
