"""One worker of a reward: its loading, and the loop that keeps its process running and feeds it from the queue."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from anyio.to_thread import run_sync

from vlmrm.conversation import Outcome
from vlmrm.errors import RowError
from vlmrm.formats.wire import Item
from vlmrm.serving.backend import NOT_SERVED, Backend, Job
from vlmrm.serving.fair_queue import RecentPrefixes, tokens_of
from vlmrm.serving.telemetry import Metrics, trace_batch
from vlmrm.serving.worker_process import CannotLoad, RewardRaised, WorkerDied, WorkerProcess
from vlmrm.serving.worker_spec import WorkerSpec, digest, revision_of, weights_on_disk

if TYPE_CHECKING:
    from vlmrm.serving.decoding import Decoder


logger = logging.getLogger("vlmrm")

BACKOFF_S = (0.5, 60.0)  # before another process is started: the first time, at most
QUIET_S = 0.01  # without a further job, after which those that came together are begun
GATHERING_S = 0.1  # for which a batch waits for further jobs, at most
RECENT = 8  # batches; while one of them had several jobs, the next waits for further jobs


@dataclass(frozen=True)
class Candidate:
    """A worker that has loaded its reward, and does not serve yet."""

    spec: WorkerSpec
    worker: WorkerProcess
    revision: str

    @classmethod
    async def load(cls, spec: WorkerSpec) -> Candidate:
        """Return a worker of `spec`; raises as `WorkerProcess.start`."""
        worker = None
        files = partial(weights_on_disk, spec.options, spec.weights)
        try:
            before = await run_sync(files, abandon_on_cancel=True)
            worker = await _worker_class(spec).start(spec)
            content = (spec.path, spec.options, spec.weights, worker.info)
            revision = await run_sync(partial(revision_of, *content), abandon_on_cancel=True)
            if await run_sync(files, abandon_on_cancel=True) != before:  # which of both it has, nobody could say
                raise WorkerDied("cannot load its reward: its weights were written meanwhile")
        except BaseException as error:
            if worker is not None:
                await worker.stop()
            if isinstance(error, OSError):
                reason = f"cannot load its reward: its weights cannot be read ({error.strerror})"
                raise WorkerDied(reason) from error
            raise
        return cls(spec, worker, revision)


def _worker_class(spec: WorkerSpec) -> type[WorkerProcess]:
    if spec.ray is None:
        return WorkerProcess
    from vlmrm.serving.ray_worker import RayWorker

    return RayWorker


class Replica:
    """One worker of `reward`, kept running and fed by `run`.

    `ready` is set while it is loaded, `error` says why it cannot be, and `lost` that no restart will help, because its
    configuration is wrong.

    Args:
        decoder: of items with latents; without one, latents go to the worker.
    """

    def __init__(
        self, reward: str, spec: WorkerSpec, backend: Backend, metrics: Metrics, decoder: Decoder | None = None
    ):
        self.reward, self.spec, self.backend, self.metrics = reward, spec, backend, metrics
        self.decoder = decoder
        self.ready = False
        self.asleep = False  # set it before `run` to begin so
        self.lost = False
        self.closing = False  # set it to end after what the worker has been given
        self.error: str | None = None
        self.refusal: str | None = None  # why it did not change to the model that was wanted last
        self.restarts = 0
        self.info: dict[str, Any] = {}
        self._worker: WorkerProcess | None = None
        self.model_revision = ""  # without the decoder's
        self._turns: deque[tuple[Callable[[], Awaitable[None]], asyncio.Future[None]]] = deque()
        self._turn_comes = asyncio.Event()
        self._ended = False
        self._taken = 0  # batches that are not finished
        self._counted: dict[str, float] = {}  # of what the worker computed, what the metrics have
        self._spare = 0.0  # seconds of computing the current batch in which the next need not be prepared
        self._spares: deque[float] = deque(maxlen=RECENT)  # of the last batches, a token
        self._sizes = deque([RECENT], maxlen=RECENT)  # jobs of the last batches
        self._recent = RecentPrefixes()
        self.process_id: int | None = None

    @property
    def revision(self) -> str:
        """Return the digest of all that its scores depend on, the decoder included; "" before it has loaded."""
        if not self.model_revision or self.decoder is None:
            return self.model_revision
        return digest(self.model_revision, self.decoder.replica.revision)

    @property
    def busy(self) -> bool:
        """Whether it has a batch that is not finished."""
        return self._taken > 0

    async def run(self) -> None:
        """Keep a worker running and fed, until cancelled, `closing`, or `lost`; while `asleep` there may be none."""
        pause = 0.0
        try:
            while not self.closing:
                try:
                    await self._rest(pause)
                    if self._worker is None and not self.asleep:
                        self._use(await Candidate.load(self.spec))
                    pause = 0.0
                    await self._feed()
                except CannotLoad as error:
                    if self.model_revision:  # it could be loaded before, and may be again
                        pause = self._note_failure(error, pause)
                        continue
                    self.lost = True
                    self.error = f"the worker of {self.reward} {error}"
                    logger.error("%s; correct its configuration and start the service again", self.error.rstrip("."))
                    return
                except Exception as error:
                    pause = self._note_failure(error, pause)
                finally:
                    await self._end_worker()
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

    async def _end_worker(self) -> None:
        self.ready = False
        worker, self._worker = self._worker, None
        if worker is not None:
            await self._stop(worker)

    async def _stop(self, worker: WorkerProcess) -> None:
        """End a worker; should that fail, log it, so that another can take its place."""
        try:
            await worker.stop()
        except Exception:
            logger.exception("a worker of %s may run on: it could not be stopped", self.reward)

    async def fail_waiting(self) -> None:
        """Fail the jobs that wait, or the next that come, as no worker of this reward will load."""
        for job in await self.backend.take(self.reward, self.spec.budget):
            await self.backend.fail(job, f"{self.error}".rstrip("."))

    # Between batches -------------------------------------------------------------------------------------------------

    async def switch(self, candidate: Candidate) -> None:
        """Have `candidate` compute all further batches, and end the worker that did; returns once it does."""
        await self._take_turn(partial(self._put_in_place, candidate))

    async def sleep(self) -> None:
        """Free the worker's memory of the accelerator, and begin no batch until `wake`; jobs wait.

        Where the reward has no method for that, or it fails, the worker ends. Raises as `switch`.
        """
        await self._take_turn(self._sleep)

    async def wake(self) -> None:
        """End a `sleep`."""
        await self._take_turn(self._wake)

    async def _take_turn(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` while no batch runs."""
        if self._ended:
            raise WorkerDied("has ended")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append((work, done))
        self._turn_comes.set()
        await done

    async def _run_turns(self) -> None:
        """Do what waits until no batch runs."""
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

    async def _put_in_place(self, candidate: Candidate) -> None:
        old = self._worker
        self._use(candidate)
        if old is not None:
            await self._stop(old)
        if self.asleep:
            await self._free()

    async def _sleep(self) -> None:
        if not self.asleep:
            self.asleep, self.error = True, None
            await self._free()

    async def _free(self) -> None:
        """Free the worker's memory of the accelerator."""
        self._recent.clear()
        if not (self._worker is not None and self._worker.sleeps and await self._control("sleep")):
            await self._end_worker()

    async def _wake(self) -> None:
        if self.asleep:
            self.asleep = False
            if self._worker is None or not await self._control("wake"):
                await self._end_worker()
                self._use(await Candidate.load(self.spec))

    async def _control(self, action: str) -> bool:
        """Return whether the worker has done so."""
        assert self._worker is not None
        try:
            await self._worker.control(action, self.spec.load_timeout)
        except (RewardRaised, WorkerDied) as error:
            logger.error("the worker of %s ends, as it cannot %s: %s", self.reward, action, error)
            return False
        return True

    def _use(self, candidate: Candidate) -> None:
        """Have the worker of `candidate` compute what comes next."""
        self.spec, self._worker, self.model_revision = candidate.spec, candidate.worker, candidate.revision
        self._recent.clear()
        self._spares.clear()
        self._counted = {}
        self.info, self.error, self.ready = candidate.worker.info, None, True
        self.refusal = None
        self.process_id = candidate.worker.process.pid
        logger.info("the worker of %s is ready (process %d)", self.reward, self.process_id)

    # Batches ---------------------------------------------------------------------------------------------------------

    async def _feed(self) -> None:
        """Run batches until `closing`. While a worker that prepares computes one, the next is taken, and no other.

        It is taken just in time to be prepared: until then more may come that share computation, or go first.
        """
        batches: list[asyncio.Task[None]] = []
        try:
            while not self.closing:
                if self._turns or self.asleep:
                    while batches:
                        await batches.pop(0)
                    await self._run_turns()
                    if self.asleep:
                        await self._wait(self._worker)
                        continue
                assert self._worker is not None
                begun = asyncio.get_running_loop().create_future()
                batches.append(asyncio.create_task(self._run_batch(self._worker, begun, *batches)))
                await asyncio.wait({batches[-1], begun}, return_when=asyncio.FIRST_COMPLETED)
                for batch in batches[:-1]:
                    await batch
                del batches[:-1]
                await asyncio.wait(batches, timeout=self._spare)
            for batch in batches:
                await batch
        except WorkerDied:
            raise  # all of them learn of it
        except BaseException:
            for batch in batches:
                batch.cancel()
            raise
        finally:
            await asyncio.gather(*batches, return_exceptions=True)

    async def _run_batch(
        self, worker: WorkerProcess, begun: asyncio.Future[None] | None = None, *before: asyncio.Task[None]
    ) -> None:
        """Take one batch from the queue, score it and store its results; none where something else has its turn.

        Args:
            begun: is done once the next batch may be taken.
            before: the batches that the worker still has.
        """
        jobs = await self._take(worker, self.spec.budget)
        if not jobs:
            return
        self._taken += 1
        sent = False
        try:
            if jobs[0].attempts:  # it may harm those that the worker has as well
                begun = None
                await asyncio.gather(*before, return_exceptions=True)
            await self._gather(worker, jobs)
            if worker.died.done():
                raise WorkerDied(worker.died.result())
            if self.closing and before:  # they were taken beside the last batch
                await self.backend.requeue(jobs, None)
                return
            sent = True
            self._recent.add(jobs)
            taken = time.time()
            self.metrics.record_waits(self.reward, [max(0.0, taken - job.created) for job in jobs])
            outcomes, seconds = await self._score(worker, jobs, begun)
            self.metrics.record_batch(self.reward, outcomes, seconds)
            trace_batch(jobs, taken, time.time() - seconds, time.time())
            # One list of outcomes, in the order of the jobs.
            ends = itertools.accumulate(len(job.items) for job in jobs)
            parts = [(job, outcomes[end - len(job.items) : end]) for job, end in zip(jobs, ends, strict=True)]
            await asyncio.gather(*(self.backend.finish(job, part, seconds, self.revision) for job, part in parts))
        except RewardRaised as error:
            # One job's items may have failed the whole batch: each job is tried alone before its request fails.
            if len(jobs) == 1:
                await self.backend.fail(jobs[0], str(error))
            else:
                await self.backend.requeue(jobs, f"the reward {self.reward} failed ({error})")
        except WorkerDied as error:
            await self.backend.requeue(jobs, f"the worker of {self.reward} {error}" if sent else None)
            raise
        except asyncio.CancelledError:
            await self.backend.requeue(jobs, None)
            raise
        except Exception as error:
            # It may be what these jobs bring about: they are tried once more, each alone.
            await self.backend.requeue(
                jobs, f"the service failed at a batch of {self.reward} ({type(error).__name__})"
            )
            raise
        finally:
            self._taken -= 1

    async def _take(self, worker: WorkerProcess, budget: int, patience: float | None = None) -> list[Job]:
        """Return the next jobs, of `budget` tokens; none where a turn, or the end of `patience`, comes before."""
        taking = asyncio.ensure_future(self.backend.take(self.reward, budget, list(self._recent)))
        try:
            await self._wait(worker, taking, patience=patience)
            if taking.done():
                return await self._served(taking.result())
            taking.cancel()
            return []
        except BaseException:
            # Jobs may have been taken just as the worker died or this task was cancelled.
            if taking.done() and not taking.cancelled():
                await self.backend.requeue(taking.result(), None)
            taking.cancel()
            raise

    async def _served(self, jobs: list[Job]) -> list[Job]:
        """Return the jobs that this revision may compute, and fail the others."""
        refused = [job for job in jobs if job.wanted not in ("", self.revision)]
        for job in refused:
            await self.backend.fail(job, NOT_SERVED)
        return [job for job in jobs if job not in refused] if refused else jobs

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

    async def _gather(self, worker: WorkerProcess, jobs: list[Job]) -> None:
        """Add jobs that come right after `jobs` and may share computation, such as the candidates of a group.

        A client that sends one request at a time waits for none of this: its batches had one job lately.
        """
        end = time.monotonic() + GATHERING_S
        while max(self._sizes) > 1 and not jobs[0].attempts:
            budget = self.spec.budget - tokens_of(jobs)
            quiet = max(0.0, time.time() - max(job.created for job in jobs))
            patience = min(QUIET_S - quiet, end - time.monotonic())
            if budget <= 0 or patience <= 0:
                break
            more = await self._take(worker, budget, patience)
            if not more:
                break
            # It must come alone, or does not fit.
            if more[0].attempts or tokens_of([*jobs, *more]) > self.spec.budget:
                await self.backend.requeue(more, None)
                break
            jobs += more
        self._sizes.append(len(jobs))

    async def _score(
        self, worker: WorkerProcess, jobs: Sequence[Job], begun: asyncio.Future[None] | None
    ) -> tuple[list[Outcome], float]:
        """Return the outcome of each item, and the seconds of computing; those of decoding are in outcomes."""
        items, requests = _items(jobs), [job.request_id for job in jobs if job.request_id]
        decoded = [] if self.decoder is None else await self.decoder.decode(items)
        if decoded:
            items = [result.item for result in decoded if not isinstance(result, RowError)]
        outcomes, seconds = [], 0.0
        if items:
            tokens = max(1, tokens_of(jobs))
            self._spare = max(0.0, tokens * min(self._spares, default=0.0) - GATHERING_S)
            outcomes, seconds, preparing = await worker.score(items, self.spec.batch_timeout, requests, begun)
            self.metrics.compute_seconds.labels(self.reward).inc(seconds)
            self.metrics.record_computed(self.reward, self._counted, worker.computed)
            self._counted = worker.computed
            self._spares.append((seconds - 2 * preparing) / tokens)
        if not decoded:
            return outcomes, seconds
        scored = iter(outcomes)
        return [
            Outcome(error=result.reason)
            if isinstance(result, RowError)
            else replace(next(scored), decode_seconds=result.seconds)
            for result in decoded
        ], seconds


def _items(jobs: Sequence[Job]) -> list[Item]:
    """Return the items of all jobs, with the number of the job in `group`: requests may use the same names."""
    return [
        item if item.get("group") is None else {**item, "group": f"{number}: {item['group']!r}"}
        for number, job in enumerate(jobs)
        for item in job.items
    ]
