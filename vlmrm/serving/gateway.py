"""The part that the routes of all protocols share: authorization, and the scoring of a request's items."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from anyio import move_on_after
from anyio.to_thread import run_sync
from fastapi import Request

from vlmrm.conversation import Outcome
from vlmrm.errors import RowError
from vlmrm.formats.wire import Item
from vlmrm.serving.backend import EXPIRED, NOT_SERVED, QueueAway, State, Status
from vlmrm.serving.errors import Forbidden, InvalidRequest, RewardFailed, TimedOut
from vlmrm.serving.event_loop import TurnScheduler, computed, current_request, in_thread
from vlmrm.serving.fetch import FetchBudget, Fetcher, fetch_images
from vlmrm.serving.media import MediaResolver
from vlmrm.serving.service import Service, UnknownReward
from vlmrm.serving.settings import RewardSettings
from vlmrm.serving.strict_json import count_text, too_much_text
from vlmrm.serving.tokens import is_allowed, require_token, token_of

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
        self.fetcher = Fetcher(self.settings.allowed_hosts, self.settings.limits)
        self.media = MediaResolver(self.settings.limits, self.settings.media_root, self.fetcher)
        self.scheduler = TurnScheduler()
        self._lines: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by reward, of those that wait for room
        # Where only rewards have tokens, each of them also opens what concerns the whole service.
        rewards = [reward.token for reward in self.settings.reward_args]
        self._tokens = [self.settings.token] if self.settings.token.get_secret_value() else rewards

    def authorized_reward(self, request: Request, name: str | None) -> RewardSettings:
        """Return the reward of that name, if the request's token opens it."""
        try:
            reward = self.service.reward(name)
        except UnknownReward:
            self.require_authorized(request)
            raise
        require_token(token_of(request), [self.settings.token, reward.token])
        return reward

    def require_authorized(self, request: Request) -> None:
        """Raise Unauthorized unless the request's token is the service's."""
        require_token(token_of(request), self._tokens)

    def require_admin(self, request: Request) -> None:
        """Raise Unauthorized unless the request's token is the operator's, Forbidden where there is none."""
        token = self.settings.admin_token
        if not token.get_secret_value():
            raise Forbidden("this service lets nobody change its models: set VLMRM_ADMIN_TOKEN, and send that token.")
        require_token(token_of(request), [token])

    def is_authorized(self, request: Request) -> bool:
        """Return whether the request's token is the service's."""
        return is_allowed(token_of(request), self._tokens)

    def authorized_rewards(self, request: Request) -> list[str]:
        """Return the names of the rewards that the request's token opens; raises Unauthorized for none."""
        token, rewards = token_of(request), self.service.rewards.values()
        names = [reward.name for reward in rewards if is_allowed(token, [self.settings.token, reward.token])]
        if not names:
            require_token(token, self._tokens)
        return names

    def check_count(self, count: int) -> None:
        """Raise InvalidRequest unless a request may have so many items."""
        if not 1 <= count <= self.settings.limits.max_items:
            raise InvalidRequest(f"there are {count} items: send between 1 and {self.settings.limits.max_items}.")

    async def written(self, inputs: Sequence[Input], write: Callable[[Input], Item]) -> list[Item | RowError]:
        """Return the item that `write` makes of each input, or why there is none."""
        if self.media.root is not None:  # files may be large, and long in coming
            items = await run_sync(_write_each, inputs, write)
        else:
            items = await computed(_write_each, inputs, write)
        most = self.settings.limits.max_text_bytes
        # What looks like base64 in the JSON was taken for a medium, and may be a text.
        if current_request().body_bytes > most and await in_thread(count_text, items) > most:
            raise InvalidRequest(too_much_text(most))
        return items

    async def fetch(self, items: Sequence[Item | RowError]) -> list[Item | RowError]:
        """Return the items with their images by URL; one whose image cannot be fetched becomes its error."""
        if not self.fetcher.allowed:
            return list(items)
        budget = FetchBudget(self.settings.limits)
        fetched = await asyncio.gather(*(self._fetch(item, budget) for item in items))
        await self.scheduler.next_turn()
        return fetched

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

        Args:
            patience: seconds to wait for room in a full queue, for clients that do not retry later.
        """
        context = current_request()
        timeout = min(timeout, context.deadline - time.monotonic())
        fetched = await self.fetch(items)
        complete = [item for item in fetched if not isinstance(item, RowError)]
        result = ScoringResult("", [], self.service.info(reward).get("revision"))
        if complete:
            job_id = await self._submit(reward, complete, priority, timeout, patience)
            result = await self._wait(reward, job_id, timeout)
            history = self.service.metrics.history
            history.record_request(reward, time.monotonic() - context.arrived)
            if not self.service.replicas[reward]:  # this process has no batches that would be counted
                history.record_items(reward, len(complete))
        scored = iter(result.outcomes)
        outcomes = [Outcome(error=item.reason) if isinstance(item, RowError) else next(scored) for item in fetched]
        return replace(result, outcomes=outcomes)

    async def _fetch(self, item: Item | RowError, budget: FetchBudget) -> Item | RowError:
        try:
            return item if isinstance(item, RowError) else await fetch_images(item, self.fetcher, budget)
        except RowError as error:
            return error

    async def _wait(self, reward: str, job_id: str, timeout: float) -> ScoringResult:
        try:
            status = await self.service.wait(reward, job_id, timeout)
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
        self.note_revision(reward, status)
        return ScoringResult(job_id, status.outcomes, status.revision)

    def note_revision(self, reward: str, status: Status) -> None:
        """Have the answer's header name the revision that computed a result."""
        if status.revision:
            current_request().revisions[reward] = status.revision

    async def _submit(self, reward: str, items: Sequence[Item], priority: int, timeout: float, patience: float) -> str:
        """Return the id of the items' job; of the requests that wait for room in the queue only the first retries."""
        job = await self.service.job(reward, items, priority)

        async def accept() -> str:
            return await self.service.accept(job, time.monotonic() + timeout)

        line = self._lines[reward]
        if patience:
            if not line.locked():  # nobody waits: try at once
                with suppress(QueueAway):
                    return await accept()
            with move_on_after(patience):
                async with line:
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
