"""vLLM's routes for models that return a number, with verl's `/v1/embeddings`, rerank of several dialects, `/predict`.

As in vLLM, scores are σ of the raw logit unless `use_activation` is false; an embedding is the raw logit itself. In
rerank the query is a prompt, a document an answer to it; TEI sends `texts`, vLLM, Jina and Cohere send `documents`.
"""

from __future__ import annotations

import base64
import time
import uuid
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field, model_validator

from vlmrm.conversation import Conversation
from vlmrm.formats.openai import read_conversation
from vlmrm.formats.rollouts import read_answer, read_tei_input
from vlmrm.formats.texts import read_text
from vlmrm.serving.errors import InvalidRequest
from vlmrm.serving.gateway import gateway_of, json_answer, probability, score_conversations
from vlmrm.serving.strict_json import Column, StrictRoute
from vlmrm.settings import Strict

# They would change the text or the pixels that are scored, which the checkpoint determines.
FIXED = (
    *("chat_template", "chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs", "truncate_prompt_tokens"),
    *("add_generation_prompt", "continue_final_message", "dimensions", "instruction", "max_tokens_per_query"),
)
IGNORED = ("user", "request_id", "cache_salt", "truncation_side", "add_special_tokens")


class PoolingOptions(Strict):
    """The keys of every route. Unknown ones are refused, as they may be meant to change the score.

    `user`, `request_id`, `cache_salt`, `truncation_side` and `add_special_tokens` are ignored.
    """

    model: str | None = Field(None, description="The name of a reward; may be left out where one is served.")
    use_activation: bool | None = Field(None, description="Default σ of the raw logit; false: the logit itself.")
    activation: bool | None = Field(None, description="The older name of use_activation.")
    priority: int = Field(0, description="Lower is earlier.")
    padding: Literal["do_not_pad"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_fixed(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        for name in FIXED:
            if content.get(name):
                raise ValueError(f"{name} cannot be chosen here, where scores are the checkpoint's: leave it out")
        return {name: value for name, value in content.items() if name not in (*FIXED, *IGNORED)}

    def activated(self, raw: list[float]) -> list[float]:
        """Return raw logits as probabilities, or as they are where the request asks for that."""
        activation = self.activation if self.use_activation is None else self.use_activation
        return raw if activation is False else [probability(score) for score in raw]

    def importance(self) -> int:
        """Return the priority as it is here, where higher goes first."""
        return max(-100, min(100, -self.priority))


class ClassifyRequest(PoolingOptions):
    """One conversation that ends with its answer as `messages`, or rendered ones as `input`."""

    messages: Column[dict[str, Any]] | None = None
    input: str | Column[str] | None = None

    @model_validator(mode="after")
    def _check_either(self) -> ClassifyRequest:
        if (self.messages is None) == (self.input is None):
            raise ValueError("give either messages or input")
        return self


class PoolingRequest(ClassifyRequest):
    task: Literal["classify"] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    embed_dtype: Literal["float32"] = "float32"
    endianness: Literal["native", "little"] = "little"


Content = str | dict[str, Any]


class ScoreRequest(PoolingOptions):
    """Prompts and their answers under any of vLLM's names: one prompt for all answers, or a prompt for each."""

    text_1: Content | Column[Content] | None = None
    text_2: Content | Column[Content] | None = None
    queries: Content | Column[Content] | None = None
    documents: Content | Column[Content] | None = None
    items: Content | Column[Content] | None = None
    data_1: Content | Column[Content] | None = None
    data_2: Content | Column[Content] | None = None
    max_tokens_per_doc: Literal[0] | None = Field(None, description="0 for no limit: nothing is truncated here.")

    @model_validator(mode="after")
    def _check_pairs(self) -> ScoreRequest:
        self.pairs()
        return self

    def pairs(self) -> list[tuple[Content, Content]]:
        prompts = self._column("text_1", "queries", "data_1")
        answers = self._column("text_2", "documents", "items", "data_2")
        if len(prompts) not in (1, len(answers)):
            raise ValueError(f"there are {len(prompts)} prompts and {len(answers)} answers: give one, or as many")
        return list(zip(prompts * (len(answers) if len(prompts) == 1 else 1), answers, strict=True))

    def _column(self, *names: str) -> list[Content]:
        values = [value for name in names if (value := getattr(self, name)) is not None]
        if len(values) != 1:
            raise ValueError(f"give one of {', '.join(names)}")
        return values[0] if isinstance(values[0], list) else [values[0]]


class ListAnswer(BaseModel):
    """The answer of every route, whose `data` are objects with the `index` of their input. Tokens are not counted."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[dict[str, Any]]
    usage: None = None


router = APIRouter(route_class=StrictRoute)


@router.post("/classify", response_model=ListAnswer, tags=["vLLM"])
async def classify(body: ClassifyRequest, request: Request) -> Response:
    """Return the probability of each conversation's only class as `{"label", "probs", "num_classes"}`."""
    data = [{"label": "LABEL_0", "probs": [score], "num_classes": 1} for score in await _scores(body, request)]
    return _answer("classify", body, request, data)


@router.post("/pooling", response_model=ListAnswer, tags=["vLLM"])
async def pooling(body: PoolingRequest, request: Request) -> Response:
    """Return a list of one number for each conversation as its `data`."""
    data = [{"object": "pooling", "data": _encode(body, score)} for score in await _scores(body, request)]
    return _answer("pool", body, request, data)


@router.post("/v1/embeddings", response_model=ListAnswer, tags=["vLLM"])
async def embeddings(body: PoolingRequest, request: Request) -> Response:
    """Return an `embedding` of one dimension for each conversation: its raw logit."""
    body.use_activation = False
    data = [{"object": "embedding", "embedding": _encode(body, score)} for score in await _scores(body, request)]
    return _answer("embd", body, request, data)


@router.post("/score", response_model=ListAnswer, tags=["vLLM"])
@router.post("/v1/score", response_model=ListAnswer, tags=["vLLM"])
async def score(body: ScoreRequest, request: Request) -> Response:
    """Return the `score` of each answer to its prompt."""
    raw = await score_conversations(
        request, body.model, body.pairs(), lambda pair: read_answer(*pair), priority=body.importance()
    )
    return _answer("score", body, request, [{"object": "score", "score": score} for score in body.activated(raw)])


async def _scores(body: ClassifyRequest, request: Request) -> list[float]:
    texts = body.input if isinstance(body.input, list) else [body.input]
    inputs: list[Any] = texts if body.messages is None else [body.messages]
    priority = body.importance()
    return body.activated(await score_conversations(request, body.model, inputs, _conversation, priority=priority))


def _conversation(content: str | list[dict[str, Any]]) -> Conversation:
    return read_text(content) if isinstance(content, str) else read_conversation(content)


def _encode(body: PoolingRequest, score: float) -> list[float] | str:
    """Return a list of the number, or the base64 of a little-endian float32."""
    if body.encoding_format == "float":
        return [score]
    return base64.b64encode(np.array([score], "<f4").tobytes()).decode()


def _answer(kind: str, body: PoolingOptions, request: Request, data: list[dict[str, Any]]) -> Response:
    name, data = gateway_of(request).reward(body.model).name, [{"index": n, **one} for n, one in enumerate(data)]
    return json_answer(ListAnswer(id=f"{kind}-{uuid.uuid4().hex}", created=int(time.time()), model=name, data=data))


# Rerank --------------------------------------------------------------------------------------------------------------

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
    return_documents: bool | None = Field(None, description="Default false on /v2/rerank, as Cohere's; else true.")
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
    scores = raw if body.raw_scores else body.activated(raw)
    order = sorted(range(len(scores)), key=lambda index: -raw[index])[: body.top_n or None]
    if body.texts is not None:
        texts = body.texts if body.return_text else [None] * len(scores)
        return [Rank(index=index, score=scores[index], text=texts[index]) for index in order]
    cohere = request.url.path.endswith("/v2/rerank")
    shown = not cohere if body.return_documents is None else body.return_documents
    results = [
        RerankResult(index=index, relevance_score=scores[index], document=_shown(contents[index]) if shown else None)
        for index in order
    ]
    served = gateway_of(request).reward(name).name
    return RerankAnswer(id=f"rerank-{uuid.uuid4().hex}", model=served, results=results)


def _message(content: Content) -> Any:
    """Return a part by itself, such as `{"image": ...}`, as a message of it."""
    return content if isinstance(content, str) or "content" in content else {"content": [content]}


def _shown(document: Content) -> dict[str, Any]:
    """Return a document as the dialects return it: Cohere's and Jina's as it was sent, vLLM's as `multi_modal`."""
    if isinstance(document, str):
        return {"text": document}
    return {"multi_modal": document["content"]} if "content" in document else document


class PredictRequest(Strict):
    """One input, `text`, `[text]` or `[prompt, answer]`, or a batch as a list of lists."""

    inputs: str | Column[str] | Column[Column[str]]
    raw_scores: bool = False
    truncate: bool | None = Field(None, description="Ignored: nothing is truncated here.")
    truncation_direction: str | None = None


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
    is_batch = all(isinstance(content, list) for content in single)
    inputs: Any = single if is_batch else [single]
    raw = await score_conversations(request, reward, inputs, read_tei_input)
    predictions = [[Prediction(score=score if body.raw_scores else probability(score))] for score in raw]
    return predictions if is_batch else predictions[0]
