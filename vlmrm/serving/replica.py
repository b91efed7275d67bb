"""The workers of rewards: each is loaded, kept running and fed from the queue, and its health is announced."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import socket
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cachetools import LRUCache

from vlmrm.conversation import Outcome
from vlmrm.errors import RowError
from vlmrm.formats.wire import Item
from vlmrm.serving.backend import NOT_SERVED, Job, QueueAway, queues
from vlmrm.serving.memory_backend import tokens_of
from vlmrm.serving.telemetry import Metrics
from vlmrm.serving.worker.channel import pack, redact_paths, unpack
from vlmrm.serving.worker_process import CannotLoad, RewardRaised, WorkerDied, WorkerProcess
from vlmrm.serving.worker_spec import WorkerSpec, digest

if TYPE_CHECKING:
    from vlmrm.serving.backend import Backend
    from vlmrm.serving.service import Decoder

logger = logging.getLogger("vlmrm")

BACKOFF_S = (0.5, 60.0)  # before another process is started: the first time, at most
QUIET_S = 0.01  # without a further job, after which those that came together are begun
GATHERING_S = 0.1  # for which a batch waits for further jobs, at most
PREFIXES = 256  # that a worker is thought to keep
RECENT = 8  # batches; while one of them had several jobs, the next waits for further jobs
AT_ONCE = 2  # batches of a queue that a worker has: it computes one and prepares the other
PLACES = 2 * AT_ONCE  # for batches in a worker


class Replica:
    """One worker of `reward`, kept running and fed by `run`; without a `decoder` latents go to the worker.

    `ready` is set while it is loaded, `error` says why it cannot be, and `lost` that no restart will help.
    """

    def __init__(
        self, reward: str, spec: WorkerSpec, backend: Backend, metrics: Metrics, decoder: Decoder | None = None
    ):
        self.reward, self.spec, self.backend, self.metrics = reward, spec, backend, metrics
        self.decoder = decoder
        self.ready = False
        self.asleep = False
        self.lost = False
        self.closing = False  # set it to end after what the worker has been given
        self.error: str | None = None
        self.restarts = 0
        self.info: dict[str, Any] = {}
        self._worker: WorkerProcess | None = None
        self.model_revision = ""  # without the decoder's
        self._turns: deque[tuple[Callable[[], Awaitable[None]], asyncio.Future[None]]] = deque()
        self._turn_comes = asyncio.Event()
        self._ended = False
        self.busy = 0  # batches that are not finished
        self._counted: dict[str, float] = {}  # of what the worker computed, what the metrics have
        self._entering = asyncio.Lock()  # of a batch that waits for its places in the worker
        self._places = asyncio.Semaphore(PLACES)
        self._sizes = deque([RECENT], maxlen=RECENT)  # jobs of the last batches
        self._recent: LRUCache[str, None] = LRUCache(PREFIXES)  # of the jobs that it was given last
        self.process_id: int | None = None

    @property
    def revision(self) -> str:
        """Return the digest of all that its scores depend on, the decoder included; "" before it has loaded."""
        if not self.model_revision or self.decoder is None:
            return self.model_revision
        return digest(self.model_revision, self.decoder.replica.revision)

    async def run(self) -> None:
        """Keep a worker running and fed, until cancelled, `closing`, or `lost`; while `asleep` there may be none."""
        pause = 0.0
        try:
            while not self.closing:
                try:
                    await self._rest(pause)
                    if self._worker is None and not self.asleep:
                        self._use(await WorkerProcess.start(self.spec))
                    pause = 0.0
                    await self._feed()
                except Exception as error:
                    # What could be loaded before may be again.
                    if isinstance(error, CannotLoad) and not self.model_revision:
                        self.lost, self.error = True, f"the worker of {self.reward} {error}"
                        logger.error(
                            "%s; correct its configuration and start the service again", self.error.rstrip(".")
                        )
                        return
                    pause = self._note_failure(error, pause)
                finally:
                    await self._end_worker(self._worker)
        except Exception as error:  # of what is done about errors: requests fail rather than wait for ever
            self.lost = True
            self.error = f"the worker of {self.reward} is not fed any more ({type(error).__name__})"
            logger.exception("%s: restart the service", self.error)
        finally:
            self._ended = True
            for _, done in self._turns:
                if not done.done():
                    done.set_exception(WorkerDied("has ended"))

    async def _rest(self, seconds: float) -> None:
        """Wait before another worker is started, unless one is put in its place, or it shall sleep."""
        end = time.monotonic() + seconds * random.uniform(1, 1.5)  # replicas that died together do not load in step
        while self._worker is None and not self.asleep and (left := end - time.monotonic()) > 0:
            await self._wait(None, patience=left)
            await self._run_turns()

    def _note_failure(self, error: Exception, pause: float) -> float:
        """Count a worker that died, or could not be loaded; return after how many seconds another is started."""
        pause = min(2 * pause or BACKOFF_S[0], BACKOFF_S[1])
        fault = not isinstance(error, WorkerDied)
        reason = f"is stopped by a fault of the service ({type(error).__name__})" if fault else str(error)
        message = f"the worker of {self.reward} {reason}"
        # While a worker that had loaded restarts, requests wait; while one cannot load, they are refused.
        self.error = message if self._worker is None and not self.asleep else None
        self.metrics.restarts.labels(self.reward).inc()
        self.restarts += 1
        again = "once it is woken" if self.asleep else f"in {pause:.1f} s"
        logger.error("%s; another is started %s", message.rstrip("."), again, exc_info=fault)
        return pause

    async def _end_worker(self, worker: WorkerProcess | None) -> None:
        """End a worker; should that fail, log it, so that another can take its place."""
        if worker is self._worker:
            self._worker, self.ready = None, False
        try:
            if worker is not None:
                await worker.stop()
        except Exception:
            logger.exception("a worker of %s may run on: it could not be stopped", self.reward)

    async def fail_waiting(self) -> None:
        """Fail the jobs that wait and all that come, as no worker of this reward will load."""

        async def fail(queue: str) -> None:
            while True:
                for job in await self.backend.take(queue, self.spec.budget):
                    await self.backend.fail(job, f"{self.error}".rstrip("."))

        await asyncio.gather(*map(fail, queues(self.reward)))

    async def switch(self, worker: WorkerProcess) -> None:
        """Have `worker` compute all further batches, and end the one that did; returns once it does."""
        await self._take_turn(partial(self._put_in_place, worker))

    async def sleep(self, asleep: bool) -> None:
        """Free the accelerator's memory, by the worker's end where it has no method for it, until it is woken."""
        await self._take_turn(partial(self._sleep, asleep))

    async def _take_turn(self, work: Callable[[], Awaitable[None]]) -> None:
        if self._ended:
            raise WorkerDied("has ended")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append((work, done))
        self._turn_comes.set()
        await done

    async def _run_turns(self) -> None:
        while self._turns:
            work, done = self._turns.popleft()
            try:
                await work()
            except BaseException as error:
                if not done.done():
                    done.set_exception(error if isinstance(error, Exception) else WorkerDied("is being stopped"))
                raise
            if not done.done():
                done.set_result(None)
        self._turn_comes.clear()

    async def _put_in_place(self, worker: WorkerProcess) -> None:
        old = self._worker
        self._use(worker)
        await self._end_worker(old)
        if self.asleep:
            await self._free()

    async def _sleep(self, asleep: bool) -> None:
        before, self.asleep = self.asleep, asleep
        if asleep and not before:
            self.error = None
            await self._free()
        elif before and not asleep and not await self._control("wake"):
            await self._end_worker(self._worker)
            self._use(await WorkerProcess.start(self.spec))

    async def _free(self) -> None:
        self._recent.clear()
        if not await self._control("sleep"):
            await self._end_worker(self._worker)

    async def _control(self, action: str) -> bool:
        """Return whether there is a worker that has done so."""
        if self._worker is None or not self._worker.sleeps:
            return False
        try:
            await self._worker.control(action, self.spec.load_timeout)
        except (RewardRaised, WorkerDied) as error:
            logger.error("the worker of %s ends, as it cannot %s: %s", self.reward, action, error)
            return False
        return True

    def _use(self, worker: WorkerProcess) -> None:
        self.spec, self._worker, self.model_revision = worker.spec, worker, worker.revision
        self._recent.clear()
        self._counted = {}
        self.info, self.error, self.ready = worker.info, None, True
        self.process_id = worker.process.pid
        logger.info("the worker of %s is ready (process %d)", self.reward, self.process_id)

    async def _feed(self) -> None:
        """Run batches until `closing`, of both queues side by side: what is quick to prepare overtakes the rest."""
        while not self.closing:
            await self._run_turns()
            if self.asleep:
                await self._wait(self._worker)
                continue
            assert self._worker is not None
            lines = [(queue, asyncio.Lock()) for queue in queues(self.reward)]
            runs = [asyncio.create_task(self._run_batches(self._worker, *line)) for line in AT_ONCE * lines]
            try:
                await asyncio.gather(*runs)
            except BaseException as error:
                for run in () if isinstance(error, WorkerDied) else runs:  # of its death all of them learn
                    run.cancel()
                raise
            finally:
                await asyncio.gather(*runs, return_exceptions=True)

    async def _run_batches(self, worker: WorkerProcess, queue: str, preparing: asyncio.Lock) -> None:
        """Run batches of a queue until a turn comes or `closing`, each taken when that before it is prepared."""
        while True:
            prepared = asyncio.get_running_loop().create_future()
            await preparing.acquire()
            prepared.add_done_callback(lambda _: preparing.release())
            try:
                if self._turns or self.closing:
                    return
                await self._run_batch(worker, queue, prepared)
            finally:
                if not prepared.done():
                    prepared.set_result(None)

    async def _run_batch(self, worker: WorkerProcess, queue: str, prepared: asyncio.Future[Any]) -> None:
        """Score one batch of the queue; `prepared` is done once the next may be taken."""
        jobs = await self._take(worker, queue, self.spec.budget)
        if not jobs:
            return
        self.busy += 1
        sent, places = False, AsyncExitStack()
        try:
            async with self._entering:
                # All for one that may harm others, or that they would keep waiting in the worker.
                for _ in range(PLACES if jobs[0].attempts or not worker.prepares else 1):
                    await places.enter_async_context(self._places)
            await self._gather(worker, queue, jobs)
            if worker.died.done():
                raise WorkerDied(worker.died.result())
            if self.closing:
                await self.backend.requeue(jobs, None)
                return
            sent = True
            self._recent.update(dict.fromkeys(prefix for job in jobs for prefix in job.prefixes))
            taken = time.time()
            for job in jobs:
                self.metrics.latency.labels(self.reward, "waiting").observe(max(0.0, taken - job.created))
            outcomes, seconds = await self._score(worker, jobs, prepared)
            self.metrics.record_batch(self.reward, outcomes, seconds)
            # One list of outcomes, in the order of the jobs.
            ends = itertools.accumulate(job.count for job in jobs)
            parts = [(job, outcomes[end - job.count : end]) for job, end in zip(jobs, ends, strict=True)]
            await asyncio.gather(*(self.backend.finish(job, part, seconds, self.revision) for job, part in parts))
        except RewardRaised as error:
            # One job's items may have failed the whole batch: each job is tried alone before its request fails.
            if len(jobs) == 1:
                await self.backend.fail(jobs[0], str(error))
            else:
                await self.backend.requeue(jobs, f"the reward {self.reward} failed ({error})")
        except BaseException as error:  # which these jobs may have brought about: they are tried once more, each alone
            blame = f"the service failed at a batch of {self.reward} ({type(error).__name__})"
            if isinstance(error, WorkerDied):
                blame = f"the worker of {self.reward} {error}" if sent else None
            await self.backend.requeue(jobs, None if isinstance(error, asyncio.CancelledError) else blame)
            raise
        finally:
            self.busy -= 1
            await places.aclose()

    async def _take(self, worker: WorkerProcess, queue: str, budget: int, patience: float | None = None) -> list[Job]:
        """Return the next jobs, of `budget` tokens; none where a turn, or the end of `patience`, comes before."""
        taking = asyncio.ensure_future(self.backend.take(queue, budget, list(self._recent)))
        try:
            await self._wait(worker, taking, patience=patience)
            if taking.done():
                jobs = taking.result()
                for job in (refused := [job for job in jobs if job.wanted not in ("", self.revision)]):
                    await self.backend.fail(job, NOT_SERVED)
                return [job for job in jobs if job not in refused] if refused else jobs
            taking.cancel()
            return []
        except BaseException:
            # Jobs may have been taken just as the worker died or this task was cancelled.
            if taking.done() and not taking.cancelled():
                await self.backend.requeue(taking.result(), None)
            taking.cancel()
            raise

    async def _wait(
        self, worker: WorkerProcess | None, *others: asyncio.Future[Any], patience: float | None = None
    ) -> None:
        """Wait until one of `others` is done, a turn comes, or so many seconds are over."""
        turn = asyncio.ensure_future(self._turn_comes.wait())
        try:
            died = set() if worker is None else {worker.died}
            await asyncio.wait({*others, *died, turn}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        finally:
            turn.cancel()
        if worker is not None and worker.died.done():
            raise WorkerDied(worker.died.result())

    async def _gather(self, worker: WorkerProcess, queue: str, jobs: list[Job]) -> None:
        """Add jobs that come right after `jobs`, such as a group's; who sends one request at a time waits for none."""
        end = time.monotonic() + GATHERING_S
        while max(self._sizes) > 1 and not jobs[0].attempts:
            budget = self.spec.budget - tokens_of(jobs)
            quiet = max(0.0, time.time() - max(job.created for job in jobs))
            patience = min(QUIET_S - quiet, end - time.monotonic())
            if budget <= 0 or patience <= 0:
                break
            more = await self._take(worker, queue, budget, patience)
            if not more:
                break
            # It must come alone, or does not fit.
            if more[0].attempts or tokens_of([*jobs, *more]) > self.spec.budget:
                await self.backend.requeue(more, None)
                break
            jobs += more
        self._sizes.append(len(jobs))

    async def _score(
        self, worker: WorkerProcess, jobs: Sequence[Job], prepared: asyncio.Future[Any]
    ) -> tuple[list[Outcome], float]:
        """Return the outcome of each item, and the seconds of computing; those of decoding are in outcomes."""
        packed, requests = [job.packed for job in jobs], [job.request_id for job in jobs if job.request_id]
        decoded: list[tuple[Item, float] | RowError] = []
        if self.decoder is not None:
            rows = await asyncio.gather(*(self.decoder.decode(unpack(one)["items"]) for one in packed))
            packed = [pack({"items": [it[0] for it in row if not isinstance(it, RowError)]}) for row in rows]
            decoded = list(itertools.chain(*rows))
        outcomes, seconds = [], 0.0
        if not decoded or not all(isinstance(it, RowError) for it in decoded):
            outcomes, seconds = await worker.score(packed, self.spec.batch_timeout, requests, prepared)
            self.metrics.compute_seconds.labels(self.reward).inc(seconds)
            for what, count in worker.computed.items():
                self.metrics.computed.labels(self.reward, what).inc(max(0.0, count - self._counted.get(what, 0.0)))
            self._counted = worker.computed
        if not decoded:
            return outcomes, seconds
        scored = iter(outcomes)
        return [
            Outcome(error=it.reason) if isinstance(it, RowError) else replace(next(scored), decode_seconds=it[1])
            for it in decoded
        ], seconds


