"""vLLM's routes for models that return a number: `/classify`, `/pooling`, `/score`, and verl's `/v1/embeddings`.

As in vLLM, scores are σ of the raw logit unless `use_activation` is false; an embedding is the raw logit itself.
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
from vlmrm.formats.rollouts import read_answer
from vlmrm.formats.texts import read_text
from vlmrm.serving.gateway import gateway_of
from vlmrm.serving.protocols.common import json_answer, probability, score_conversations
from vlmrm.serving.strict_json import Column, StrictRoute

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

    def activated(self) -> bool:
        """Return whether scores are probabilities, and not raw logits."""
        activation = self.activation if self.use_activation is None else self.use_activation
        return activation is not False

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
        """Return each prompt with its answer."""
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


router = APIRouter(route_class=StrictRoute, tags=["vLLM"])


@router.post("/classify", response_model=ListAnswer)
async def classify(body: ClassifyRequest, request: Request) -> Response:
    """Return the probability of each conversation's only class."""
    scores = _activate(body, await _scores(body, request))
    return _answer("classify", body, request, [ClassData(index=n, probs=[score]) for n, score in enumerate(scores)])


@router.post("/pooling", response_model=ListAnswer)
async def pooling(body: PoolingRequest, request: Request) -> Response:
    """Return a list of one number for each conversation."""
    scores = _activate(body, await _scores(body, request))
    data = [PoolingData(index=n, data=_encode(body, score)) for n, score in enumerate(scores)]
    return _answer("pool", body, request, data)


@router.post("/v1/embeddings", response_model=ListAnswer)
async def embeddings(body: PoolingRequest, request: Request) -> Response:
    """Return an embedding of one dimension for each conversation: its raw logit."""
    scores = await _scores(body, request)
    data = [EmbeddingData(index=n, embedding=_encode(body, score)) for n, score in enumerate(scores)]
    return _answer("embd", body, request, data)


@router.post("/score", response_model=ListAnswer)
@router.post("/v1/score", response_model=ListAnswer)
async def score(body: ScoreRequest, request: Request) -> Response:
    """Return the score of each answer to its prompt."""
    raw = await score_conversations(
        request, body.model, body.pairs(), lambda pair: read_answer(*pair), priority=body.importance()
    )
    data = [ScoreData(index=n, score=score) for n, score in enumerate(_activate(body, raw))]
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


def _activate(body: PoolingOptions, raw: list[float]) -> list[float]:
    return [probability(score) for score in raw] if body.activated() else raw


def _encode(body: PoolingRequest, score: float) -> list[float] | str:
    """Return a list of the number, or the base64 of a little-endian float32."""
    if body.encoding_format == "float":
        return [score]
    return base64.b64encode(np.array([score], "<f4").tobytes()).decode()


def _answer(kind: str, body: PoolingOptions, request: Request, data: Any) -> Response:
    name = gateway_of(request).service.reward(body.model).name
    answer = ListAnswer(id=f"{kind}-{uuid.uuid4().hex}", created=int(time.time()), model=name, data=data)
    return json_answer(answer)
