"""Trainers that post their answers to one reward, named by the address `/NAME/...` where several are served.

OpenRLHF       `POST /get_reward`             --reward.remote_url http://host:port/get_reward --data.label_key label
LLaMA-Factory  `POST /v1/score/evaluation`    reward_model_type: api; reward_model: http://host:port/v1/score/evaluation
slime, miles   `POST /remote_rm`              --rm-type remote_rm --rm-url http://host:port/remote_rm
verl-omni      `POST /verl_omni`              reward_functions.NAME.server_url=http://host:port/verl_omni
UniRL          `POST /unirl/score`            base_url: http://host:port/unirl; the rewards are named in the request
Flow-Factory   `POST /compute`                server_url: http://host:port, or http://host:port/NAME
"""

from __future__ import annotations

import pickle
import uuid
from functools import partial
from typing import Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field, model_validator

from vlmrm.conversation import Sample
from vlmrm.errors import RowError
from vlmrm.formats.flow_factory import data_uri
from vlmrm.formats.rollouts import read_openrlhf_query, read_slime_sample, zip_columns
from vlmrm.formats.texts import read_text
from vlmrm.formats.wire import Item, read_pickle
from vlmrm.serving.errors import InvalidRequest, NotServing, RewardFailed, TooLarge, UnknownReward
from vlmrm.serving.gateway import (
    PATIENCE_S,
    TIMEOUT_S,
    check_lengths,
    gateway_of,
    gather_rewards,
    probability,
    score_conversations,
)
from vlmrm.serving.media import MediaResolver
from vlmrm.serving.responses import error_of
from vlmrm.serving.strict_json import Column, StrictRoute, body_of, strict_json, validated
from vlmrm.serving.worker.channel import redact_paths
from vlmrm.settings import Strict, nearest

router = APIRouter(route_class=StrictRoute)

# OpenRLHF ------------------------------------------------------------------------------------------------------------


class GetRewardRequest(Strict):
    """`query` is the rendered prompt with its answer. A label may be `{"prompt", "images", "videos"}`, or its JSON."""

    query: Column[str]
    prompts: Column[str] | None = None
    labels: Column[Any] | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> GetRewardRequest:
        check_lengths(self.query, "queries", prompts=self.prompts, labels=self.labels)
        return self


class GetRewardAnswer(BaseModel):
    """Raw logits as `rewards`, σ of them as `scores`: OpenRLHF's dynamic filtering needs those between 0 and 1."""

    rewards: list[float]
    scores: list[float]
    extra_logs: dict[str, list[float]]


@router.post("/get_reward", tags=["OpenRLHF"])
@router.post("/{reward}/get_reward", tags=["OpenRLHF"])
async def get_reward(body: GetRewardRequest, request: Request, reward: str | None = None) -> GetRewardAnswer:
    """Return the reward of each query, in order."""
    rows = zip_columns(body.query, body.prompts, body.labels)
    if not rows:  # of several servers OpenRLHF 0.11.0 sends all but the first nothing, and needs every answer
        gateway_of(request).authorized_reward(request, reward)
        return GetRewardAnswer(rewards=[], scores=[], extra_logs={})
    raw = await score_conversations(request, reward, rows, lambda row: read_openrlhf_query(row[1], row[0], row[2]))
    return GetRewardAnswer(rewards=raw, scores=[probability(score) for score in raw], extra_logs={"raw_score": raw})


# LLaMA-Factory -------------------------------------------------------------------------------------------------------

ANY = "model"  # LLaMA-Factory's trainer sends this name whatever is served


class ScoreEvaluationRequest(Strict):
    """Rendered conversations."""

    model: str = ANY
    messages: Column[str] = Field(min_length=1)
    max_length: None = Field(None, description="Nothing is truncated here: leave it out.")


class ScoreEvaluationAnswer(BaseModel):
    """Raw logits."""

    id: str
    object: Literal["score.evaluation"] = "score.evaluation"
    model: str
    scores: list[float]


@router.post("/v1/score/evaluation", tags=["LLaMA-Factory"])
@router.post("/{reward}/v1/score/evaluation", tags=["LLaMA-Factory"])
async def score_evaluation(
    body: ScoreEvaluationRequest, request: Request, reward: str | None = None
) -> ScoreEvaluationAnswer:
    """Return the raw logit of each conversation, in order."""
    name = reward if reward is not None or body.model == ANY else body.model
    scores = await score_conversations(request, name, body.messages, read_text)
    return ScoreEvaluationAnswer(id=f"scoreval-{uuid.uuid4().hex}", model=body.model, scores=scores)