# Their health --------------------------------------------------------------------------------------------------------


@dataclass
class WorkerHealth:
    """The health of one reward's workers: how many there are, are ready, asleep, and failing to load.

    `info` is what one of them says about its reward; `revisions` are those of loaded workers.
    """

    workers: int = 0
    ready: int = 0
    asleep: int = 0
    failing: int = 0
    restarts: int = 0  # since their processes started
    errors: list[str] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    revisions: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, replica: Replica) -> WorkerHealth:
        return cls(
            workers=1,
            ready=int(replica.ready and not replica.asleep),
            asleep=int(replica.asleep),
            failing=int(replica.error is not None and not replica.ready),
            restarts=replica.restarts,
            errors=[redact_paths(replica.error)] if replica.error else [],
            info={**replica.info, "revision": replica.revision} if replica.revision else {},
            revisions=[replica.revision] if replica.revision and (replica.ready or replica.asleep) else [],
        )

    @classmethod
    def read(cls, announced: Mapping[str, Any]) -> WorkerHealth:
        """Read what a process announced; in a rolling update it may be of another version of vlmrm."""
        return cls(**{name: value for name, value in announced.items() if name in cls.__dataclass_fields__})

    @classmethod
    def merge(cls, parts: Iterable[WorkerHealth]) -> WorkerHealth:
        parts = list(parts)
        counts = ("workers", "ready", "asleep", "failing", "restarts")
        return cls(
            **{name: sum(getattr(part, name) for part in parts) for name in counts},
            errors=sorted({error for part in parts for error in part.errors}),
            info=next((part.info for part in parts if part.info), {}),
            revisions=sorted({revision for part in parts for revision in part.revisions}),
        )

    @property
    def unavailable(self) -> bool:
        """Return whether there are workers, and none of them can load."""
        return 0 < self.workers == self.failing


