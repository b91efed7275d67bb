"""The size of an image as a JPEG file, against the size of a file on disk."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from vlmrm.rewards import RewardSet


def test_sizes_are_those_of_files(tmp_path):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 48, 3), dtype=np.uint8))
    images = [noise, Image.new("RGB", (64, 48), "red")]
    sizes = []
    for number, image in enumerate(images):
        image.save(tmp_path / f"{number}.jpg", quality=95)
        sizes.append((tmp_path / f"{number}.jpg").stat().st_size / 1000)
    names = ("jpeg_incompressibility", "jpeg_compressibility")
    scored = RewardSet([{"name": name, "reward_model": name} for name in names])(prompt=["a", "b"], image=images)
    assert scored.rewards[names[0]].tolist() == pytest.approx(sizes) and sizes[0] > 5 * sizes[1]
    assert scored.rewards[names[1]].tolist() == pytest.approx([-size / 500 for size in sizes])
