"""Decoding of video latents, on the host that computes the reward, before the reward sees them.

So the queue holds latents, which are small, and a video is decoded once for all rewards of a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from cachetools import LRUCache

from vlmrm.conversation import Outcome
from vlmrm.errors import RowError
from vlmrm.formats.wire import Item
from vlmrm.serving.backend import Job, State
from vlmrm.serving.memory_backend import MemoryBackend
from vlmrm.serving.replica import Replica
from vlmrm.serving.settings import DecodeSettings, Limits
from vlmrm.serving.telemetry import Metrics
from vlmrm.serving.worker_spec import WorkerSpec

WAN = "vlmrm.serving.engines.WanDecoder"
NAME = "decoder"  # in metrics and logs, in place of a reward's name


@dataclass(frozen=True)
class DecodedItem:
    """An item with a video in place of its latents, and the seconds that decoding took."""

    item: Item
    seconds: float


class Decoder:
    """A worker, `replica`, that decodes latents, run and watched as those of rewards are."""

    def __init__(self, settings: DecodeSettings, metrics: Metrics, silence: float):
        spec = WorkerSpec(
            WAN,
            settings.model_dump(include={"model_path", "subfolder", "dtype", "device"}),
            python=settings.venv_python,
            weights=settings.model_path,
            budget=1,
            batch_timeout=settings.timeout,
            silence=silence,
        )
        self._queue = MemoryBackend(Limits(result_ttl=0))  # videos are kept in `_cache` only, which counts bytes
        self.replica = Replica(NAME, spec, self._queue, metrics)
        self._timeout = settings.timeout
        self._cache: LRUCache[str, Outcome] = LRUCache(
            settings.cache_bytes, getsizeof=lambda outcome: len(outcome.extra["video"])
        )

    async def decode(self, items: Sequence[Item]) -> list[DecodedItem | RowError]:
        """Return each item with `video` in place of `latents`, or its error; items without latents are unchanged."""
        return await asyncio.gather(*map(self._decode, items))

    async def _decode(self, item: Item) -> DecodedItem | RowError:
        if "latents" not in item:
            return DecodedItem(item, 0.0)
        try:
            outcome = await self._video({"latents": item["latents"]["npy"]})
        except RowError as error:
            return error
        columns = {name: value for name, value in item.items() if name != "latents"}
        return DecodedItem({**columns, "video": {"npy": outcome.extra["video"]}}, outcome.score or 0.0)

    async def _video(self, item: Item) -> Outcome:
        job = Job(NAME, [item])
        key = f"{self.replica.revision} {job.key}"
        if key in self._cache:
            return self._cache[key]
        job_id = await self._queue.put(job)
        # A worker that cannot be loaded may come back for the next request, but this one is not kept waiting.
        while True:
            status = await self._queue.wait(job_id, self._timeout)
            assert status is not None  # it was put
            if status.finished:
                break
            if self.replica.error is not None and not self.replica.ready:
                await self._queue.cancel(job_id)
                raise RowError("its latents cannot be decoded: the decoder cannot be loaded")
        if status.state is not State.done or not status.outcomes:
            raise RowError(f"its latents cannot be decoded: {status.error}")
        [outcome] = status.outcomes
        if outcome.error is not None:
            raise RowError(outcome.error)
        with suppress(ValueError):  # it is larger than the whole cache
            # Not `key`: the decoder may have loaded since, or loaded other weights.
            self._cache[f"{status.revision} {job.key}"] = outcome
        return outcome
