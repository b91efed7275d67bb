"""A reward set: batches, groups, order, threads, policies, and what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from vlmrm.errors import ConfigError, RewardError
from vlmrm.rewards import Models, RewardSet

HERE = "tests.rewards.reward_examples"
PICTURE = Image.new("RGB", (28, 28))


def one(model: str, **settings) -> dict:
    return {"name": settings.pop("name", "one"), "reward_model": f"{HERE}.{model}", **settings}


def test_pointwise_rewards_keep_order_and_own_batch_sizes():
    rewards = RewardSet([one("Length", batch_size=2), one("Length", name="two", batch_size=3)])
    scored = rewards(prompt=["a", "bbb", "cc", "", "eeeee"])
    assert scored.rewards["one"].tolist() == scored.rewards["two"].tolist() == [1, 3, 2, 0, 5]
    assert len(rewards.models) == 1
    assert rewards.rewards[0].model.calls == [2, 2, 1, 3, 2]


def test_equal_settings_share_a_model_across_blocks():
    models = Models()
    blocks = {"rewards": [one("Length", offset=1.0)], "eval_rewards": [one("Length", extra_kwargs={"offset": 1.0})]}
    train, evaluation = RewardSet(blocks, models=models), RewardSet(blocks, block="eval_rewards", models=models)
    assert len(models) == 1
    assert train(prompt=["a"]).total().tolist() == evaluation(prompt=["a"]).total().tolist() == [2.0]
    RewardSet([one("Length", offset=2.0)], models=models)
    assert len(models) == 2


def test_an_evaluation_without_rewards_uses_those_of_training():
    blocks = {"rewards": [one("Length")], "eval_rewards": None}
    assert [each.arguments.name for each in RewardSet(blocks, block="eval_rewards").rewards] == ["one"]
    with pytest.raises(ConfigError, match="eval_rewards must hold one or more rewards"):
        RewardSet({**blocks, "eval_rewards": []}, block="eval_rewards")


def test_groups_are_scored_whole_wherever_their_samples_are():
    scored = RewardSet(one("Rank", batch_size=1))(
        prompt=["aaa", "x", "a", "yyy", "aa", "zz"], groups=torch.tensor([7, 8, 7, 8, 7, 8])
    )
    assert scored.rewards["one"].tolist() == [2, 0, 0, 2, 1, 1]


def test_groups_are_asked_for():
    with pytest.raises(RewardError, match="reward one is of groups: give groups="):
        RewardSet(one("Rank"))(prompt=["a"])


def test_samples_of_a_round_may_come_in_parts():
    rewards = RewardSet([one("Length", batch_size=2, async_reward=True), one("Rank", name="rank", async_reward=True)])
    pending = rewards.start(group_size=2)
    pending.add(prompt=["a", "bb", "ccc"], groups=["p", "p", "q"])
    pending.add(prompt=["d"], groups=["q"])
    scored = pending.finish()
    assert scored.rewards["one"].tolist() == [1, 2, 3, 1]
    assert scored.rewards["rank"].tolist() == [0, 1, 1, 0]


def test_media_arrive_as_the_model_wants_them():
    white, grey = Image.new("RGB", (32, 28), "white"), Image.new("RGB", (28, 32), (51, 51, 51))
    scored = RewardSet(one("Brightness"))(
        prompt=["a", "b", "c"],
        image=[white, np.zeros((3, 40, 40), np.float32), torch.full((3, 28, 28), 51, dtype=torch.uint8)],
        condition_images=[[grey, white], None, [grey, grey]],
    )
    np.testing.assert_allclose(scored.rewards["one"], [1 - 0.6, 0.0, 0.0], atol=1e-6)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (None, "reward one: sample 1 has no image"),
        ("nowhere.png", "sample 1: nowhere.png"),
        (torch.full((3, 32, 32), -1.0), "sample 1: .* values from -1 to -1"),
        (torch.zeros(32, 32, 3), r"sample 1: .*\(32, 32, 3\)"),
    ],
)
def test_a_sample_that_cannot_be_rewarded_is_named(image, message):
    with pytest.raises(RewardError, match=message):
        RewardSet(one("Brightness"))(prompt=["a", "b"], image=[Image.new("RGB", (28, 28)), image])


@pytest.mark.parametrize(
    ("prompt", "image", "message"),
    [(["a", "b"], [PICTURE], "2 of prompt but 1 of image"), ("ab", [PICTURE, PICTURE], "prompt is a single str")],
)
def test_columns_that_do_not_fit_are_refused(prompt, image, message):
    with pytest.raises(RewardError, match=message):
        RewardSet(one("Brightness"))(prompt=prompt, image=image)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0], "1 rewards for 2 samples"),
        (1.0, "answered 1.0"),
        ([1.0, float("nan")], "sample 1: its reward is nan"),
        ([1.0, float("inf")], "sample 1: its reward is inf"),
        ([1.0, None], "sample 1: its reward is None"),
        (["good", 1], "sample 0: its reward is 'good'"),
    ],
)
def test_what_is_no_reward_is_an_error(answer, message):
    with pytest.raises(RewardError, match=message):
        RewardSet(one("Answers", rewards=answer))(prompt=["a", "b"])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_masked_rewards_are_missing_and_counted(asynchronous, caplog):
    rewards = RewardSet(one("Down", batch_size=1, on_failure="mask", async_reward=asynchronous))
    with caplog.at_level("WARNING", "vlmrm"):
        scored = rewards(prompt=["up", "down", "up"])
    np.testing.assert_array_equal(scored.rewards["one"], [1.0, np.nan, 1.0])
    assert scored.failures == {"one": {1: "the judge cannot be reached"}}
    assert scored.metrics()["rewards/one/failures"] == 1
    assert scored.metrics()["rewards/one/mean"] == 1.0


def test_a_requested_fallback_is_used_and_counted():
    settings = {"batch_size": 1, "on_failure": "fallback", "fallback_reward": -1.0}
    scored = RewardSet(one("Down", **settings))(prompt=["up", "down"])
    assert scored.rewards["one"].tolist() == [1.0, -1.0]
    assert list(scored.failures["one"]) == [1]


def test_a_mistake_in_a_program_is_never_masked():
    with pytest.raises(RewardError, match="reward one: TypeError: the judge"):
        RewardSet(one("Down", error="bug", on_failure="mask"))(prompt=["down"])


def test_a_bad_sample_fails_with_its_call():
    scored = RewardSet(one("Down", error="bug", on_failure="mask", batch_size=1))(prompt=["up", "down", "up"])
    np.testing.assert_array_equal(scored.rewards["one"], [1.0, np.nan, 1.0])
    assert scored.failures == {"one": {1: "TypeError: the judge cannot be reached"}}


def test_a_broken_picture_costs_its_own_sample_alone():
    scored = RewardSet(one("Brightness", on_failure="mask"))(
        prompt=["a", "b"], image=["nowhere.png", Image.new("RGB", (28, 28), "white")]
    )
    np.testing.assert_array_equal(scored.rewards["one"], [np.nan, 1.0])


def test_changing_its_pictures_affects_no_other_reward():
    picture = Image.new("RGB", (32, 28))
    scored = RewardSet([one("Shrinking"), one("Width", name="width")])(prompt=["a", "b"], image=[picture, picture])
    assert scored.rewards["width"].tolist() == [32, 32] and picture.width == 32


def test_the_audit_log_has_every_reward(tmp_path):
    path = tmp_path / "logs" / "rewards.jsonl"
    rewards = RewardSet([one("Length"), one("Down", name="judge", batch_size=1, on_failure="mask")], audit_log=path)
    rewards(prompt=["up", "down"], groups=[1, 1])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["sample"], line["reward_name"], line["reward"]) for line in lines] == [
        (0, "one", 2.0), (0, "judge", 1.0), (1, "one", 4.0), (1, "judge", None),
    ]  # fmt: skip
    assert lines[-1]["error"] == "the judge cannot be reached"
    assert lines[-1]["group"] == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([one("Length"), one("Rank")], "2 rewards are called one"),
        ([], "one or more rewards"),
        (one("Length", batchsize=2), "did you mean batch_size"),
        (one("Length", offsets=2), "did you mean offset"),
        (one("Length", colour=2), "takes offset"),
        (one("Length", batch_size=0), "one: batch_size"),
        (one("Length", dtype="int8"), "dtype is 'int8'"),
        (one("Length", on_failure="ignore"), "on_failure: .*'fallback'"),
        (one("Length", on_failure="fallback"), "go together"),
        (one("Length", on_failure="fallback", fallback_reward=float("nan")), "fallback_reward"),
        (one("Length", weight="2"), "weight"),
        (one("Length", clip=[1, 1]), "clip is"),
        (one("Length", length_free=3), "length_penalty"),
        (one("Length", deadline=1.0), "deadline is of asynchronous rewards"),
        (one("Length", device="gpu"), "device is 'gpu'"),
        (one("Length", device="cuda:99"), "device is cuda:99"),
        ({"name": "x"}, "reward x has no reward_model"),
        ({"name": "x", "reward_model": "lenght"}, "no reward lenght"),
        ({"name": "x", "reward_model": "nowhere.Model"}, "no module nowhere"),
        ({"name": "x", "reward_model": f"{HERE}.Nothing"}, "Nothing"),
        ({"reward": [one("Length")]}, "did you mean rewards"),
        ({"reward_model": "format"}, "pattern is missing"),
        ({"reward_model": "format", "pattern": "(a"}, "regular expression"),
        ({"reward_model": "Remote_Pointwise"}, "no server_url"),
        ({"reward_model": "remote_pointwise", "server_url": "localhost:8000"}, "localhost:8000 cannot"),
        ({"reward_model": "remote_pointwise", "server_url": "http://me:secret@host?key=1"}, "url http://host cannot"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        RewardSet(config)
