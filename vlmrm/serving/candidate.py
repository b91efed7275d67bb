"""A worker that has loaded its reward, and the revision that it has loaded, before it serves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from anyio.to_thread import run_sync

from vlmrm.serving.revision import revision_of, weights_on_disk
from vlmrm.serving.worker_process import WorkerDied, WorkerProcess
from vlmrm.serving.worker_spec import WorkerSpec


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