# slime ---------------------------------------------------------------------------------------------------------------


class Rollout(Strict):
    """A finished sample. Its label may be `{"prompt", "images", "videos"}`, or its JSON; any other is not read."""

    prompt: str | Column[dict[str, Any]]
    response: str
    label: Any = None


@router.post("/remote_rm", tags=["slime"])
@router.post("/{reward}/remote_rm", tags=["slime"])
async def remote_rm(body: Rollout, request: Request, reward: str | None = None) -> float:
    """Return the raw logit as a bare number, as slime takes the whole answer for the reward."""
    rows = [(body.prompt, body.response, body.label)]
    [score] = await score_conversations(request, reward, rows, lambda row: read_slime_sample(*row))
    return score


# verl-omni -----------------------------------------------------------------------------------------------------------


class Pickled(Strict):
    """What verl-omni posts as a pickle; nothing but plain data is read from it."""

    images: Column[bytes] = Field(min_length=1)
    prompts: Column[str]
    metadata: dict[str, Any] = Field({}, max_length=0, description="No reward here reads any: leave it empty.")

    @model_validator(mode="after")
    def _check_lengths(self) -> Pickled:
        check_lengths(self.images, "images", prompts=self.prompts)
        return self


PICKLE = {"type": "string", "format": "binary", "description": "A pickle of plain data."}
BODY = body_of({"application/octet-stream": PICKLE})


@router.post("/verl_omni", tags=["verl-omni"], openapi_extra=BODY, response_class=Response)
@router.post("/{reward}/verl_omni", tags=["verl-omni"], openapi_extra=BODY, response_class=Response)
async def verl_omni(request: Request, reward: str | None = None) -> Response:
    """Return a pickle of `{"scores": [number]}`, in order."""
    body = validated(Pickled, read_pickle(await request.body()))
    rows = list(zip(body.prompts, body.images, strict=True))
    scores = await score_conversations(request, reward, rows, lambda row: Sample(row[0], image=row[1]), noun="image")
    return Response(pickle.dumps({"scores": scores}), media_type="application/octet-stream")


# UniRL ---------------------------------------------------------------------------------------------------------------


class Turn(Strict):
    """A prompt with what was made of it; files in base64, or a path below the service's `media_root`."""

    text: str
    image_b64: str | None = None
    video_b64: str | None = None
    video_path: str | None = None


class HistoryRequest(Strict):
    """The last turn is scored; the images and videos of those before it, of the same text, are what it was made of."""

    history: Column[Turn] = Field(min_length=1)
    required_rewards: Column[str] = Field(min_length=1)
    metadata: dict[str, Any] | None = None


class UniRLRequest(Strict):
    requests: Column[HistoryRequest]


class UniRLAnswer(BaseModel):
    """For each request a score or an error of each of its rewards; the score is under the reward's name once more."""

    results: list[dict[str, dict[str, float]]]
    errors: list[dict[str, str]]


@router.post("/unirl/score", tags=["UniRL"])
async def unirl_score(body: UniRLRequest, request: Request) -> UniRLAnswer:
    """Return the raw scores of each request; the failure of one reward is not that of the others."""
    gateway = gateway_of(request)
    gateway.check_count(len(body.requests))
    indices: dict[str, list[int]] = {}
    for index, one in enumerate(body.requests):
        for name in dict.fromkeys(one.required_rewards):
            indices.setdefault(gateway.authorized_reward(request, name).name, []).append(index)
    written = await gateway.written(body.requests, partial(_history, gateway.media))
    answer = UniRLAnswer(results=[{} for _ in written], errors=[{} for _ in written])
    score = partial(gateway.score, timeout=TIMEOUT_S, patience=PATIENCE_S)
    results = {name: score(name, [written[index] for index in chosen]) for name, chosen in indices.items()}
    found, failed = await gather_rewards(results)
    for name, result in found.items():
        for index, outcome in zip(indices[name], result.outcomes, strict=True):
            if outcome.score is None:
                answer.errors[index][name] = f"{outcome.error}"
            else:
                answer.results[index][name] = {name: outcome.score}
    for name, error in failed.items():
        for index in indices[name]:
            answer.errors[index][name] = error_of(error).message
    return answer


@router.get("/unirl/health", tags=["UniRL"])
async def unirl_health(request: Request) -> dict[str, Any]:
    """Return the names of the rewards, for UniRL's check at its start, and whether each can be computed."""
    gateway, names = gateway_of(request), request.state.client.rewards
    return {"status": "ok", "rewards": {name: [gateway.health(name).ready] for name in names}}


