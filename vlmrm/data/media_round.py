"""Work on media that is done once a round, however many samples, rewards and threads ask for it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Condition
from typing import Any, TypeVar

from cachetools import LRUCache, cached
from PIL import Image

KEPT_BYTES = 512 * 2**20  # of a round; what was not asked for for longest is dropped

Result = TypeVar("Result")


class RoundMedia:
    """What was made of the pictures, videos and bytes of a round, by identity: none of them may change meanwhile."""

    def __init__(self, kept_bytes: int = KEPT_BYTES):
        cache = LRUCache(kept_bytes, getsizeof=_size)
        self.made = cached(cache, key=_key, condition=Condition())(_with_its_source)


@contextmanager
def media_round(media: RoundMedia | None = None) -> Generator[None]:
    """Let `once` remember within the block, on this thread: in `media`, else with the block around it, else anew."""
    if media is None and _current.get() is not None:
        yield
        return
    token = _current.set(media or RoundMedia())
    try:
        yield
    finally:
        _current.reset(token)


def once(kind: str, source: Any, make: Callable[[Any], Result]) -> Result:
    """Return `make(source)`, made once within a `media_round` for each kind and source; outside of one, each time."""
    media = _current.get()
    return make(source) if media is None else media.made(kind, source, make)[1]


_current: ContextVar[RoundMedia | None] = ContextVar("media_of_round", default=None)


def _with_its_source(kind: str, source: Any, make: Callable[[Any], Any]) -> tuple[Any, Any]:
    return source, make(source)  # kept beside its result, a source keeps its id


def _key(kind: str, source: Any, make: Callable[[Any], Any]) -> tuple[str, str | int]:
    return kind, source if isinstance(source, str) else id(source)


def _size(entry: Any) -> int:
    _, result = entry
    return 1 + _bytes_of(result)


def _bytes_of(result: Any) -> int:
    if isinstance(result, Image.Image):
        return result.width * result.height * len(result.getbands())
    if isinstance(result, (list, tuple)):
        return sum(map(_bytes_of, result))
    return int(getattr(result, "nbytes", 0)) or (len(result) if isinstance(result, (str, bytes)) else 0)
