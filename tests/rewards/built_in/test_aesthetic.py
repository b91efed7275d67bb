"""LAION's aesthetic predictor on tiny weights, against its arithmetic in matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import CLIPImageProcessorPil, CLIPModel

from tests.rewards.built_in import tiny_clip
from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.rewards import RewardSet

NUMBERS = (0, 2, 4, 6, 7)  # of its layers, among which the published ones have dropouts


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("aesthetic")
    tiny_clip.save_checkpoint(folder)
    random = torch.Generator().manual_seed(0)
    sizes = (tiny_clip.WIDTH, 1024, 128, 64, 16, 1)
    weights = {}
    for number, inputs, outputs in zip(NUMBERS, sizes, sizes[1:], strict=False):
        weights[f"layers.{number}.weight"] = torch.randn(outputs, inputs, generator=random) / inputs**0.5
        weights[f"layers.{number}.bias"] = torch.randn(outputs, generator=random)
    torch.save(weights, folder / "head.pth")
    return folder, weights


@pytest.fixture(scope="module")
def pictures():
    return tiny_clip.noise((28, 28), (64, 40), (31, 90))


@pytest.fixture(scope="module")
def rating(files):
    folder, weights = files
    model, processor = CLIPModel.from_pretrained(folder).eval(), CLIPImageProcessorPil.from_pretrained(folder)

    @torch.no_grad()
    def of(picture) -> float:
        pixels = processor(picture, return_tensors="pt")["pixel_values"]
        values = model.visual_projection(model.vision_model(pixels).pooler_output)[0].double()
        values = values / values.square().sum().sqrt()
        for number in NUMBERS:
            values = weights[f"layers.{number}.weight"].double() @ values + weights[f"layers.{number}.bias"]
        return float(values)

    return of


def reward(files, **settings):
    folder, _ = files
    common = {"reward_model": "aesthetic", "dtype": "float32", "device": "cpu", "model_name_or_path": str(folder)}
    return RewardSet({"name": "a", **common, "head_path": str(folder / "head.pth"), **settings})


def test_ratings_match_the_layers_alone_or_batched(files, rating, pictures):
    wanted = [rating(picture) for picture in pictures]
    scored = reward(files)(prompt=["?"] * 4, image=[*pictures, pictures[0]]).rewards["a"]
    assert scored.tolist() == pytest.approx([*wanted, wanted[0]], abs=2e-6)
    assert np.ptp(wanted) > 1e-3
    alone = [reward(files)(prompt=["?"], image=[picture]).rewards["a"][0] for picture in pictures]
    assert alone == pytest.approx(wanted, abs=2e-6)


def test_a_video_is_its_frames(files, rating, pictures):
    each = [rating(picture) for picture in pictures]
    mean = reward(files)(prompt=["?"], video=[pictures]).rewards["a"]
    assert mean[0] == pytest.approx(np.mean(each), abs=2e-6)


def test_what_is_no_head_is_refused(files, tmp_path):
    _, weights = files
    with pytest.raises(ConfigError, match="head_path is missing"):
        reward(files, head_path=None)
    torch.save({name: weight for name, weight in weights.items() if "7" not in name}, tmp_path / "head.pth")
    with pytest.raises(CheckpointError, match="7"):
        reward(files, head_path=str(tmp_path / "head.pth"))
