"""Keep the queue and the results in Redis, shared by any number of API processes and worker hosts."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import defaultdict
from collections.abc import Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from vlmrm.conversation import Outcome
from vlmrm.formats.wire import read_outcome, write_outcome
from vlmrm.serving import backend
from vlmrm.serving.backend import (
    CANCELLED,
    EXPIRED,
    GIVEN_UP,
    MAX_ATTEMPTS,
    Job,
    Overloaded,
    QueueAway,
    State,
    Status,
    has_errors,
)
from vlmrm.serving.event_loop import repeat
from vlmrm.serving.redis_connection import RedisConnection
from vlmrm.serving.settings import Limits
from vlmrm.serving.worker.channel import pack, unpack

T = TypeVar("T")

STOPPING_S = 2.0  # for returning jobs that were taken and not begun
PATIENCE_S = 3.0  # that a request waits for a Redis that is away before it is refused
POLL_S = 5.0  # between two looks at the queue, in case a message was lost


class RedisBackend:
    """A `Backend` of several processes; `redis_queue.lua` describes the keys in Redis.

    A job is in Redis before its request is told that it is accepted. While Redis is away, results are held until it
    takes them, and requests are refused with `QueueAway` after `PATIENCE_S`.

    A process without a sign of life for `silence` seconds loses the jobs that it took: they are queued again, which
    counts as an attempt of each, as the death of a worker does.
    """

    persistent = True

    def __init__(self, connection: RedisConnection, limits: Limits, rewards: Mapping[str, tuple[int, int]]):
        self._limits, self._capacity = limits, rewards
        self.errors: dict[str, str] = {}
        self._silence = limits.silence
        self._connection = connection
        self._ttl = _milliseconds(limits.result_ttl)
        self._ending = (MAX_ATTEMPTS, GIVEN_UP, CANCELLED, self._ttl)  # of jobs that are given back
        self._held: dict[str, str] = {}  # jobs that this process took and has not finished, by receipt
        self._queued: dict[str, asyncio.Event] = {}  # by reward
        self._finished: dict[str, set[asyncio.Event]] = defaultdict(set)  # by job, an event for each waiting request
        self._rewards: set[str] = set()  # that workers of this process compute
        self._loops: list[asyncio.Task[None]] = []
        self._takes: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        loops = (
            self._connection.listen(self._on_message, self._wake_all, "come", "over"),
            repeat("claiming what its workers compute", self._renew, self._silence / 4, self.errors),
        )
        self._loops = [asyncio.create_task(loop) for loop in loops]

    async def stop(self) -> None:
        if self._takes:  # jobs that were taken and not begun are returned
            await asyncio.wait(self._takes, timeout=STOPPING_S)
        running = {*self._loops, *self._takes}
        while running:  # redis-py may swallow a cancellation while it connects
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=0.1)
        await self._connection.client.aclose()

    # Requests --------------------------------------------------------------------------------------------------------

    async def put(self, job: Job) -> str:
        ttl = "" if job.deadline is None else job.deadline - time.monotonic()  # Redis counts by its own clock
        content = (job.id, job.key, job.reward, job.packed, len(job.items), job.cost, job.priority, ttl)
        origin = (
            " ".join(job.revisions),
            json.dumps(list(job.prefixes.items())),
            job.client,
            job.request_id,
            job.wanted,
            job.trace,
        )
        bounds = (*self._capacity[job.reward], self._limits.queue_bytes)
        accepted, *reply = await self._connection.accept(*content, *bounds, self._ttl, *origin, patience=PATIENCE_S)
        if not accepted:
            items, size, total, pace = reply
            raise Overloaded.of(job.reward, items, size, total, float(pace))
        return reply[0].decode()

    async def status(self, job_id: str) -> Status | None:
        names = ("state", "outcomes", "error", "seconds", "revision")
        state, outcomes, error, seconds, revision = await self._fields(f"job:{job_id}", *names)
        if state is None:
            return None
        return Status(
            State(state.decode()),
            None if outcomes is None else list(map(read_outcome, unpack(outcomes))),
            None if error is None else error.decode(),
            None if seconds is None else float(seconds),
            None if revision is None else revision.decode(),
        )

    async def wait(self, job_id: str, timeout: float) -> Status | None:
        end = time.monotonic() + timeout
        finished = asyncio.Event()
        self._finished[job_id].add(finished)
        try:
            while True:
                finished.clear()
                remaining = end - time.monotonic()
                try:
                    status = await self.status(job_id)
                except QueueAway:
                    if remaining <= 0:
                        raise
                    continue  # the job goes on without this process
                if status is None or status.finished or remaining <= 0:
                    return status
                await _wait_event(finished, min(remaining, POLL_S))
        finally:
            self._finished[job_id].discard(finished)
            if not self._finished[job_id]:
                del self._finished[job_id]

    async def cancel(self, job_id: str) -> bool:
        return bool(await self._connection.run("cancel", job_id, CANCELLED, self._ttl, patience=PATIENCE_S))

    async def unfetched(self) -> Mapping[str, int]:
        return {}  # any other process can return what is in Redis

    async def depth(self, reward: str) -> tuple[int, int]:
        jobs, size = await self._fields("waiting", f"jobs:{reward}", f"bytes:{reward}")
        return int(jobs or 0), int(size or 0)

    async def _fields(self, key: str, *names: str) -> Any:
        client, key = self._connection.client, f"{self._connection.prefix}:{key}"
        return await self._connection.retry(lambda: client.hmget(key, list(names)), PATIENCE_S)

    # Workers ---------------------------------------------------------------------------------------------------------

    async def take(self, reward: str, budget: int, cached: Collection[str] = ()) -> list[Job]:
        self._rewards.add(reward)
        while True:
            queued = self._queued.setdefault(reward, asyncio.Event())  # a new one after each message
            taking = self._spawn(self._take(reward, budget, cached))
            try:
                if jobs := await asyncio.shield(taking):
                    return jobs
            except asyncio.CancelledError:
                # Redis may have handed out jobs already: the script runs to its end, and they are returned.
                self._spawn(self._undo(taking))
                raise
            await _wait_event(queued, POLL_S)

    async def _take(self, reward: str, budget: int, cached: Collection[str]) -> list[Job]:
        token = uuid.uuid4().hex  # with which a retry gets what the first try has taken
        arguments = (reward, budget, token, self._ttl, EXPIRED, backend.AGING_S, json.dumps(list(cached)))
        jobs = []
        for reply in await self._connection.run("take", *arguments, patience=None):
            job_id, receipt, packed, cost, priority, attempts, created, *origin = reply
            prefixes, client, request_id, wanted, trace = (text.decode() for text in origin)
            job = Job(
                reward,
                unpack(packed)["items"],
                cost=int(cost),
                prefixes=dict(json.loads(prefixes)),
                priority=int(priority),
                client=client,
                request_id=request_id,
                wanted=wanted,
                trace=trace,
                id=job_id.decode(),
                created=float(created),
                attempts=int(attempts),
                packed=packed,
                receipt=receipt.decode(),
            )
            self._held[job.receipt] = job.id
            jobs.append(job)
        return jobs

    async def _undo(self, taking: asyncio.Task[list[Job]]) -> None:
        await self.requeue(await taking, None)

    async def finish(self, job: Job, outcomes: Sequence[Outcome], seconds: float, revision: str) -> None:
        shared = "" if has_errors(outcomes) else revision
        packed = pack(list(map(write_outcome, outcomes)))
        await self._release("finish", job, packed, seconds, revision, shared, self._ttl)

    async def fail(self, job: Job, error: str) -> None:
        await self._release("fail", job, job.receipt, error, self._ttl)

    async def requeue(self, jobs: Sequence[Job], blame: str | None) -> None:
        for job in jobs:
            await self._release("give_back", job, job.receipt, blame or "", *self._ending)

    async def _release(self, operation: str, job: Job, *arguments: str | bytes | float) -> None:
        try:
            await self._connection.run(operation, job.id, *arguments, patience=None)
        finally:  # were it refused, others would have the job once its claim is over
            self._held.pop(job.receipt, None)

    # All processes ---------------------------------------------------------------------------------------------------

    async def save_record(self, name: str, record: dict[str, Any], ttl: float) -> None:
        await self._connection.run("keep", name, json.dumps(record), _milliseconds(ttl), patience=PATIENCE_S)

    async def load_record(self, name: str) -> dict[str, Any] | None:
        record = await self._connection.run("kept", name, patience=PATIENCE_S)
        return None if record is None else json.loads(record)

    async def announce(self, process: str, health: dict[str, Any], ttl: float) -> None:
        await self._connection.run("announce", process, json.dumps(health), ttl, patience=0)

    async def announcements(self) -> dict[str, dict[str, Any]]:
        flat = await self._connection.run("announced", patience=0)
        return {process.decode(): json.loads(health) for process, health in zip(flat[::2], flat[1::2], strict=True)}

    def _on_message(self, channel: str, name: str) -> None:
        """Wake what waits for a job of the reward `name`, or for the end of the job `name`."""
        queued = self._queued.pop(name, None) if channel == "come" else None
        for event in [queued] if queued is not None else self._finished.get(name, ()):
            event.set()

    def _wake_all(self) -> None:
        """Wake everything that waits: messages may have been missed while Redis was away."""
        for reward in list(self._queued):
            self._on_message("come", reward)
        for job_id in list(self._finished):
            self._on_message("over", job_id)

    async def _renew(self) -> None:
        """Renew the claims of this process on its jobs, and queue again those of processes that are silent."""
        for receipt, job_id in list(self._held.items()):
            await self._connection.run("renew", job_id, receipt, patience=None)
        # After an outage of Redis all processes seem silent: they are given time to come back.
        if time.monotonic() - self._connection.last_failure < self._silence:
            return
        blame = f"the host of its worker was silent for {self._silence:g} s"
        for reward in list(self._rewards):
            with suppress(QueueAway):  # until the next round
                await self._connection.run("reclaim", reward, self._silence, blame, *self._ending, patience=0)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._takes.add(task)
        task.add_done_callback(self._takes.discard)
        return task


def _milliseconds(ttl: float) -> int:
    return max(1000, round(1000 * ttl))  # at least a second, in which waiting requests read the result


async def _wait_event(event: asyncio.Event, seconds: float) -> None:
    # Not wait_for: before Python 3.12 it swallows a cancellation that comes with the event, and a cancelled `take`
    # would take jobs.
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiting}, timeout=seconds)
    finally:
        waiting.cancel()
