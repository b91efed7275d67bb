"""Pictures on their way to a judge: encoded once, remembered within limits."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from PIL import Image

from vlmrm.rewards import pictures


@pytest.fixture
def encoded(monkeypatch):
    """The pictures that were encoded, in order, from an empty memory on."""
    seen: list[Image.Image] = []
    save = Image.Image.save
    pictures._encoded.cache.clear()
    monkeypatch.setattr(Image.Image, "save", lambda image, *to, **how: (seen.append(image), save(image, *to, **how)))
    yield seen
    pictures._encoded.cache.clear()


def noise(seed: int, side: int = 32) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def test_threads_with_the_same_picture_share_one_encoding(encoded, monkeypatch):
    found, started = [], threading.Barrier(4)

    def work():
        started.wait(60)
        found.append(pictures.data_uri(noise(0)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(encoded) == 1


def test_what_was_not_shown_for_longest_is_forgotten_first(encoded, monkeypatch):
    room = 4
    characters = len(pictures.data_uri(noise(0))) * room + 100  # PNGs differ by a few bytes
    monkeypatch.setattr(pictures._encoded.cache, "_Cache__maxsize", characters)
    for seed in (*range(room), 0, room, 0, 1):
        pictures.data_uri(noise(seed))
    assert len(encoded) == room + 2  # the last but one puts out 1, not 0


def test_a_picture_that_cannot_be_encoded_fails_anew_each_time(encoded, monkeypatch):
    def broken(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(Image.Image, "save", broken)
    for _ in range(2):
        with pytest.raises(OSError, match="disk full"):
            pictures.data_uri(noise(0))


def test_a_transparent_picture_is_shown_on_white(encoded):
    clear, white = Image.new("RGBA", (32, 32), (0, 0, 0, 0)), Image.new("RGB", (32, 32), "white")
    assert pictures.data_uri(clear) == pictures.data_uri(white)
