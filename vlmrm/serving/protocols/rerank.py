"""Rerank as vLLM, Jina, Cohere and TEI have it, and TEI's `/predict`; below `/NAME` for clients that send no `model`.

The query is a prompt, a document an answer to it. The dialects share their addresses and are told apart by a key: with
TEI's `texts` the answer is a bare list, with `documents` it has `results`. Keys of both are refused.
"""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, model_validator

from vlmrm.conversation import Conversation
from vlmrm.formats.rollouts import read_answer, read_tei_input
from vlmrm.serving.errors import InvalidRequest
from vlmrm.serving.gateway import gateway_of
from vlmrm.serving.protocols.common import probability, score_conversations
from vlmrm.serving.protocols.vllm import Content, PoolingOptions
from vlmrm.serving.strict_json import Column, StrictRoute
from vlmrm.settings import Strict

router = APIRouter(route_class=StrictRoute)

OF_TEXTS = ("raw_scores", "return_text", "truncate", "truncation_direction")
OF_DOCUMENTS = ("return_documents", "rank_fields", "max_tokens_per_doc", "use_activation", "activation")
UNTRUNCATED = "Nothing is truncated here: leave it out."


class RerankRequest(PoolingOptions):
    """Either `texts` or `documents`: texts, `{"text"}`, `{"image"}`, or vLLM's `{"content": parts}`."""

    query: Content
    texts: Column[str] | None = Field(None, min_length=1)
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool | None = Field(None, description="Ignored: nothing is truncated here.")
    truncation_direction: str | None = None
    documents: Content | Column[Content] | None = None
    top_n: int | None = Field(None, ge=0, description="0 for all. LiteLLM sends it with texts too.")
    return_documents: bool | None = Field(
        None, description="Default false on /v2/rerank, as Cohere's; true elsewhere."
    )
    rank_fields: Column[str] | None = Field(None, description="The text alone is read.")
    max_tokens_per_doc: int | None = Field(None, description="0 for no limit. Refused where a text may be longer.")
    max_chunks_per_doc: None = Field(None, description=UNTRUNCATED)

    @model_validator(mode="after")
    def _check_dialect(self) -> RerankRequest:
        if (self.texts is None) == (self.documents is None):
            raise ValueError("give either texts, as TEI's clients do, or documents")
        own, foreign = ("documents", OF_TEXTS) if self.texts is None else ("texts", OF_DOCUMENTS)
        if beside := [name for name in foreign if name in self.model_fields_set and getattr(self, name) is not None]:
            raise ValueError(f"{beside[0]} does not go with {own}, as they are of two dialects: leave one of them out")
        if self.rank_fields not in (None, ["text"]):
            raise ValueError("rank_fields may name text alone: write what else is to be read into the text")
        most = self.max_tokens_per_doc
        if most and any(not isinstance(it, str) or len(it.encode()) > most for it in self.contents()):
            raise ValueError("max_tokens_per_doc may cut a document off, and nothing is truncated here: leave it out")
        return self

    def contents(self) -> list[Any]:
        """Return the texts or documents as a list."""
        contents = self.documents if self.texts is None else self.texts
        return contents if isinstance(contents, list) else [contents]


class Rank(BaseModel):
    index: int
    score: float
    text: str | None = None


class RerankResult(BaseModel):
    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class RerankAnswer(BaseModel):
    """The best first. Tokens are not counted."""

    id: str
    model: str
    results: list[RerankResult]


@router.post("/{reward}/rerank", response_model_exclude_none=True, tags=["Rerank"])  # after those with names of paths
@router.post("/v2/rerank", response_model_exclude_none=True, tags=["Rerank"])
@router.post("/v1/rerank", response_model_exclude_none=True, tags=["Rerank"])
@router.post("/rerank", response_model_exclude_none=True, tags=["Rerank"])
async def rerank(body: RerankRequest, request: Request, reward: str | None = None) -> list[Rank] | RerankAnswer:
    """Return the documents' indices and scores, the best first: σ of the raw score unless the raw one is asked for."""
    if None not in (reward, body.model) and reward != body.model:
        raise InvalidRequest(f"the address names the reward {reward}, and model another: leave one of them out.")
    name, contents = reward or body.model, body.contents()

    def read(document: Any) -> Conversation:
        return read_answer(_message(body.query), _message(document))

    raw = await score_conversations(request, name, contents, read, priority=body.importance())
    scores = raw if body.raw_scores or not body.activated() else [probability(score) for score in raw]
    order = sorted(range(len(scores)), key=lambda index: -raw[index])[: body.top_n or None]
    if body.texts is not None:
        texts = body.texts if body.return_text else [None] * len(scores)
        return [Rank(index=index, score=scores[index], text=texts[index]) for index in order]
    shown = body.return_documents
    if shown is None:
        shown = not request.url.path.endswith("/v2/rerank")
    results = [
        RerankResult(index=index, relevance_score=scores[index], document=_shown(contents[index]) if shown else None)
        for index in order
    ]
    served = gateway_of(request).service.reward(name).name
    return RerankAnswer(id=f"rerank-{uuid.uuid4().hex}", model=served, results=results)


def _message(content: Content) -> Any:
    """Return a part by itself, such as `{"image": ...}`, as a message of it."""
    return content if isinstance(content, str) or "content" in content else {"content": [content]}


def _shown(document: Content) -> dict[str, Any]:
    """Return a document as the dialects return it: Cohere's and Jina's as it was sent, vLLM's as `multi_modal`."""
    if isinstance(document, str):
        return {"text": document}
    return {"multi_modal": document["content"]} if "content" in document else document


# Predict -------------------------------------------------------------------------------------------------------------


class PredictRequest(Strict):
    """One input, or a batch as a list of lists.

    An input is a rendered conversation, `text` or `[text]`, or a prompt and its answer, `[text, text]`.
    """

    inputs: str | Column[str] | Column[Column[str]]
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


@router.post("/predict", tags=["Text Embeddings Inference"])
@router.post("/{reward}/predict", tags=["Text Embeddings Inference"])
async def predict(
    body: PredictRequest, request: Request, reward: str | None = None
) -> list[Prediction] | list[list[Prediction]]:
    """Return a list of one prediction; for a batch, such a list for each input."""
    single = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    inputs: Any = single if body.is_batch else [single]
    raw = await score_conversations(request, reward, inputs, read_tei_input)
    predictions = [[Prediction(score=score if body.raw_scores else probability(score))] for score in raw]
    return predictions if body.is_batch else predictions[0]
