"""A worker on a node of a Ray cluster: an actor runs its process there and passes on what its channel carries.

Ray places the actor and gives it its share of CPUs and GPUs. Queue, batches, messages and restarts are those of any
other worker, and what passes is bytes that only the service and the worker's process read. Ray is an extra, and is
imported where it is used.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

from anyio.to_thread import run_sync

import vlmrm
from vlmrm.errors import ConfigError
from vlmrm.serving.worker_process import CannotLoad, WorkerDied, WorkerProcess, open_process
from vlmrm.serving.worker_spec import RayPlacement, WorkerSpec

logger = logging.getLogger("vlmrm")

CHUNK_BYTES = 8 * 2**20  # in one call of the actor
PLACED_S = 15.0  # for the cluster, and for a place in it, after which the log says what is waited for
CONNECTING = threading.Lock()


class WorkerActor:
    """A worker's process on the node where Ray has placed this actor."""

    async def start(self, python: str, version: str) -> tuple[int, str]:
        """Start the process by `python`, by default the actor's own, and return its number and its host."""
        if vlmrm.__version__ != version:
            raise ConfigError(f"a node has vlmrm {vlmrm.__version__} and the service {version}: install the same.")
        self._process, channel = await open_process(python or sys.executable)
        self._reader, self._writer = await asyncio.open_connection(sock=channel, limit=CHUNK_BYTES)
        return self._process.pid, socket.gethostname()

    async def write(self, data: bytes) -> None:
        """Pass bytes to the process; none of them at the end, at which it ends too."""
        with suppress(OSError):  # it has ended, as `read` says
            if not data:
                self._writer.close()
                return
            self._writer.write(data)
            await self._writer.drain()

    async def read(self) -> bytes:
        """Return the next bytes from the process; none once it has ended."""
        with suppress(OSError):
            return await self._reader.read(CHUNK_BYTES)
        return b""

    async def wait(self) -> int:
        """Return the status of the process once it has ended."""
        return await self._process.wait()


class ActorProcess:
    """The process of an actor, as `WorkerProcess` looks at one. `lost` is done when the actor dies, not the process.

    Args:
        remote: the end of the channel that the actor's process has in effect.
    """

    def __init__(self, actor: Any, pid: int, remote: socket.socket):
        self.pid, self._actor = pid, actor
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._passing = asyncio.create_task(self._pass(remote))

    async def wait(self) -> int:
        """Return the status of the process once it has ended; -9 where it has ended with its actor."""
        return await asyncio.shield(self._passing)

    def kill(self) -> None:
        """End the actor and its process."""
        import ray

        ray.kill(self._actor)

    async def _pass(self, remote: socket.socket) -> int:
        """Pass on bytes in both directions until the process ends, and return its status."""
        reader, writer = await asyncio.open_connection(sock=remote, limit=CHUNK_BYTES)
        sending = asyncio.create_task(self._send(reader))
        try:
            while data := await self._actor.read.remote():
                writer.write(data)
                await writer.drain()
            return await self._actor.wait.remote()
        except Exception as error:  # of Ray, mostly
            self.lost.set_result(f"was lost with its node or its actor in Ray ({type(error).__name__})")
            return -9
        finally:
            sending.cancel()
            self.kill()
            writer.close()

    async def _send(self, reader: asyncio.StreamReader) -> None:
        from ray.exceptions import RayError

        with suppress(RayError):  # as `_pass` sees too
            while data := await reader.read(CHUNK_BYTES):
                await self._actor.write.remote(data)  # one after another: Ray does not promise the order of others
            await self._actor.write.remote(b"")


class RayWorker(WorkerProcess):
    """A worker with its process on a node of a Ray cluster; `spec.ray` says what it needs there."""

    process: ActorProcess

    def __init__(self, process: Any, *channel: Any):
        super().__init__(process, *channel)
        process.lost.add_done_callback(lambda lost: self.died.done() or self.died.set_result(lost.result()))

    @classmethod
    async def _open(cls, spec: WorkerSpec) -> tuple[Any, socket.socket]:
        assert spec.ray is not None
        import ray
        from ray.exceptions import RayError

        placement = spec.ray
        try:
            connecting = asyncio.ensure_future(run_sync(_connect, placement.address))
            await _say_if_long(connecting, "a worker waits until the Ray cluster at %s answers", placement.address)
            await connecting
            options = {"num_cpus": placement.num_cpus, "num_gpus": placement.num_gpus}
            if placement.runtime_env:
                options["runtime_env"] = placement.runtime_env
            actor: Any = ray.remote(WorkerActor).options(max_restarts=0, **options).remote()
        except (RayError, ConnectionError, ValueError, RuntimeError) as error:
            raise WorkerDied(f"cannot be started by Ray: {_reason(error)}") from error
        try:
            pid, host = await cls._placed(actor, spec, placement)
        except BaseException:
            ray.kill(actor)
            raise
        logger.info("Ray has placed a worker on %s", host)
        local, remote = socket.socketpair()
        return ActorProcess(actor, pid, remote), local

    @staticmethod
    async def _placed(actor: Any, spec: WorkerSpec, placement: RayPlacement) -> tuple[int, str]:
        """Return the number of the actor's process and its host once it is started."""
        from ray.exceptions import RayError

        python = "" if spec.python == sys.executable else spec.python
        starting = asyncio.wrap_future(actor.start.remote(python, vlmrm.__version__).future())
        place = (placement.num_cpus, placement.num_gpus)
        await _say_if_long(starting, "a worker waits until Ray has a place with %g CPUs and %g GPUs for it", *place)
        try:
            return await asyncio.wait_for(starting, spec.load_timeout)
        except TimeoutError:
            raise WorkerDied(f"had no place in Ray's cluster in {spec.load_timeout:g} s") from None
        except (ConfigError, WorkerDied, RayError) as error:
            kind = CannotLoad if isinstance(error, ConfigError) else WorkerDied
            raise kind(f"cannot be started by Ray: {_reason(error)}") from error

    def _kill(self) -> None:
        self.process.kill()


async def _say_if_long(work: asyncio.Future[Any], message: str, *arguments: object) -> None:
    """Wait until work is done, or log what is waited for once that takes long."""
    done, _ = await asyncio.wait({work}, timeout=PLACED_S)
    if not done:
        logger.warning(message, *arguments)


def _connect(address: str) -> None:
    """Join the cluster. In a thread, as otherwise Ray would take the handler of SIGTERM, and nothing would drain."""
    import ray

    with CONNECTING:
        if not ray.is_initialized():
            ray.init(address, namespace="vlmrm", log_to_driver=False, logging_level=logging.ERROR)


def _reason(error: Exception) -> str:
    # What was raised in the actor is its `cause`: the text of the error itself is a traceback with addresses.
    text = str(getattr(error, "cause", error)).strip()
    return text.splitlines()[0] if text else type(error).__name__
