"""The reward of a classifier of frames, through a RewardSet."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from vlmrm.errors import CheckpointError, ConfigError, RewardError
from vlmrm.rewards import RewardSet
from vlmrm_robots.frames.checkpoint import read_config, save_classifier
from vlmrm_robots.frames.classifier import FrameClassifier, classifier_config


@pytest.fixture
def checkpoint(tmp_path):
    return saved(tmp_path, image_keys=("base_camera",))


def saved(folder, **changes):
    torch.manual_seed(0)
    config = classifier_config(image_size=(3, 32, 48), hidden_dim=16, num_spatial_blocks=2, **changes)
    save_classifier(folder / "model.safetensors", FrameClassifier(config), config)
    return folder / "model.safetensors"


def reward_set(checkpoint, **changes) -> RewardSet:
    given = {"name": "done", "reward_model": "frame_success", "checkpoint_path": str(checkpoint), "dtype": "float32"}
    return RewardSet([{**given, "device": "cpu", "batch_size": 2, **changes}])


def pictures(*sizes) -> list[Image.Image]:
    generator = np.random.default_rng(0)
    return [Image.fromarray(generator.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]


def test_it_is_the_classifiers_probability_or_its_verdict(checkpoint, tmp_path):
    images = pictures(*[(32, 48)] * 5)
    found = reward_set(checkpoint, reward_type="continuous")(prompt=[""] * len(images), image=images).rewards["done"]
    model = FrameClassifier(read_config(checkpoint))
    model.load_state_dict(load_file(checkpoint))
    frames = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 for image in images])
    with torch.no_grad():
        expected = torch.sigmoid(model.eval()({"base_camera": frames}))
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4)
    threshold = float(np.sort(found)[1:3].mean())  # between two of them
    config = model.spec.model_copy(update={"threshold": threshold})
    save_classifier(tmp_path / "other", model, config)
    verdicts = reward_set(tmp_path / "other")(prompt=[""] * len(images), image=images).rewards["done"]
    assert verdicts.tolist() == (found > threshold).astype(float).tolist()


def test_an_image_of_another_size_fails_by_itself(checkpoint):
    images = pictures((32, 48), (48, 32), (32, 48))
    with pytest.raises(RewardError, match=r"\[3, 48, 32\], and the classifier is for \[3, 32, 48\]"):
        reward_set(checkpoint)(prompt=[""] * len(images), image=images)
    masked = reward_set(checkpoint, on_failure="mask", reward_type="continuous")(
        prompt=[""] * len(images), image=images
    ).rewards["done"]
    assert np.isnan(masked).tolist() == [False, True, False]


def test_whole_pictures_are_cropped_and_scaled_like_frames(tmp_path):
    crop = {"base_camera": (16, 8, 64, 40)}  # 48 wide and 32 high: the size of the frames
    whole = pictures((60, 80))[0]
    cut = whole.crop(crop["base_camera"])
    (tmp_path / "plain").mkdir()
    plain = reward_set(saved(tmp_path / "plain", image_keys=("base_camera",)), reward_type="continuous")
    cropping = reward_set(saved(tmp_path, image_keys=("base_camera",), crop=crop), reward_type="continuous")
    expected = plain(prompt=[""], image=[cut]).rewards["done"]
    np.testing.assert_allclose(cropping(prompt=[""], image=[whole]).rewards["done"], expected, rtol=1e-6)
    with pytest.raises(RewardError, match="is not within its image, 20 wide and 10 high"):
        cropping(prompt=[""], image=pictures((10, 20)))


def test_a_trajectory_scores_by_its_last_frame(checkpoint, tmp_path):
    frames = pictures(*[(32, 48)] * 6)
    rewards = reward_set(checkpoint, reward_type="continuous", batch_size=8, on_failure="mask")
    alone = rewards(prompt=[""] * 6, image=frames).rewards["done"]
    videos = [frames[:3], frames[3:], frames[:1]]
    assert rewards(prompt=[""] * 3, video=videos).rewards["done"] == pytest.approx(alone[[2, 5, 0]])
    frames[4].save(tmp_path / "last.png")
    answers = [[frame_turn(*frames[:2])], [frame_turn(frames[0], str(tmp_path / "last.png"))]]
    assert rewards(prompt=[""] * 2, response=answers).rewards["done"] == pytest.approx(alone[[1, 4]])
    # An answer as a text beside an image is another reward's; what is no trajectory fails by itself, and says why.
    assert rewards(prompt=[""], image=frames[:1], response=["Left."]).rewards["done"] == pytest.approx(alone[[0]])
    described = frame_turn(*frames[:2])
    described["content"].append({"type": "text", "text": "It is done."})
    broken = rewards(
        prompt=[""] * 4, response=["Left.", [described], [frame_turn(str(tmp_path / "gone.png"))], answers[0]]
    )
    assert np.isnan(broken.rewards["done"]).tolist() == [True, True, True, False]
    reasons = broken.failures["done"].values()
    for reason, expected in zip(reasons, ("no list of images", "no list of images", "gone.png"), strict=True):
        assert expected in reason
    with pytest.raises(RewardError, match="several of an image, a video and an answer"):
        reward_set(checkpoint)(prompt=[""], image=frames[:1], response=[answers[0]])
    with pytest.raises(RewardError, match="it has no image, video or answer"):
        reward_set(checkpoint)(prompt=[""])


def frame_turn(*frames) -> dict:
    return {"role": "assistant", "content": [{"type": "image", "image": frame} for frame in frames]}


def test_what_cannot_be_is_refused(tmp_path, checkpoint):
    with pytest.raises(CheckpointError, match="there is no reward model"):
        reward_set(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="reward done: reward_type"):
        reward_set(checkpoint, reward_type="both")
    with pytest.raises(ConfigError, match="no checkpoint_path"):
        RewardSet([{"name": "done", "reward_model": "frame_success"}])
    with pytest.raises(ConfigError, match=r"image_size is \[3, 64, 64\] in the configuration and \[3, 32, 48\] in"):
        reward_set(checkpoint, image_size=[3, 64, 64])
    with pytest.raises(ConfigError, match="looks at front, wrist at once"):
        reward_set(saved(tmp_path, image_keys=("front", "wrist")))
