"""A worker's process as the service sees it: started over a private channel, asked for scores, known to be dead."""

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

WORKER = Path(__file__).parent / "worker"
OWN = ("VLMRM_TOKEN", "VLMRM_REDIS_PASSWORD")  # variables that are no business of a reward's code
ENDING_S = 5.0  # to end by itself before it is killed


class WorkerDied(Exception):
    """The process ended, hung, or could not be started; the message goes on "the worker ..."."""


class CannotLoad(WorkerDied):
    """The reward's configuration cannot work, so another process would not load it either."""


class RewardRaised(Exception):
    """The reward itself raised an error; the process goes on."""


class WorkerProcess:
    """Use `start`, any number of `score` one after another, then `stop`. `died` is done once the process is gone."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        silence: float,
    ):
        self.process, self._reader, self._writer, self._silence = process, reader, writer, silence
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._heard: float | None = None  # when it last said something, once it is loaded
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]
        self._number = 0
        self.info: dict[str, Any] = {}

    @classmethod
    async def start(
        cls,
        python: str,
        engine: str,
        options: Mapping[str, Any],
        *,
        path: Sequence[str] = (),
        timeout: float,
        silence: float = 30.0,
    ) -> WorkerProcess:
        """A process that has loaded its reward.

        Args:
            engine: dotted path of the class that scores, made with `options`; looked for in `path`, too.
            silence: seconds without a beat after which it counts as dead.

        Raises:
            WorkerDied: when it cannot be started or loaded in `timeout` seconds.
            CannotLoad: when it never can, because of its configuration.
        """
        ours, theirs = socket.socketpair()
        # Only this process and its child have the channel, so that nobody else can forge a result; options, which may
        # hold secrets, go through it and not through the command line.
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(python, str(WORKER), str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    env={name: value for name, value in os.environ.items() if name not in OWN},
                    start_new_session=True,  # Ctrl-C is the service's to handle
                )
            except OSError as error:
                ours.close()
                raise WorkerDied(f"cannot be started: {python}: {error.strerror}") from error
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = cls(process, reader, writer, silence)
        try:
            await worker._send({"engine": engine, "options": dict(options), "path": list(path)})
            message = await worker._answer(timeout, "did not load in time")
            if message["kind"] != "ready":
                raise (CannotLoad if message["lasting"] else WorkerDied)(f"cannot load its reward: {message['error']}")
        except BaseException:
            await worker.stop()
            raise
        worker.info = message["info"]
        return worker

    async def score(self, items: Sequence[Item], timeout: float) -> list[Outcome]:
        """The outcome of each item.

        Raises:
            RewardRaised: with what it raised.
            WorkerDied: when the process ends, or takes longer than `timeout` seconds and is killed.
        """
        self._number += 1
        await self._send({"id": self._number, "items": list(items)})
        answer = await self._answer(timeout, f"hung for {timeout:g} s")
        if answer["kind"] == "failed":
            raise RewardRaised(answer["error"])
        return list(map(read_outcome, answer["outcomes"]))

    async def stop(self) -> None:
        """Ends the process, by force where it does not go by itself."""
        for task in self._tasks:
            task.cancel()
        self._writer.close()
        try:
            await asyncio.wait_for(self.process.wait(), ENDING_S if self.died.done() else 0.5)
        except TimeoutError:
            _kill(self.process)
            await self.process.wait()

    async def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._writer.write(pack(message))
            await self._writer.drain()
        except OSError as error:
            raise WorkerDied(f"closed its channel ({error.strerror})") from error

    async def _answer(self, timeout: float, late: str) -> dict[str, Any]:
        """The next message that is no beat."""
        answer = asyncio.ensure_future(self._answers.get())
        done, _ = await asyncio.wait({answer, self.died}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if answer in done:
            return answer.result()
        answer.cancel()
        if self.died not in done:
            _kill(self.process)
            raise WorkerDied(late)
        raise WorkerDied(self.died.result())

    async def _listen(self) -> None:
        try:
            while True:
                lengths = await self._reader.readexactly(LENGTHS.size)
                message = unpack(lengths + await self._reader.readexactly(sum(LENGTHS.unpack(lengths))))
                self._heard = time.monotonic()
                if message["kind"] != "beat":
                    self._answers.put_nowait(message)
        except (asyncio.IncompleteReadError, OSError):
            code = await self.process.wait()
            self._die(f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}")

    async def _watch(self) -> None:
        """A process that is stopped or swapped out does not close its channel, but it is silent."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(self._silence / 10)
            if time.monotonic() - before > self._silence / 2:  # it was this process that was stopped: beats wait
                continue
            if self._heard is not None and time.monotonic() - self._heard > self._silence:
                _kill(self.process)
                self._die(f"was silent for {self._silence:g} s")

    def _die(self, how: str) -> None:
        if not self.died.done():
            self.died.set_result(how)


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):  # it was faster
        os.killpg(process.pid, signal.SIGKILL)  # and what it has started
