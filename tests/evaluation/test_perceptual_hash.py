"""The search for near hashes against comparing all with all; the hash against what people call the same picture."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from tests.evaluation.pictures import picture
from vlmrm.data import duplicates as module
from vlmrm.data.duplicates import RADIUS, Look, near_pairs, perceptual_hash


def as_jpeg(image: Image.Image, quality: int) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(buffer)


def are_near(one: Image.Image, other: Image.Image) -> bool:
    return Look("one", perceptual_hash(one)).is_near(Look("other", perceptual_hash(other)))


@pytest.mark.parametrize("seed", range(5))
def test_the_same_picture_in_another_file_is_near(seed):
    image = picture(seed)
    assert are_near(image, as_jpeg(image, 60))
    assert are_near(image, image.resize((80, 60)))
    assert are_near(image, ImageEnhance.Brightness(image).enhance(0.9))


def test_other_pictures_are_far():
    hashes = [perceptual_hash(picture(seed)) for seed in range(60)]
    assert all(0 <= value < 2**64 for value in hashes)
    distances = [(a ^ b).bit_count() for i, a in enumerate(hashes) for b in hashes[:i]]
    assert min(distances) > RADIUS


def test_flat_pictures_have_no_structure_to_compare():
    assert {perceptual_hash(Image.new("L", (64, 64), grey)) for grey in (0, 1, 77, 255)} == {None}


def changed(hashes: np.ndarray, bits: int, rng: np.random.Generator) -> np.ndarray:
    """Each hash with `bits` of its bits turned."""
    turned = [sum(1 << int(bit) for bit in rng.choice(64, bits, replace=False)) for _ in hashes]
    return hashes ^ np.array(turned, dtype=np.uint64)


@pytest.mark.parametrize("candidates", [1 << 22, 7])
def test_near_pairs_equal_an_exhaustive_comparison(candidates, monkeypatch):
    monkeypatch.setattr(module, "CANDIDATES", candidates)
    rng = np.random.default_rng(0)
    left = rng.integers(0, 2**64, 60, dtype=np.uint64)
    right = np.concatenate([changed(left, bits, rng) for bits in range(8)])
    found = near_pairs(left, right)
    expected = np.argwhere(np.bitwise_count(left[:, None] ^ right[None, :]) <= RADIUS)
    assert len(expected) >= 60 * (RADIUS + 1)
    np.testing.assert_array_equal(found, expected)
