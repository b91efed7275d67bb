"""The part that the routes of all protocols share: authorization, and the scoring of a request's items."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel

from vlmrm.conversation import Conversation, Outcome, Sample
from vlmrm.errors import RowError, VlmrmError, or_error
from vlmrm.formats.wire import Item
from vlmrm.scoring.transforms import sigmoid
from vlmrm.serving.backend import Job, State, Status
from vlmrm.serving.clients import current_request
from vlmrm.serving.errors import InvalidRequest, TooLarge, Unauthorized, UnknownReward
from vlmrm.serving.media import (
    DECODED_PIXELS,
    SLOW_PIXELS,
    Fetcher,
    MediaResolver,
    count_pixels,
    count_prefixes,
    count_text,
    estimate_tokens,
)
from vlmrm.serving.replica import WorkerHealth
from vlmrm.serving.settings import RewardSettings, ServiceSettings
from vlmrm.serving.worker_spec import is_trained

if TYPE_CHECKING:
    from vlmrm.serving.handler import RemoteCore
    from vlmrm.serving.service import Service

Input = TypeVar("Input")


@dataclass(frozen=True)
class ScoringResult:
    """The outcomes of a request's items, in order, the id of their job, and the revision that computed them."""

    job_id: str
    outcomes: list[Outcome]
    revision: str | None


class Gateway:
    """The core as routes see it: with authorization, media, and items scored in one call."""

    def __init__(self, settings: ServiceSettings, core: Service | RemoteCore):
        self.settings, self.core = settings, core
        self.rewards = {reward.name: reward for reward in settings.reward_args}
        self.fetcher = Fetcher(settings.allowed_hosts, settings.limits)
        self.media = MediaResolver(settings.limits, settings.media_root, self.fetcher)

    def health(self, name: str) -> WorkerHealth:
        return self.core.state.rewards[name]

    def info(self, name: str) -> dict[str, Any]:
        """Return what a worker says about its reward; empty before one has loaded."""
        return self.health(name).info

    def reward(self, name: str | None) -> RewardSettings:
        """Return the reward of that name; for None the only one."""
        if name is None and len(self.rewards) == 1:
            return next(iter(self.rewards.values()))
        if name not in self.rewards:
            problem = "a request names no reward" if name is None else f"there is no reward {name}"
            raise UnknownReward(f"{problem}: choose from {', '.join(self.rewards)}.")
        return self.rewards[name]

    def authorized_reward(self, request: Request, name: str | None) -> RewardSettings:
        """Return the reward of that name, if the request's client opens it."""
        try:
            reward = self.reward(name)
        except UnknownReward:
            self.require_authorized(request)
            raise
        if reward.name not in request.state.client.rewards:
            raise Unauthorized
        return reward

    def require_authorized(self, request: Request) -> None:
        """Raise Unauthorized unless the request's client opens the whole service."""
        if not request.state.client.service:
            raise Unauthorized

    def check_count(self, count: int) -> None:
        if not 1 <= count <= self.settings.limits.max_items:
            raise InvalidRequest(f"there are {count} items: send between 1 and {self.settings.limits.max_items}.")

    async def written(self, inputs: Sequence[Input], write: Callable[[Input], Item]) -> list[Item | RowError]:
        """Return the item that `write` makes of each input, with its images by URL fetched, or why there is none."""
        items = [or_error(write, one) for one in inputs]
        if not self.fetcher.allowed:
            return items
        current_request().release()
        return await self.fetcher.fetch(items)

    async def score(
        self,
        reward: str,
        items: Sequence[Item | RowError],
        *,
        priority: int = 0,
        timeout: float = 600.0,
        patience: float = 0.0,
    ) -> ScoringResult:
        """Return the outcomes of the items; the outcome of one that is an error is that.

        With `patience` it waits so many seconds for room in a full queue, for clients that do not retry later.
        """
        context = current_request()
        complete = [item for item in items if not isinstance(item, RowError)]
        job_id, status = "", Status(State.done, [], revision=self.info(reward).get("revision"))
        if complete:
            job = self.job(reward, complete, priority)
            timeout = min(timeout, context.deadline - time.monotonic())
            job_id, status = await self.core.score(job, timeout, patience, context.arrived)
            if status.revision:
                context.revisions[reward] = status.revision
        scored = iter(status.outcomes or ())
        outcomes = [Outcome(error=item.reason) if isinstance(item, RowError) else next(scored) for item in items]
        return ScoringResult(job_id, outcomes, status.revision)

    def job(self, reward: str, items: Sequence[Item], priority: int = 0) -> Job:
        """Return items for a reward as a job; raises TooLarge."""
        request, most = current_request(), self.settings.limits.max_text_bytes
        if request.body_bytes > most and count_text(items) > most:
            text = f"the texts of the request are over the limit max_text_bytes of {most}"
            raise InvalidRequest(f"{text}: send fewer items at a time.")
        trained = is_trained(self.rewards[reward])  # whose scorer computes equal prompts and media once
        limit, max_pixels = self.settings.limits.max_total_pixels, self.info(reward).get("max_pixels")
        pixels, decoded = count_pixels(items, once=trained)
        if pixels > limit:
            what = f"the images and frames of a request are {pixels} pixels"
            raise TooLarge(f"{what}, over the limit max_total_pixels of {limit}: send fewer, or smaller ones.")
        cost, prefixes = count_prefixes(items, max_pixels) if trained else (estimate_tokens(items, max_pixels), {})
        cost += decoded // DECODED_PIXELS
        job = Job.of(reward, items, cost=cost, prefixes=prefixes, priority=priority, slow=decoded > SLOW_PIXELS)
        max_items, max_bytes = self.settings.queue_limits
        if len(items) > max_items or job.size > max_bytes:
            most = f"{max_items} items in {max_bytes} bytes"
            sent = f"a request of {len(items)} items in {job.size} bytes"
            raise TooLarge(f"{sent} is over what the queue can hold, {most}: send fewer at a time.")
        client = request.client
        job.client, job.weight, job.wanted, job.request_id = client.name, client.weight, request.wanted, request.id
        return job


