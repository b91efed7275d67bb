"""A stream of training rows without an end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset


class EndlessStream(IterableDataset):
    """Repeats `stream` (of the `datasets` library) for ever, each time in another order.

    So a streamed run is one long epoch of `max_steps` steps. HF's trainer, which cannot know the length of a stream,
    would drop the gradients accumulated before each end, and lose its position in the data when resumed.
    """

    def __init__(self, stream: Any):
        self.stream = stream

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for epoch in itertools.count():
            self.stream.set_epoch(epoch)
            empty = True
            for row in self.stream:
                empty = False
                yield row
            if empty:  # a worker without a share of the files
                return