@router.get("/unirl/rewards", tags=["UniRL"])
async def unirl_rewards(request: Request) -> dict[str, list[str]]:
    """Return the names of the rewards, for UniRL's client outside its trainer."""
    return {"rewards": request.state.client.rewards}


def _history(media: MediaResolver, request: HistoryRequest) -> Item:
    """Return the last turn as an item; the media of the turns before it are its conditions."""
    last = request.history[-1]
    images: list[str | None] = []
    videos: list[str | None] = []
    for turn in request.history:
        image, video, path = turn.image_b64, turn.video_b64, turn.video_path
        if turn.text != last.text:
            raise RowError("the texts of its history differ, and a reward reads one prompt: send turns of one text")
        if image is None and video is None and path is None:
            raise RowError("a turn of its history has neither an image nor a video")
        if video is not None and path is not None:
            raise RowError("a turn of its history has video_b64 and video_path: send one of them")
        images.append(None if image is None else data_uri(image))
        videos.append(f"file://{quote(path)}" if path is not None else None if video is None else data_uri(video))
    conditions = (tuple(filter(None, images[:-1])), tuple(filter(None, videos[:-1])))
    item = media.item(Sample(last.text, None, images[-1], videos[-1], *conditions))
    return {**item, "metadata": request.metadata} if request.metadata else item


# Flow-Factory --------------------------------------------------------------------------------------------------------

# Its client checks the health once, before training, and retries a request at once after any status from 400 on: an
# error that would repeat is a 200 with its text, and a full queue is waited for.


class ComputeRequest(BaseModel):
    """B samples as columns; an image is base64 of a PNG file, or a data URI of one, a video the list of its frames."""

    prompt: Column[str] = Field(min_length=1)
    response: Column[str] | None = None
    image: Column[str] | None = None
    video: Column[Column[str]] | None = None
    condition_images: Column[Column[str]] | None = None
    condition_videos: Column[Column[Column[str]]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, content: Any) -> Any:
        for key in content if isinstance(content, dict) else ():
            if key not in cls.model_fields and (near := nearest(key, cls.model_fields, 0.7)):
                raise ValueError(f"unknown key {key[:60]} (did you mean {near}?)")
        return content

    @model_validator(mode="after")
    def _check_lengths(self) -> ComputeRequest:
        check_lengths(self.prompt, "prompts", response=self.response, **self.columns())
        return self

    def columns(self) -> dict[str, list[Any]]:
        names = ("image", "video", "condition_images", "condition_videos")
        return {name: column for name in names if (column := getattr(self, name)) is not None}


class ComputeAnswer(BaseModel):
    """Either `rewards` or `error`."""

    rewards: list[float] | None = None
    error: str | None = None


COMPUTE = body_of({"application/json": ComputeRequest.model_json_schema()})


@router.get("/{reward}/health", tags=["Flow-Factory"])
async def health(request: Request, reward: str) -> dict[str, str]:
    """Answer 200 once the reward can be computed, so that a trainer that starts too early fails at its start."""
    gateway = gateway_of(request)
    if not gateway.health(gateway.authorized_reward(request, reward).name).ready:
        raise NotServing(f"the reward {reward} is not loaded yet: see /ready.")
    return {"status": "ok"}


@router.post("/compute", response_model_exclude_none=True, openapi_extra=COMPUTE, tags=["Flow-Factory"])
@router.post("/{reward}/compute", response_model_exclude_none=True, openapi_extra=COMPUTE, tags=["Flow-Factory"])
async def compute(request: Request, reward: str | None = None) -> ComputeAnswer:
    """Return `{"rewards": [number] * B}` in order, or `{"error": text}`; all samples are one group."""
    try:
        body = validated(ComputeRequest, strict_json(await request.body(), gateway_of(request).settings.limits))
        rows, read = range(len(body.prompt)), partial(_sample, body)
        scores = await score_conversations(request, reward, rows, read, noun="sample", group="request")
        return ComputeAnswer(rewards=scores)
    except (UnknownReward, InvalidRequest, TooLarge, RowError, RewardFailed) as error:
        return ComputeAnswer(error=redact_paths(str(error)))


def _sample(body: ComputeRequest, index: int) -> Sample:
    # A sample without conditions has an empty list, which is left out.
    columns = {name: _reference(column[index]) for name, column in body.columns().items() if column[index]}
    response = None if body.response is None else body.response[index]
    return Sample(body.prompt[index], response, **columns)


def _reference(value: Any) -> Any:
    """Return base64, however deep in lists, as data URIs."""
    return data_uri(value) if isinstance(value, str) else tuple(map(_reference, value))
