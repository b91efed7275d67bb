"""A round's pictures are opened, hashed and encoded once, whichever rewards look at them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from judge_server import JudgeServer, completion
from PIL import Image
from reward_server import RewardServer

from vlmrm.data import media
from vlmrm.rewards import PointwiseRewardModel, RewardSet, pictures

ROLLOUTS = 64


class Shrinking(PointwiseRewardModel):
    """The width of the image, after it made it smaller."""

    def __init__(self, config, accelerator):
        super().__init__(config, accelerator)
        self.seen: list[Image.Image] = []

    def __call__(self, prompt, image):
        self.seen += image
        image[0].thumbnail((8, 8))
        return [float(one.width) for one in image]


class Width(Shrinking):
    def __call__(self, prompt, image):
        return [float(one.width) for one in image]


@pytest.fixture
def counted(monkeypatch):
    """How often a picture was hashed and encoded."""
    counts, lock = {"hashed": 0, "encoded": 0}, threading.Lock()

    def count(name, function):
        def counting(*args, **kwargs):
            with lock:
                counts[name] += 1
            return function(*args, **kwargs)

        return counting

    monkeypatch.setattr(media, "_content_key", count("hashed", media._content_key))
    monkeypatch.setattr(Image.Image, "save", count("encoded", Image.Image.save))
    pictures._encoded.cache.clear()
    return counts


def test_64_rollouts_of_one_picture_are_one_hash_and_one_encoding_for_all_rewards(tiny_reward_model, counted):
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    service = RewardServer()
    with JudgeServer().running() as judge:
        judge.behave = lambda body, number: completion("Yes", tokens=[("Yes", -0.1), ("No", -3.0)])
        trained = {"model_path": str(tiny_reward_model), "device": "cpu"}
        asking = {"reward_model": "vllm_evaluate", "api_base_url": judge.url, "async_reward": True, "num_workers": 2}
        rewards = RewardSet(
            [
                {"name": "pointwise", "reward_model": "vlm_reward", **trained},
                {"name": "groupwise", "reward_model": "vlm_reward_group", **trained},
                {"name": "judge", **asking},
                {"name": "other_judge", **asking, "question": "Is it?"},
                {"name": "service", "reward_model": "remote_pointwise", "server_url": service.url},
            ]
        )
        answers = [f"A cat, said {number} times." for number in range(ROLLOUTS)]
        columns = {"prompt": ["What is it?"] * ROLLOUTS, "image": [picture] * ROLLOUTS, "response": answers}
        counted.update(hashed=0, encoded=0)  # loading a model hashes pictures of its own
        scored = rewards(**columns, groups=[number // 8 for number in range(ROLLOUTS)])
    service.close()
    assert scored.rewards["service"].tolist() == [64] * ROLLOUTS
    assert not any(scored.failures.values())
    assert counted == {"hashed": 1, "encoded": 1}


def test_a_reward_that_changes_its_pictures_changes_those_of_no_other():
    config = [{"name": name, "reward_model": f"{__name__}.{name}"} for name in ("Shrinking", "Width")]
    rewards = RewardSet(config)
    picture = Image.new("RGB", (32, 32))
    scored = rewards(prompt=["a", "b"], image=[picture, picture])
    assert scored.rewards["Width"].tolist() == [32, 32] and picture.width == 32
