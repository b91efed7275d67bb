"""The process of a worker: its start, its messages and its end."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import time
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from anyio.to_thread import run_sync

from vlmrm.conversation import Outcome
from vlmrm.formats.wire import read_outcome
from vlmrm.libraries import LAUNCHER
from vlmrm.serving.links import Link, LinkLost
from vlmrm.serving.worker_spec import WorkerSpec, revision_of, weights_on_disk

T = TypeVar("T")

WORKER = Path(__file__).parent / "worker"
# Of the environment workers do not get the secrets, nor a launcher's variables: they are no ranks.
SECRETS = ("VLMRM_TOKEN", "VLMRM_ADMIN_TOKEN", "VLMRM_REDIS_PASSWORD", "VLMRM_REDIS_URL")
ENDING_S = 5.0  # to end by itself before it is killed


class WorkerDied(Exception):
    """The process ended, hung, or could not be started; the message continues "the worker ..."."""


class CannotLoad(WorkerDied):
    """The reward's configuration is wrong, so another process would not load it either."""


class RewardRaised(Exception):
    """The reward raised an error; the process goes on."""


class WorkerProcess:
    """A worker's process. Where it `prepares` batches, side by side, it computes them as they are prepared.

    `died` is done once the process is gone, or no longer of use, and whenever WorkerDied is raised.
    """

    def __init__(self, spec: WorkerSpec, process: Process):
        self.spec, self.process = spec, process
        self.revision = ""
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._link = Link(told=self._note)
        self._stages: dict[int, dict[str, asyncio.Future[Any]]] = {}  # of what was sent: whether it is prepared, begun
        self._numbers = itertools.count()
        self._heard: float | None = None  # when it last was alive; None until the reward is loaded
        self._tasks: list[asyncio.Task[None]] = []
        self.info: dict[str, Any] = {}
        self.sleeps = False  # whether `control` knows "sleep" and "wake"
        self.prepares = False
        self.computed: dict[str, float] = {}  # by its own count since it was loaded

    @staticmethod
    async def open(spec: WorkerSpec) -> WorkerProcess:
        """Return a process with a channel that only it and the service have, so that nobody else forges a result."""
        local, remote = socket.socketpair()
        # Options, which may hold secrets, go through the channel and not through the command line.
        with remote:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(spec.python, str(WORKER), str(remote.fileno())),
                    pass_fds=[remote.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    env={name: value for name, value in os.environ.items() if name not in SECRETS + LAUNCHER},
                    start_new_session=True,  # Ctrl-C is the service's to handle
                )
            except OSError as error:
                local.close()
                raise WorkerDied(f"cannot be started: {spec.python}: {error.strerror}") from error
        worker = WorkerProcess(spec, process)
        await asyncio.get_running_loop().create_unix_connection(lambda: worker._link, sock=local)
        worker._tasks = [asyncio.create_task(worker._wait_for_end()), asyncio.create_task(worker._watch())]
        return worker

    @staticmethod
    async def start(spec: WorkerSpec) -> WorkerProcess:
        """Return a worker that has loaded its reward."""
        files = partial(weights_on_disk, spec.options, spec.weights)
        worker = None
        try:
            before = await run_sync(files, abandon_on_cancel=True)
            worker = await WorkerProcess.open(spec)
            start = {"engine": spec.path, "options": spec.options, "path": spec.import_from}
            message = await worker._ask(start, spec.load_timeout, "did not load in time")
            if message["kind"] != "ready":
                error = CannotLoad if message["permanent"] else WorkerDied
                raise error(f"cannot load its reward: {message['error']}")
            worker.info, worker.sleeps, worker.prepares = message["info"], message["sleeps"], message["prepares"]
            content = (spec.path, spec.options, spec.weights, worker.info)
            worker.revision = await run_sync(partial(revision_of, *content), abandon_on_cancel=True)
            if await run_sync(files, abandon_on_cancel=True) != before:  # which of both it has, nobody could say
                raise WorkerDied("cannot load its reward: its weights were written meanwhile")
        except BaseException as error:
            if worker is not None:
                await worker.stop()
            if isinstance(error, OSError):
                reason = f"cannot load its reward: its weights cannot be read ({error.strerror})"
                raise WorkerDied(reason) from error
            raise
        return worker

    async def score(
        self, jobs: Sequence[bytes], timeout: float, requests: Sequence[str], prepared: asyncio.Future[Any]
    ) -> tuple[list[Outcome], float]:
        """Return the outcome of each item of packed jobs, and the seconds of computing; `prepared` is done before."""
        message = {"jobs": list(jobs), "requests": list(requests)}
        response = await self._ask(message, timeout, f"hung for {timeout:g} s", prepared)
        self.computed = response["computed"]
        return list(map(read_outcome, response["outcomes"])), response["seconds"]

    async def control(self, action: str, timeout: float) -> None:
        """Have the reward's method `action` run, between two batches."""
        await self._ask({"control": action}, timeout, f"hung for {timeout:g} s")

    async def stop(self) -> None:
        """End the process, by force where it does not end by itself."""
        for task in self._tasks:
            task.cancel()
        self._link.close()
        try:
            # A process that has died is being killed already; a live one ends when it sees the closed channel, unless
            # it is in the middle of a batch, which nobody waits for.
            await asyncio.wait_for(self.process.wait(), ENDING_S if self.died.done() else 0.5)
        except TimeoutError:
            self._kill()
            await self.process.wait()

    async def _ask(
        self, message: Mapping[str, Any], timeout: float, late: str, prepared: asyncio.Future[Any] | None = None
    ) -> dict[str, Any]:
        """Return the response; kill the process and raise `late` where a step takes over `timeout` seconds."""
        number, loop = next(self._numbers), asyncio.get_running_loop()
        prepared, begun = prepared or loop.create_future(), loop.create_future()
        self._stages[number] = {"prepared": prepared, "begun": begun}
        answer = self._link.ask({**message, "id": number})
        try:
            await self._within(timeout, late, answer, prepared, begun)
            await asyncio.wait({answer, begun}, return_when=asyncio.FIRST_COMPLETED)  # others are computed before
            await self._within(timeout, late, answer)
            if answer.result()["kind"] == "failed":
                raise RewardRaised(answer.result()["error"])
            return answer.result()
        except LinkLost:
            raise WorkerDied(await self.died) from None
        finally:
            answer.cancel()
            del self._stages[number]

    async def _within(self, timeout: float, late: str, *awaited: asyncio.Future[Any]) -> None:
        """Wait until one of these is done; kill the process and raise `late` where that takes over `timeout`."""
        done, _ = await asyncio.wait(awaited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            self._end(late)
            raise WorkerDied(self.died.result())

    def _note(self, message: dict[str, Any]) -> None:
        """Note a sign of life, or that something is prepared or begun."""
        self._heard = time.monotonic()
        if message["kind"] != "beat":
            _settle(self._stages.get(message["id"], {}).get(message["kind"]), None)

    async def _wait_for_end(self) -> None:
        error = await self._link.lost
        if error is None or isinstance(error, OSError):
            code = await self.process.wait()
            _settle(self.died, f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}")
        else:
            self._end(f"sent what is no message ({type(error).__name__})")

    async def _watch(self) -> None:
        """Kill the process once it is silent: one that is stopped or swapped out does not close its channel."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(self.spec.silence / 10)
            if time.monotonic() - before > self.spec.silence / 2:  # this process was stopped itself: heartbeats wait
                continue
            if self._heard is not None and time.monotonic() - self._heard > self.spec.silence:
                self._end(f"was silent for {self.spec.silence:g} s")

    def _end(self, reason: str) -> None:
        """Kill the process for that reason, unless it has died of another."""
        if not self.died.done():
            self._kill()
            self.died.set_result(reason)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.killpg(self.process.pid, signal.SIGKILL)  # with the processes that it started


def _settle(future: asyncio.Future[T] | None, result: T) -> None:
    """Set the result of a future that anybody still waits for."""
    if future is not None and not future.done():
        future.set_result(result)
