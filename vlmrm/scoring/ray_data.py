"""Offline scoring on a Ray cluster: Ray Data hands missing shards to workers that keep the model loaded.

The shards are the files that one process writes, so either can continue the other's job. Input, model and output must
be reachable from every worker: on a shared file system, or the hub for input and model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmrm.errors import ConfigError, VlmrmError
from vlmrm.libraries import needs
from vlmrm.scoring.offline import OfflineJob, ShardScoring, Summary, TableRows


class ShardWorker:
    """A Ray actor that loads the model and opens the input once."""

    def __init__(self, job: OfflineJob):
        self.scoring = ShardScoring(job, job.load_scorer(), job.open_rows())

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.scoring.write(batch["shard"].tolist())
        return batch


def score_on_ray(job: OfflineJob, workers: int) -> Summary | None:
    """Score as `score_offline` does, on `workers` actors of the cluster, each with a GPU where the cluster has any.

    The cluster is that of RAY_ADDRESS or, without it, this machine.
    """
    with needs("ray", "scoring on Ray"):
        import ray
        import ray.data
        import ray.exceptions
    job = _with_absolute_paths(job)
    rows = job.open_rows()
    if not isinstance(rows, TableRows):
        raise ConfigError("Ray workers read rows by number, which a stream does not allow: leave out streaming.")
    shards = job.shards
    missing = [{"shard": number} for number in range(shards.count(len(rows))) if not shards.is_done(number)]
    if missing:
        ray.init(ignore_reinit_error=True, log_to_driver=False)
        scored = ray.data.from_items(missing).map_batches(
            ShardWorker,
            fn_constructor_args=(job,),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=workers),
            num_gpus=1 if ray.cluster_resources().get("GPU") else 0,
        )
        try:
            for _ in scored.iter_batches(batch_size=None):
                pass
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]  # of the worker's traceback
            raise VlmrmError(
                f"a Ray worker failed ({reason}): fix that, and run again for the missing shards."
            ) from error
    return shards.summary(len(rows))


def _with_absolute_paths(job: OfflineJob) -> OfflineJob:
    """Return the job with absolute paths: workers start in other folders."""

    def absolute(path: str) -> str:
        return str(Path(path).resolve()) if Path(path).exists() else path  # else a hub id or a pattern

    return replace(
        job,
        model=absolute(job.model),
        input=[absolute(path) for path in job.input],
        output=job.output.resolve(),
        image_root=None if job.image_root is None else absolute(job.image_root),
    )
