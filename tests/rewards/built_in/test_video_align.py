"""VideoAlign: three dimensions at their tokens, normalised, by a LoRA model's own arithmetic on tiny weights."""

from __future__ import annotations

import numpy as np
import pytest

from tests.published import cases
from vlmrm.errors import CheckpointError, RewardError
from vlmrm.rewards import RewardSet
from vlmrm.rewards.built_in.reward_tokens import sampled

PROMPTS = cases.PROMPTS


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return cases.video_align(tmp_path_factory.mktemp("video-align"))


@pytest.fixture(scope="module")
def clips(published):
    """Of two seconds, at two frames a second, all of which are taken."""
    return [answer["content"][0]["video"] for _, answer in published.conversations]


@pytest.fixture(scope="module")
def expected(published):
    """The normalised dimensions [N, 3]."""
    return np.stack([published.outputs[name].numpy() for name in cases.OUTPUTS], axis=1)


@pytest.fixture
def reward(published):
    places = {"model_name_or_path": published.source, "base_name_or_path": published.options["base"]}
    places["template_file"] = published.options["template"]

    def make(**settings) -> RewardSet:
        common = {"reward_model": "VideoAlign", "video_fps": 2, "dtype": "float32", "device": "cpu"}
        paths = {name: str(path) for name, path in places.items()}
        return RewardSet({"name": "video", **common, **paths, **settings})

    return make


def test_the_reward_sums_dimensions_alone_or_batched(reward, expected, clips):
    for size in (1, 2):
        found = reward(batch_size=size)(prompt=PROMPTS, video=clips)
        assert np.allclose(found.total(), expected.sum(axis=1), rtol=0, atol=1e-5)
        for number, name in enumerate(cases.OUTPUTS):
            assert found.info["video"][1][name] == pytest.approx(expected[1, number], abs=1e-5)
    assert np.ptp(expected, axis=0).min() > 1e-4
    motion = reward(dimension="MQ")(prompt=PROMPTS, video=clips).total()
    assert np.allclose(motion, expected[:, 1], rtol=0, atol=1e-5)


def test_frames_are_sampled_at_the_training_rate(reward, expected, clips):
    # The same pictures, each shown four times: at 8 a second, a quarter of them are taken.
    slow = [[frame for frame in clip for _ in range(4)] for clip in clips]
    found = reward(video_fps=8)(prompt=PROMPTS, video=slow).total()
    assert np.allclose(found, expected.sum(axis=1), rtol=0, atol=1e-5)
    each = reward(video_fps=None)(prompt=PROMPTS, video=[slow[0], clips[1]], fps=[8.0, 2.0]).total()
    assert np.allclose(each, expected.sum(axis=1), rtol=0, atol=1e-5)
    with pytest.raises(RewardError, match="set video_fps"):
        reward(video_fps=None)(prompt=PROMPTS, video=clips)


@pytest.mark.parametrize(
    ("length", "video_fps", "places"),
    [
        (80, 16, [0, 9, 18, 26, 35, 44, 53, 61, 70, 79]),  # 5 s, 10 frames
        (16, 16, [0, 5, 10, 15]),  # 1 s, at least 4
        (3, 16, [0, 2]),  # an even number of what there is
        (1, 16, [0]),
    ],
)
def test_frames_are_even_in_time_and_in_number(length, video_fps, places):
    assert sampled(list(range(length)), video_fps, 2.0) == places


def test_a_broken_sample_fails_alone(reward, expected, clips):
    uneven = [clips[0][0], clips[0][1].resize((280, 280))] * 2
    found = reward(on_failure="mask")(
        prompt=["all <|VQ_reward|> please", PROMPTS[1], PROMPTS[0]], video=[*clips, uneven]
    )
    assert "spells <|VQ_reward|>" in found.failures["video"][0]
    assert "different sizes" in found.failures["video"][2]
    assert found.total()[1] == pytest.approx(expected[1].sum(), abs=1e-5)


def test_what_is_missing_is_named(reward, tmp_path):
    with pytest.raises(CheckpointError, match="model_config"):
        reward(model_name_or_path=str(tmp_path))
