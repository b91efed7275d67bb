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
from typing import Any

from vlmrm.conversation import Outcome
from vlmrm.formats.wire import Item, read_outcome
from vlmrm.serving.worker.channel import LENGTHS, pack, unpack
from vlmrm.serving.worker_spec import WorkerSpec

WORKER = Path(__file__).parent / "worker"
SERVICE_VARIABLES = (  # secrets of the environment that workers do not get
    *("VLMRM_TOKEN", "VLMRM_ADMIN_TOKEN"),
    *("VLMRM_REDIS_PASSWORD", "VLMRM_REDIS_SENTINEL_PASSWORD"),
)
ENDING_S = 5.0  # to end by itself before it is killed


class WorkerDied(Exception):
    """The process ended, hung, or could not be started; the message continues "the worker ..."."""


class CannotLoad(WorkerDied):
    """The reward's configuration is wrong, so another process would not load it either."""


class RewardRaised(Exception):
    """The reward raised an error; the process goes on."""


async def open_process(python: str) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """Return a worker's process, started by `python`, and the service's end of its channel.

    Raises:
        WorkerDied: when it cannot be started.
    """
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
    """A worker's process. Use `start`, any number of `score` one after another, then `stop`.

    `died` is done once the process is gone.
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
        self._responses: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._last_message: float | None = None  # when it came; None until the reward is loaded
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]
        self._number = 0
        self.info: dict[str, Any] = {}
        self.computed: dict[str, float] = {}  # by its own count since it was loaded

    @classmethod
    async def start(cls, spec: WorkerSpec) -> WorkerProcess:
        """Return a process that has loaded its reward.

        Raises:
            WorkerDied: when it cannot be started, or has not loaded in `load_timeout` seconds.
            CannotLoad: when its configuration is wrong.
        """
        process, local = await cls._open(spec)
        reader, writer = await asyncio.open_connection(sock=local)
        worker = cls(process, reader, writer, spec.silence)
        try:
            await worker._send({"engine": spec.path, "options": dict(spec.options), "path": list(spec.import_from)})
            message = await worker._response(spec.load_timeout, "did not load in time")
            if message["kind"] != "ready":
                kind = CannotLoad if message["permanent"] else WorkerDied
                raise kind(f"cannot load its reward: {message['error']}")
        except BaseException:
            await worker.stop()
            raise
        worker.info = message["info"]
        return worker

    async def score(self, items: Sequence[Item], timeout: float, requests: Sequence[str] = ()) -> list[Outcome]:
        """Return the outcome of each item.

        Args:
            requests: ids of the requests that sent them, for the worker's log.

        Raises:
            RewardRaised: with what it raised.
            WorkerDied: when the process ends, or takes longer than `timeout` seconds and is killed.
        """
        self._number += 1
        await self._send({"id": self._number, "items": list(items), "requests": list(requests)})
        response = await self._response(timeout, f"hung for {timeout:g} s")
        if response["kind"] == "failed":
            raise RewardRaised(response["error"])
        self.computed = response["computed"]
        return list(map(read_outcome, response["outcomes"]))

    async def control(self, action: str, timeout: float) -> None:
        """Have the reward's method `action` run, between two batches.

        Raises:
            RewardRaised: with what it raised, also where there is no such method.
            WorkerDied: as `score`.
        """
        self._number += 1
        await self._send({"id": self._number, "control": action})
        response = await self._response(timeout, f"hung for {timeout:g} s")
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

    async def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._writer.write(pack(message))
            await self._writer.drain()
        except OSError as error:
            raise WorkerDied(f"closed its channel ({error.strerror})") from error

    async def _response(self, timeout: float, late: str) -> dict[str, Any]:
        """Return the next message that is no heartbeat; after `timeout` seconds kill the process and raise `late`."""
        response = asyncio.ensure_future(self._responses.get())
        done, _ = await asyncio.wait({response, self.died}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if response in done:
            return response.result()
        response.cancel()
        if self.died not in done:
            self._kill()
            raise WorkerDied(late)
        raise WorkerDied(self.died.result())

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
                if message["kind"] != "beat":
                    self._responses.put_nowait(message)
        except (asyncio.IncompleteReadError, OSError):
            code = await self.process.wait()
            self._set_died(f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}")

    async def _watch(self) -> None:
        """Kill the process once it is silent: one that is stopped or swapped out does not close its channel."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(self._silence / 10)
            if time.monotonic() - before > self._silence / 2:  # this process was stopped itself: heartbeats wait
                continue
            if self._last_message is not None and time.monotonic() - self._last_message > self._silence:
                self._kill()
                self._set_died(f"was silent for {self._silence:g} s")

    def _set_died(self, reason: str) -> None:
        if not self.died.done():
            self.died.set_result(reason)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.killpg(self.process.pid, signal.SIGKILL)  # with the processes that it started
