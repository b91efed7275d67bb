"""Scoring for several protocols: of all items or none, for those without room for an item's error, or by reward."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence, Sized
from dataclasses import replace
from typing import TypeVar

from fastapi import Request, Response
from pydantic import BaseModel

from vlmrm.conversation import Conversation, Sample
from vlmrm.errors import RowError, VlmrmError
from vlmrm.formats.wire import Item, write_item
from vlmrm.scoring.transforms import sigmoid
from vlmrm.serving.gateway import Gateway, gateway_of
from vlmrm.serving.media import MediaResolver
from vlmrm.serving.settings import RewardSettings

PATIENCE_S = 30.0  # that a request waits for room in the queue: these clients retry at once, or not at all
TIMEOUT_S = 600.0

Input = TypeVar("Input")
Result = TypeVar("Result")


async def score_conversations(
    request: Request,
    reward: str | None,
    inputs: Sequence[Input],
    read: Callable[[Input], Conversation],
    *,
    priority: int = 0,
) -> list[float]:
    """Return the raw score of the conversation that `read` makes of each input."""
    gateway = gateway_of(request)
    settings = gateway.authorized_reward(request, reward)
    return await score_inputs(
        gateway, settings, inputs, lambda one: write_item(gateway.media.conversation(read(one))), priority=priority
    )


async def score_inputs(
    gateway: Gateway,
    reward: RewardSettings,
    inputs: Sequence[Input],
    write: Callable[[Input], Item],
    *,
    noun: str = "item",
    priority: int = 0,
) -> list[float]:
    """Return the raw score of the item that `write` makes of each input; raises as `score_conversations` does."""
    gateway.check_count(len(inputs))
    items = await gateway.written(inputs, write)
    for index, item in enumerate(items):
        if isinstance(item, RowError):
            raise type(item)(f"{noun} {index}: {item.reason}") from item
    result = await gateway.score(reward.name, items, priority=priority, timeout=TIMEOUT_S, patience=PATIENCE_S)
    scores: list[float] = []
    for index, outcome in enumerate(result.outcomes):
        if outcome.score is None:
            raise RowError(f"{noun} {index}: {outcome.error}")
        scores.append(outcome.score)
    return scores


async def gather_rewards(
    results: Mapping[str, Awaitable[Result]],
) -> tuple[dict[str, Result], dict[str, VlmrmError]]:
    """Return the results of rewards, and the errors of those that failed: one failure ends no other."""
    found: dict[str, Result] = {}
    errors: dict[str, VlmrmError] = {}

    async def attempt(name: str) -> None:
        try:
            found[name] = await results[name]
        except VlmrmError as error:
            errors[name] = error

    await asyncio.gather(*map(attempt, results))
    if errors and not found:
        raise next(iter(errors.values()))
    return found, errors


def media_read(media: MediaResolver, sample: Sample) -> Sample:
    """Return the sample with its media as bytes, their headers checked; raises RowError naming what is refused."""
    return replace(
        sample,
        image=None if sample.image is None else media.image(sample.image),
        video=None if sample.video is None else media.video(sample.video),
        condition_images=tuple(map(media.image, sample.condition_images)),
        condition_videos=tuple(map(media.video, sample.condition_videos)),
    )


def json_answer(answer: BaseModel) -> Response:
    """Return an answer as a response; FastAPI would check its values once more, 0.1 s for a thousand items."""
    return Response(answer.model_dump_json(), media_type="application/json")


def probability(score: float) -> float:
    """Return σ(score)."""
    return float(sigmoid([score])[0])


def check_lengths(samples: Sized, name: str, **columns: Sized | None) -> None:
    """Raise ValueError unless each column that is sent has a value for each of `samples`; messages say `name`."""
    for column, values in columns.items():
        if values is not None and len(values) != len(samples):
            raise ValueError(f"there are {len(samples)} {name} but {len(values)} of {column}")
