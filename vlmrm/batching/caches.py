"""What a scorer keeps in memory between its calls: processed media, features of images, and prompts' prefixes.

All are named by content, so a name never means another value; a budget of bytes bounds all of them together.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from vlmrm.batching.shared import Kept, PackedLayout, SharedBatcher
from vlmrm.rendering import ProcessedMedia, Rendered

Name = tuple[str, str]  # the kind of a value, and the digest of its content


def usual_limit(device: torch.device) -> int:
    """Return the bytes to keep beside a model: a quarter of what its GPU has free, at least 1 GiB.

    Processed media are in the host's memory: an eighth of that is the most.
    """
    free, _ = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(2**30, min(free // 4, host // 8))


class ByteCache:
    """Values by name with at most `limit` bytes of tensors; the least recently used go first. Threads may share it."""

    def __init__(self, limit: int):
        self.limit = limit
        self.size = 0
        self._values: OrderedDict[Name, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: Name) -> Any:
        """Return the value of this name; None where there is none."""
        with self._lock:
            if name not in self._values:
                return None
            self._values.move_to_end(name)
            return self._values[name][0]

    def put(self, name: Name, value: Any, tensors: Iterable[torch.Tensor]) -> None:
        """Keep a value with its tensors; one that is over the limit by itself is not kept."""
        size = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        with self._lock:
            if size > self.limit or name in self._values:
                return
            self._values[name] = value, size
            self.size += size
            while self.size > self.limit:
                _, (_, oldest) = self._values.popitem(last=False)
                self.size -= oldest

    def clear(self) -> None:
        """Drop every value."""
        with self._lock:
            self._values.clear()
            self.size = 0


@dataclass(frozen=True)
class MediaCache:
    """Processed media in a `ByteCache`, as a renderer's store."""

    cache: ByteCache

    def get(self, key: str) -> ProcessedMedia | None:
        return self.cache.get(("media", key))

    def put(self, key: str, media: ProcessedMedia) -> None:
        self.cache.put(("media", key), media, media.tensors.values())


@dataclass
class PrefixCache:
    """What a model's layers kept of prompts, in a `ByteCache`.

    `refused` says in one word why the model cannot continue prompts of earlier rows, once it is known: its batches are
    `padded`, or its `mask` reads what a row says of each of its tokens.
    """

    cache: ByteCache
    batcher: Any
    refused: str | None = None

    def __post_init__(self):
        if not isinstance(self.batcher, SharedBatcher):
            self.refused = "padded"

    def inputs(self, rendered: list[Rendered]) -> dict[str, Any]:
        """Return the inputs of a batch without the prompts that are kept."""
        if not isinstance(self.batcher, SharedBatcher):
            return self.batcher(rendered)
        return self.batcher.after_prefixes(rendered, self._kept, keep=self.refused is None)

    def _kept(self, digest: str) -> Kept | None:
        return None if self.refused else self.cache.get(("prefix", digest))

    def keep(self, inputs: dict[str, Any]) -> None:
        """Keep the prompts of a batch that has been computed."""
        layout = inputs.get("layout")
        if isinstance(layout, PackedLayout):
            self.refused = self.refused or layout.refused
            for digest, keep in layout.keep.items():
                self.cache.put(("prefix", digest), keep.kept, keep.kept.tensors())