def gateway_of(request: Request) -> Gateway:
    return request.app.state.gateway


# For several protocols -----------------------------------------------------------------------------------------------

PATIENCE_S = 30.0  # that a request waits for room in the queue: these clients retry at once, or not at all
TIMEOUT_S = 600.0

Result = TypeVar("Result")


async def score_conversations(
    request: Request,
    reward: str | None,
    inputs: Sequence[Input],
    read: Callable[[Input], Conversation | Sample],
    *,
    noun: str = "item",
    priority: int = 0,
    group: str | None = None,
) -> list[float]:
    """Return the raw score of the conversation or sample that `read` makes of each input, or raise the first error."""
    gateway = gateway_of(request)
    settings = gateway.authorized_reward(request, reward)
    gateway.check_count(len(inputs))
    items = await gateway.written(inputs, lambda one: gateway.media.item(read(one), group))
    for index, item in enumerate(items):
        if isinstance(item, RowError):
            raise type(item)(f"{noun} {index}: {item.reason}") from item
    result = await gateway.score(settings.name, items, priority=priority, timeout=TIMEOUT_S, patience=PATIENCE_S)
    scores: list[float] = []
    for index, outcome in enumerate(result.outcomes):
        if outcome.score is None:
            raise RowError(f"{noun} {index}: {outcome.error}")
        scores.append(outcome.score)
    return scores


async def gather_rewards(results: Mapping[str, Awaitable[Result]]) -> tuple[dict[str, Result], dict[str, VlmrmError]]:
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


def json_answer(answer: BaseModel) -> Response:
    """Return an answer as a response; FastAPI would check its values once more, 0.1 s for a thousand items."""
    return Response(answer.model_dump_json(), media_type="application/json")


def probability(score: float) -> float:
    return float(sigmoid([score])[0])


def check_lengths(samples: Sized, name: str, **columns: Sized | None) -> None:
    """Raise ValueError unless each column that is sent has a value for each of `samples`; messages say `name`."""
    for column, values in columns.items():
        if values is not None and len(values) != len(samples):
            raise ValueError(f"there are {len(samples)} {name} but {len(values)} of {column}")
