"""Irrelevant queries: the answers of one comparison under another one's prompt, where neither should win.

A reward model that prefers the chosen answer whatever the question and image has learned the answers, not the task.
The donor prompts come from the same batch where it has a fitting one (the shared-prefix batch then computes only the
answers anew), else from the data set.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vlmrm.conversation import Comparison, Messages, media_of, text_of
from vlmrm.data.media import media_key

DRAWS = 20  # from the data set for each donor before giving up: a data set may have a single prompt
RECENT = 256  # comparisons remembered from a stream


@dataclass
class IrrelevantQueries:
    """Chooses donor prompts, reproducibly: by the seed, the epoch and the row's id, whatever process asks.

    `draw` returns a comparison of the data set, or None; `for_dataset` and `for_stream` make it.
    """

    count: int
    seed: int
    draw: Callable[[random.Random], Comparison | None]
    remember: Callable[[Sequence[Comparison]], None] = lambda batch: None

    def donors(self, comparison: Comparison, batch: Sequence[Comparison], epoch: int) -> list[Comparison]:
        """Up to `count` comparisons whose prompts fit: another prompt, of the same kind, with no image in common."""
        if not comparison.prompt:
            return []
        rng = random.Random(f"{self.seed}:{epoch}:{comparison.id}")
        chosen: list[Comparison] = []
        candidates = [other for other in batch if other is not comparison]
        rng.shuffle(candidates)
        for other in candidates:
            _take(other, comparison, chosen, self.count)
        for _ in range(DRAWS * self.count):
            if len(chosen) == self.count:
                break
            _take(self.draw(rng), comparison, chosen, self.count)
        return chosen


def _take(other: Comparison | None, comparison: Comparison, chosen: list[Comparison], count: int) -> None:
    if other is None or not other.prompt or len(chosen) == count:
        return
    if all(prompts_differ(other.prompt, taken.prompt) for taken in (comparison, *chosen)):
        chosen.append(other)


def prompts_differ(prompt: Messages, other: Messages) -> bool:
    """Whether the answers to one prompt are beside the point of the other, which is of the same kind."""
    media = {media_key(medium.reference) for medium in media_of(prompt)}
    other_media = {media_key(medium.reference) for medium in media_of(other)}
    if bool(media) != bool(other_media):
        return False  # a question about an image and a request for one are told apart too easily
    if media:
        return not media & other_media
    return text_of(prompt) != text_of(other)


def best_and_worst(comparison: Comparison) -> tuple[int, int]:
    """The answers of the highest and lowest rating: the two answers shown under a donor prompt."""
    ratings = comparison.ratings
    return max(range(len(ratings)), key=ratings.__getitem__), min(range(len(ratings)), key=ratings.__getitem__)


def for_dataset(count: int, seed: int, dataset) -> IrrelevantQueries:
    """Donors from a data set with a length, whose rows hold a `comparison`."""

    def draw(rng: random.Random) -> Comparison | None:
        comparison = dataset[rng.randrange(len(dataset))]["comparison"]
        return comparison if isinstance(comparison, Comparison) else None

    return IrrelevantQueries(count, seed, draw)


def for_stream(count: int, seed: int) -> IrrelevantQueries:
    """Donors from the last comparisons that this process collated: a stream has no rows to draw from."""
    recent: deque[Comparison] = deque(maxlen=RECENT)

    def draw(rng: random.Random) -> Comparison | None:
        return recent[rng.randrange(len(recent))] if recent else None

    return IrrelevantQueries(count, seed, draw, recent.extend)
