"""The part that the routes of all protocols share: authorization, and the scoring of a request's items."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from anyio import move_on_after
from anyio.to_thread import run_sync
from fastapi import Request, Response
from pydantic import BaseModel

from vlmrm.conversation import Conversation, Outcome, Sample
from vlmrm.errors import RowError, VlmrmError
from vlmrm.formats.wire import Item
from vlmrm.scoring.transforms import sigmoid
from vlmrm.serving.backend import EXPIRED, NOT_SERVED, QueueAway, State, Status
from vlmrm.serving.clients import Client, Clients
from vlmrm.serving.errors import Forbidden, InvalidRequest, RewardFailed, TimedOut, Unauthorized
from vlmrm.serving.event_loop import TurnScheduler, computed, current_request, in_thread
from vlmrm.serving.media import Fetcher, MediaResolver
from vlmrm.serving.service import Service, UnknownReward
from vlmrm.serving.settings import RewardSettings
from vlmrm.serving.strict_json import count_text, too_much_text

RETRY_S = 0.02  # between two tries to put a job into a full queue

Input = TypeVar("Input")


@dataclass(frozen=True)
class ScoringResult:
    """The outcomes of a request's items, in order, the id of their job, and the revision that computed them."""

    job_id: str
    outcomes: list[Outcome]
    revision: str | None


class Gateway:
    """The service as routes see it: with authorization, media, and items scored in one call."""

    def __init__(self, service: Service):
        self.service = service
        self.settings = service.settings
        self.clients = Clients(self.settings)
        self.fetcher = Fetcher(self.settings.allowed_hosts, self.settings.limits)
        self.media = MediaResolver(self.settings.limits, self.settings.media_root, self.fetcher)
        self.scheduler = TurnScheduler()
        self._lines: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by reward, of those that wait for room

    def authorized_reward(self, request: Request, name: str | None) -> RewardSettings:
        """Return the reward of that name, if the request's client opens it."""
        try:
            reward = self.service.reward(name)
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

    def require_admin(self, client: Client) -> None:
        """Raise Unauthorized unless a client is the operator, Forbidden where nobody is."""
        if not self.settings.admin_token.get_secret_value():
            raise Forbidden("this service lets nobody change its models: set VLMRM_ADMIN_TOKEN, and send that token.")
        if not client.admin:
            raise Unauthorized

    def check_count(self, count: int) -> None:
        if not 1 <= count <= self.settings.limits.max_items:
            raise InvalidRequest(f"there are {count} items: send between 1 and {self.settings.limits.max_items}.")

    async def written(self, inputs: Sequence[Input], write: Callable[[Input], Item]) -> list[Item | RowError]:
        """Return the item that `write` makes of each input, with its images by URL fetched, or why there is none."""
        if self.media.root is not None:  # files may be large, and long in coming
            items = await run_sync(_write_each, inputs, write)
        else:
            items = await computed(_write_each, inputs, write)
        most = self.settings.limits.max_text_bytes
        # What looks like base64 in the JSON was taken for a medium, and may be a text.
        if current_request().body_bytes > most and await in_thread(count_text, items) > most:
            raise InvalidRequest(too_much_text(most))
        if self.fetcher.allowed:
            items = await self.fetcher.fetch(items)
            await self.scheduler.next_turn()
        return items

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
        timeout = min(timeout, context.deadline - time.monotonic())
        complete = [item for item in items if not isinstance(item, RowError)]
        job_id, status = "", Status(State.done, [], revision=self.service.info(reward).get("revision"))
        if complete:
            job_id = await self._submit(reward, complete, priority, timeout, patience)
            status = await self._wait(reward, job_id, timeout)
            history = self.service.metrics.history
            history.record_request(reward, time.monotonic() - context.arrived)
            if not self.service.replicas[reward]:  # this process has no batches that would be counted
                history.minute(reward).items += len(complete)
        scored = iter(status.outcomes or ())
        outcomes = [Outcome(error=item.reason) if isinstance(item, RowError) else next(scored) for item in items]
        return ScoringResult(job_id, outcomes, status.revision)

    async def _wait(self, reward: str, job_id: str, timeout: float) -> Status:
        try:
            status = await self.service.backend.wait(job_id, timeout)
            await self.scheduler.next_turn(scored=True)
        except asyncio.CancelledError:
            await self.service.backend.cancel(job_id)  # the client has disconnected
            raise
        if status is None or not status.finished or status.error == EXPIRED:
            await self.service.backend.cancel(job_id)
            late = f"was not computed in {timeout:g} s: ask again, with a longer timeout."
            problem = "keeps no result of this any more: ask again." if status is None else late
            self.service.metrics.record_failure(reward, "timeout", problem)
            raise TimedOut(f"the reward {reward} {problem}")
        if status.error == NOT_SERVED:
            raise self.service.not_served(reward)
        if status.state is not State.done or status.outcomes is None:
            self.service.metrics.record_failure(reward, "job", f"{status.error}")
            raise RewardFailed(f"the reward {reward} could not be computed: {status.error}.")
        if status.revision:
            current_request().revisions[reward] = status.revision
        return status

    async def _submit(self, reward: str, items: Sequence[Item], priority: int, timeout: float, patience: float) -> str:
        """Return the id of the items' job; of the requests that wait for room in the queue only the first retries."""
        job = await self.service.job(reward, items, priority)

        async def accept() -> str:
            return await self.service.accept(job, time.monotonic() + timeout)

        if patience:
            with move_on_after(patience):
                async with self._lines[reward]:
                    while True:
                        with suppress(QueueAway):
                            return await accept()
                        await asyncio.sleep(RETRY_S)
        try:
            return await accept()
        except QueueAway as error:
            self.service.metrics.record_failure(reward, "refused", str(error))
            raise


def _write_each(inputs: Sequence[Input], write: Callable[[Input], Item]) -> list[Item | RowError]:
    items: list[Item | RowError] = []
    for content in inputs:
        try:
            items.append(write(content))
        except RowError as error:
            items.append(error)
    return items


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
