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
from pydantic import BaseModel, ConfigDict, Field, model_validator

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


class PoolingOptions(BaseModel):
    """The keys of every route. Unknown ones are refused, as they may be meant to change the score."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, description="The name of a reward; may be left out where one is served.")
    use_activation: bool | None = Field(None, description="Default σ of the raw logit; false: the logit itself.")
    activation: bool | None = Field(None, description="The older name of use_activation.")
    priority: int = Field(0, description="Lower is earlier.")
    user: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    padding: Literal["do_not_pad"] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    dimensions: int | None = None
    instruction: str | None = None
    max_tokens_per_query: int | None = Field(None, description="0 for no limit.")

    @model_validator(mode="after")
    def _check_fixed(self) -> PoolingOptions:
        for name in FIXED:
            if getattr(self, name):
                raise ValueError(f"{name} cannot be chosen here, where scores are the checkpoint's: leave it out")
        return self

    def activated(self, raw: list[float]) -> list[float]:
        """Return raw logits as probabilities, or as they are where the request asks for that."""
        activation = self.activation if self.use_activation is None else self.use_activation
        return raw if activation is False else [probability(score) for score in raw]

    def importance(self) -> int:
        """Return the priority as it is here, where higher goes first."""
        return max(-100, min(100, -self.priority))


class TextAndImage(BaseModel):
    """SGLang's form of a rendered conversation with its image."""

    model_config = ConfigDict(extra="forbid")

    text: str
    image: str | None = None


class ClassifyRequest(PoolingOptions):
    """One conversation that ends with its answer as `messages`, or rendered ones as `input`."""

    messages: Column[dict[str, Any]] | None = None
    input: str | Column[str] | Column[TextAndImage] | None = None

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
            raise ValueError(
                f"there are {len(prompts)} prompts and {len(answers)} answers: give one prompt, or as many"
            )
        return list(zip(prompts * (len(answers) if len(prompts) == 1 else 1), answers, strict=True))

    def _column(self, *names: str) -> list[Content]:
        values = [value for name in names if (value := getattr(self, name)) is not None]
        if len(values) != 1:
            raise ValueError(f"give one of {', '.join(names)}")
        return values[0] if isinstance(values[0], list) else [values[0]]


class ClassData(BaseModel):
    index: int
    label: str = "LABEL_0"
    probs: list[float]
    num_classes: int = 1


class PoolingData(BaseModel):
    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float] | str


class EmbeddingData(BaseModel):
    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class ScoreData(BaseModel):
    index: int
    object: Literal["score"] = "score"
    score: float


class ListAnswer(BaseModel):
    """The answer of every route. Tokens are not counted."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassData | PoolingData | EmbeddingData | ScoreData]
    usage: None = None


router = APIRouter(route_class=StrictRoute)


@router.post("/classify", response_model=ListAnswer, tags=["vLLM"])
async def classify(body: ClassifyRequest, request: Request) -> Response:
    """Return the probability of each conversation's only class."""
    scores = body.activated(await _scores(body, request))
    return _answer("classify", body, request, [ClassData(index=n, probs=[score]) for n, score in enumerate(scores)])


@router.post("/pooling", response_model=ListAnswer, tags=["vLLM"])
async def pooling(body: PoolingRequest, request: Request) -> Response:
    """Return a list of one number for each conversation."""
    scores = body.activated(await _scores(body, request))
    data = [PoolingData(index=n, data=_encode(body, score)) for n, score in enumerate(scores)]
    return _answer("pool", body, request, data)


@router.post("/v1/embeddings", response_model=ListAnswer, tags=["vLLM"])
async def embeddings(body: PoolingRequest, request: Request) -> Response:
    """Return an embedding of one dimension for each conversation: its raw logit."""
    scores = await _scores(body, request)
    data = [EmbeddingData(index=n, embedding=_encode(body, score)) for n, score in enumerate(scores)]
    return _answer("embd", body, request, data)


@router.post("/score", response_model=ListAnswer, tags=["vLLM"])
@router.post("/v1/score", response_model=ListAnswer, tags=["vLLM"])
async def score(body: ScoreRequest, request: Request) -> Response:
    """Return the score of each answer to its prompt."""
    raw = await score_conversations(
        request, body.model, body.pairs(), lambda pair: read_answer(*pair), priority=body.importance()
    )
    data = [ScoreData(index=n, score=score) for n, score in enumerate(body.activated(raw))]
    return _answer("score", body, request, data)


async def _scores(body: ClassifyRequest, request: Request) -> list[float]:
    texts = body.input if isinstance(body.input, list) else [body.input]
    inputs: list[Any] = texts if body.messages is None else [body.messages]
    return await score_conversations(request, body.model, inputs, _conversation, priority=body.importance())


def _conversation(content: str | TextAndImage | list[dict[str, Any]]) -> Conversation:
    if isinstance(content, list):
        return read_conversation(content)
    if isinstance(content, str):
        return read_text(content)
    return read_text(content.text, [content.image] if content.image else [])


def _encode(body: PoolingRequest, score: float) -> list[float] | str:
    """Return a list of the number, or the base64 of a little-endian float32."""
    if body.encoding_format == "float":
        return [score]
    return base64.b64encode(np.array([score], "<f4").tobytes()).decode()


def _answer(kind: str, body: PoolingOptions, request: Request, data: Any) -> Response:
    name = gateway_of(request).service.reward(body.model).name
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