class WorkerRegistry:
    """The health of all workers, kept up to date by rounds of `update`; `error` says why it is not."""

    def __init__(self, backend: Backend, replicas: Mapping[str, Sequence[Replica]], silence: float):
        self.error: str | None = None
        self._name = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._backend, self._replicas, self._silence = backend, replicas, silence
        self._remote: list[dict[str, WorkerHealth]] = []  # of each other process, by reward

    def health(self, reward: str) -> WorkerHealth:
        """Return the health of a reward's workers in all processes, in this one as of now."""
        local = map(WorkerHealth.of, self._replicas.get(reward, []))
        return WorkerHealth.merge([*local, *(rewards[reward] for rewards in self._remote if reward in rewards)])

    async def update(self) -> None:
        try:
            await self.announce()
            await self.refresh()
            self.error = None
        except QueueAway as error:  # what was announced last stays valid meanwhile
            self.error = str(error)

    async def announce(self) -> None:
        """Tell other processes of this one's workers; raises QueueAway."""
        rewards = {
            name: asdict(WorkerHealth.merge(map(WorkerHealth.of, replicas)))
            for name, replicas in self._replicas.items()
            if replicas
        }
        if rewards:
            await self._backend.announce(self._name, rewards, self._silence)

    async def refresh(self) -> None:
        """Read what other processes announced; raises QueueAway."""
        announcements = await self._backend.announcements()
        self._remote = [
            {name: WorkerHealth.read(health) for name, health in rewards.items()}
            for process, rewards in announcements.items()
            if process != self._name
        ]

    async def unregister(self) -> None:
        """Announce that this process has no workers any more."""
        with suppress(QueueAway):  # its silence will tell
            await self._backend.announce(self._name, {}, 0)
