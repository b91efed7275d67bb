"""The process of a worker: its start, its messages and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from vlmrm.conversation import Outcome
from vlmrm.formats.wire import Item, read_outcome
from vlmrm.serving.worker.channel import LENGTHS, pack, unpack
from vlmrm.serving.worker_spec import WorkerSpec

T = TypeVar("T")
WORKER = Path(__file__).parent / "worker"
# Secrets of the environment that workers do not get.
SERVICE_VARIABLES = ("VLMRM_TOKEN", "VLMRM_ADMIN_TOKEN", "VLMRM_REDIS_PASSWORD", "VLMRM_REDIS_URL")
ENDING_S = 5.0  # to end by itself before it is killed


class WorkerDied(Exception):
    """The process ended, hung, or could not be started; the message continues "the worker ..."."""


class CannotLoad(WorkerDied):
    """The reward's configuration is wrong, so another process would not load it either."""


class RewardRaised(Exception):
    """The reward raised an error; the process goes on."""


async def open_process(python: str) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """Return a worker's process, started by `python`, and the service's end of its channel."""
    local, remote = socket.socketpair()
    # Only this process and its child have the channel, so that nobody else can forge a result; options, which may
    # hold secrets, go through it and not through the command line.
    with remote:
        try:
            process = await asyncio.create_subprocess_exec(
                *(python, str(WORKER), str(remote.fileno())),
                pass_fds=[remote.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env={name: value for name, value in os.environ.items() if name not in SERVICE_VARIABLES},
                start_new_session=True,  # Ctrl-C is the service's to handle
            )
        except OSError as error:
            local.close()
            raise WorkerDied(f"cannot be started: {python}: {error.strerror}") from error
    return process, local


class WorkerProcess:
    """A worker's process. Use `start`, any number of `score`, then `stop`.

    It computes batches in the order in which they were sent, and prepares the next one meanwhile. `died` is done once
    the process is gone, or no longer of use, and whenever WorkerDied is raised.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        silence: float,
    ):
        self.process, self._reader, self._writer, self._silence = process, reader, writer, silence
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._responses: dict[int, asyncio.Future[dict[str, Any]]] = {}  # by the number of what was sent, in order
        self._begun: dict[int, asyncio.Future[None]] = {}
        self._last_message: float | None = None  # when it came; None until the reward is loaded
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]
        self._number = 0
        self.info: dict[str, Any] = {}
        self.sleeps = False  # whether `control` knows "sleep" and "wake"
        self.computed: dict[str, float] = {}  # by its own count since it was loaded

    @classmethod
    async def start(cls, spec: WorkerSpec) -> WorkerProcess:
        """Return a process that has loaded its reward."""
        process, local = await cls._open(spec)
        reader, writer = await asyncio.open_connection(sock=local)
        worker = cls(process, reader, writer, spec.silence)
        try:
            start = {"engine": spec.path, "options": dict(spec.options), "path": list(spec.import_from)}
            message = await worker._ask(start, spec.load_timeout, "did not load in time")
            if message["kind"] != "ready":
                kind = CannotLoad if message["permanent"] else WorkerDied
                raise kind(f"cannot load its reward: {message['error']}")
        except BaseException:
            await worker.stop()
            raise
        worker.info, worker.sleeps = message["info"], message["sleeps"]
        return worker

    async def score(
        self,
        items: Sequence[Item],
        timeout: float,
        requests: Sequence[str] = (),
        begun: asyncio.Future[None] | None = None,
    ) -> tuple[list[Outcome], float, float]:
        """Return the outcome of each item, and the seconds of computing and of preparing them.

        Args:
            requests: ids of the requests that sent them, for the worker's log.
            begun: is done once their computation begins, where the reward prepares the next items meanwhile.
        """
        message = {"items": list(items), "requests": list(requests)}
        response = await self._ask(message, timeout, f"hung for {timeout:g} s", begun)
        if response["kind"] == "failed":
            raise RewardRaised(response["error"])
        self.computed = response["computed"]
        return list(map(read_outcome, response["outcomes"])), response["seconds"], response["preparing"]

    async def control(self, action: str, timeout: float) -> None:
        """Have the reward's method `action` run, between two batches."""
        response = await self._ask({"control": action}, timeout, f"hung for {timeout:g} s")
        if response["kind"] == "failed":
            raise RewardRaised(response["error"])

    async def stop(self) -> None:
        """End the process, by force where it does not end by itself."""
        for task in self._tasks:
            task.cancel()
        self._writer.close()
        try:
            # A process that has died is being killed already; a live one ends when it sees the closed channel, unless
            # it is in the middle of a batch, which nobody waits for.
            await asyncio.wait_for(self.process.wait(), ENDING_S if self.died.done() else 0.5)
        except TimeoutError:
            self._kill()
            await self.process.wait()

    async def _ask(
        self, message: Mapping[str, Any], timeout: float, late: str, begun: asyncio.Future[None] | None = None
    ) -> dict[str, Any]:
        """Return the response; kill the process and raise `late` `timeout` seconds after the message's turn came."""
        number, earlier = self._number, list(self._responses.values())
        self._number += 1
        response = self._responses[number] = asyncio.get_running_loop().create_future()
        if begun is not None:
            self._begun[number] = begun
        try:
            try:
                self._writer.write(pack({**message, "id": number}))
                await self._writer.drain()
            except OSError as error:
                self._end(f"closed its channel ({error.strerror})")
            for one in earlier:
                await asyncio.wait({one, self.died}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({response, self.died}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if response.done():
                return response.result()
            self._end(late)
            raise WorkerDied(self.died.result())
        finally:
            self._begun.pop(number, None)
            if response.done() or self.died.done():
                del self._responses[number]

    @classmethod
    async def _open(cls, spec: WorkerSpec) -> tuple[asyncio.subprocess.Process, socket.socket]:
        """Return a process that has started, and this end of its channel."""
        return await open_process(spec.python)

    async def _listen(self) -> None:
        try:
            while True:
                lengths = await self._reader.readexactly(LENGTHS.size)
                message = unpack(lengths + await self._reader.readexactly(sum(LENGTHS.unpack(lengths))))
                self._last_message = time.monotonic()
                if message["kind"] == "begun":
                    _settle(self._begun.get(message["id"]), None)
                elif message["kind"] != "beat":
                    _settle(self._responses.get(message["id"]), message)
        except (asyncio.IncompleteReadError, OSError):
            code = await self.process.wait()
            _settle(self.died, f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}")
        except Exception as error:
            self._end(f"sent what is no message ({type(error).__name__})")

    async def _watch(self) -> None:
        """Kill the process once it is silent: one that is stopped or swapped out does not close its channel."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(self._silence / 10)
            if time.monotonic() - before > self._silence / 2:  # this process was stopped itself: heartbeats wait
                continue
            if self._last_message is not None and time.monotonic() - self._last_message > self._silence:
                self._end(f"was silent for {self._silence:g} s")

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
