"""What no policy forgives, what must not pass unseen, and what is left behind when a round ends early."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from vlmrm.errors import RewardError
from vlmrm.rewards import GroupwiseRewardModel, PointwiseRewardModel, RewardModelOutput, RewardSet

ANSWERS = "tests.rewards.reward_examples.Answers"
PICTURE = Image.new("RGB", (28, 28))


class Shown(GroupwiseRewardModel):
    """How many pictures the group's call has; `image` may be missing."""

    required_fields = ("prompt",)

    def __call__(self, prompt, image=None):
        return [float(len(image or ()))] * len(prompt)


class Either(PointwiseRewardModel):
    """Declared as Flow-Factory's PickScore, CLIP and OCR are (a0b2bc5), which are called with one of the two."""

    required_fields = ("prompt", "image", "video")

    def __call__(self, prompt, image=None, video=None):
        assert (image is None) != (video is None)
        return RewardModelOutput([1.0] * len(image) if video is None else [float(len(clip)) for clip in video])


class Both(PointwiseRewardModel):
    """A picture and a video of each sample: neither has a default."""

    required_fields = ("prompt", "image", "video")

    def __call__(self, prompt, image, video):
        return [1.0] * len(prompt)


def one(model: type | str, name: str = "one", **settings) -> dict:
    path = model if isinstance(model, str) else f"{__name__}.{model.__name__}"
    return {"name": name, "reward_model": path, **settings}


@pytest.mark.parametrize("policy", [{"on_failure": "mask"}, {"on_failure": "fallback", "fallback_reward": 0.0}])
@pytest.mark.parametrize(
    ("model", "images", "message"),
    [
        ({"reward_model": ANSWERS, "rewards": [1.0]}, None, "1 rewards for 2 samples"),
        (
            {"reward_model": "tests.rewards.reward_examples.Answers", "rewards": ["good", "bad"]},
            None,
            "one number a sample",
        ),
        ({"reward_model": "tests.rewards.reward_examples.Same"}, [PICTURE, None], "sample 1 has no image"),
    ],
)
def test_no_policy_forgives_what_breaks_the_contract(policy, model, images, message):
    with pytest.raises(RewardError, match=message):
        RewardSet({"name": "one", **model, **policy})(prompt=["a", "b"], image=images)


@pytest.mark.parametrize("lacking", [0, 1, 2])
def test_a_sample_lacking_its_group_image_fails_alone(lacking):
    images = [PICTURE] * 3
    images[lacking] = None
    scored = RewardSet(one(Shown, on_failure="mask"))(prompt=["a"] * 3, image=images, groups=[0] * 3)
    assert "no image" in scored.failures["one"][lacking]
    assert np.nan_to_num(scored.rewards["one"], nan=-1).tolist() == [-1.0 if n == lacking else 2.0 for n in range(3)]


@pytest.mark.parametrize(
    ("name", "meant"), [("images", "image"), ("condition_image", "condition_images"), ("respnse", "response")]
)
def test_a_misnamed_column_is_refused_with_a_suggestion(name, meant):
    """Where the answer is left out, the image would be taken for it, and every answer get the same score."""
    rewards = RewardSet(one("tests.rewards.reward_examples.Answered"))
    with pytest.raises(RewardError, match=f"a column {name}, .* did you mean {meant}"):
        rewards(prompt=["a"], **{name: [PICTURE]})
    rewards(prompt=["a"], video=[[PICTURE]], solution=["4"])  # not asked for, but well named


def test_groups_that_cannot_be_told_apart_are_refused():
    with pytest.raises(RewardError, match="groups has a list"):
        RewardSet(one(Shown))(prompt=["a"], groups=[[0]])


def test_image_or_video_suffices_where_either_is_taken():
    rewards = RewardSet({"reward_model": f"{__name__}.Either"})
    given = {"image": [PICTURE, None, PICTURE], "video": [None, [PICTURE] * 3, None]}
    assert rewards(prompt=["a"] * 3, **given).rewards["default"].tolist() == [1.0, 3.0, 1.0]
    assert rewards(prompt=["a"], video=[[PICTURE] * 2]).rewards["default"].tolist() == [2.0]
    with pytest.raises(RewardError, match="sample 1 has no image or video"):
        rewards(prompt=["a"] * 2, image=[PICTURE, None])
    with pytest.raises(RewardError, match="sample 0 has no video"):
        RewardSet({"reward_model": f"{__name__}.Both"})(prompt=["a"], image=[PICTURE])
