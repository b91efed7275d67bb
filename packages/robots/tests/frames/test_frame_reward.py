"""FrameReward on environments whose picture says how far they are, with a classifier that reads it off."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from played import Played
from squares import SIDE, small_classifier, small_config

from vlmrm.errors import CheckpointError, ConfigError, DataError
from vlmrm.settings import validate
from vlmrm_robots.frames.checkpoint import save_classifier
from vlmrm_robots.frames.frame_reward import FrameReward, FrameScorer
from vlmrm_robots.frames.settings import RewardModelSettings


class Clock(Played):
    """Shows its frames in `info`, or in the observation."""

    reward = 10.0

    def __init__(self, brightness: list[int], where: str):
        super().__init__(brightness)
        self.where = where

    def shown(self):
        image = {"images": self.images}
        return (np.zeros(1, dtype=np.float32), image) if self.where == "info" else (image, {})


class Eye:
    """A scorer whose probability is the frame's brightness; it counts the batches that it is shown."""

    def __init__(self, threshold: float = 0.5):
        self.config = small_config(image_size=(3, 2, 2), threshold=threshold)
        self.batches: list[int] = []
        self.path = "the eye"

    def probabilities(self, images):
        frames = images["base_camera"]
        assert frames.dtype == np.uint8 and frames.shape[1:] == (3, 2, 2)  # whatever the environment shows
        self.batches.append(len(frames))
        return frames[:, 0, 0, 0] / 255


def clocks(*brightness, mode=AutoresetMode.SAME_STEP, where="info"):
    space = gym.spaces.Dict({"images": gym.spaces.Dict({"base_camera": gym.spaces.Box(0, 255, (3, 2, 2), np.uint8)})})

    def make(levels):
        def create():
            env = Clock(levels, where)
            env.observation_space = env.observation_space if where == "info" else space
            return env

        return create

    return SyncVectorEnv(
        [make([round(255 * level) for level in episode]) for episode in brightness], autoreset_mode=mode
    )


def played(env, steps: int) -> np.ndarray:
    """Rewards [steps, N]."""
    env.reset(seed=0)
    return np.array([env.step(np.zeros(env.num_envs, dtype=np.int64))[1] for _ in range(steps)])


def rewards(*brightness, steps: int, mode=AutoresetMode.SAME_STEP, threshold: float = 0.5, **changes) -> list:
    env = FrameReward(clocks(*brightness, mode=mode), RewardModelSettings(**changes), Eye(threshold))
    return played(env, steps).T.round(2).tolist()


class Larger(gym.vector.VectorWrapper):
    """Shows its frames twice as high from `since` steps on."""

    def __init__(self, env, since: int):
        super().__init__(env)
        self.left = since

    def step(self, actions):
        *result, info = self.env.step(actions)
        self.left -= 1
        if self.left < 0:
            info["images"]["base_camera"] = info["images"]["base_camera"].repeat(2, axis=2)
        return *result, info


def test_frames_of_another_size_are_scaled_as_they_are_collected():
    env = FrameReward(Larger(clocks([0, 0.2, 1, 0]), 0), RewardModelSettings(reward_type="continuous"), Eye())
    assert played(env, 2).T.round(2).tolist() == [[0.2, 1]]


def test_frames_that_change_their_size_in_an_episode_are_refused():
    env = FrameReward(Larger(clocks([0, 0.2, 1, 0]), 1), RewardModelSettings(), Eye())
    with pytest.raises(DataError, match=r"shows 'base_camera' as \[3, 4, 2\] after \[3, 2, 2\]: an episode"):
        played(env, 2)


# When ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["info", "observation"])
def test_an_episodes_last_frame_is_its_own_where_the_next_begins_in_the_same_step(where):
    env = FrameReward(
        clocks([0, 0.2, 1], [0.4, 0, 0, 0.8], where=where), RewardModelSettings(reward_type="continuous"), Eye()
    )
    assert played(env, 5).T.round(2).tolist() == [[0.2, 1, 0.2, 1, 0.2], [0, 0, 0.8, 0, 0]]


def test_a_step_that_only_starts_an_episode_has_no_learned_reward():
    result = rewards([1, 0.2, 1], steps=5, mode=AutoresetMode.NEXT_STEP, reward_type="continuous")
    assert result == [[0.2, 1, 0, 0.2, 1]]  # the reset's frame is bright, and of no step


def test_environments_that_are_reset_by_hand_forget_their_episode_alone():
    env = FrameReward(
        clocks([0, 1, 1, 1, 1], [0, 1, 1, 1, 1], mode=AutoresetMode.DISABLED), RewardModelSettings(hold=2), Eye()
    )
    assert played(env, 2).T.tolist() == [[0, 1], [0, 1]]
    env.reset(options={"reset_mask": np.array([True, False])})
    assert env.step(np.zeros(2, dtype=np.int64))[1].tolist() == [0, 1]


def test_an_episode_ends_where_the_classifier_sees_success_hold():
    settings = RewardModelSettings(hold=2, reward_mode="terminal", end_at_success=True)
    env = FrameReward(clocks([0, 1, 1, 1], [0, 0, 1, 0, 1], mode=AutoresetMode.DISABLED), settings, Eye())
    env.reset(seed=0)
    steps = [env.step(np.zeros(2, dtype=np.int64)) for _ in range(2)]
    assert [step[2].tolist() for step in steps] == [[False, False], [True, False]]
    assert [step[1].tolist() for step in steps] == [[0, 0], [1, 0]]
    env.reset(options={"reset_mask": np.array([True, False])})
    assert env.step(np.zeros(2, dtype=np.int64))[2].tolist() == [False, False]  # the first success of the next


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_environments_that_reset_themselves_do_not_end_at_a_learned_success(mode):
    with pytest.raises(ConfigError, match="make it with autoreset_mode"):
        FrameReward(clocks([0, 1], mode=mode), RewardModelSettings(end_at_success=True), Eye())


class ShownAs(gym.vector.VectorWrapper):
    """Shows its frames in another way."""

    def __init__(self, env, change):
        super().__init__(env)
        self.change = change

    def step(self, actions):
        *outcome, info = self.env.step(actions)
        for block in (info, info.get("final_info", {"images": {"base_camera": np.zeros((1, 3, 2, 2))}})):
            block["images"]["base_camera"] = self.change(block["images"]["base_camera"])
        return *outcome, info


@pytest.mark.parametrize("change", [lambda frames: frames.transpose(0, 2, 3, 1), lambda frames: frames / 255])
def test_frames_may_be_of_every_kind_that_is_collected(change):
    env = FrameReward(ShownAs(clocks([0, 0.2, 1]), change), RewardModelSettings(reward_type="continuous"), Eye())
    assert played(env, 4).T.round(2).tolist() == [[0.2, 1, 0.2, 1]]


def test_several_frames_of_one_step_are_refused():
    env = FrameReward(
        ShownAs(clocks([0, 0, 1]), lambda frames: frames[:, None].repeat(3, 1)), RewardModelSettings(), Eye()
    )
    with pytest.raises(DataError, match="environment 0 showed 3 frames of 'base_camera' in a step"):
        played(env, 1)


def test_all_frames_of_a_step_are_one_batch():
    env = FrameReward(clocks(*[[0, 0.2, 1]] * 5), RewardModelSettings(), Eye())
    played(env, 4)
    assert env.scorer.batches == [5] * 4


# How much ------------------------------------------------------------------------------------------------------------


def test_binary_rewards_are_above_the_checkpoints_threshold():
    levels = [0, 0.6, 0.4, 0.8, 1]
    assert rewards(levels, steps=4) == [[1, 0, 1, 1]]
    assert rewards(levels, steps=4, threshold=0.7) == [[0, 0, 1, 1]]
    assert rewards(levels, steps=4, reward_type="continuous", threshold=0.7) == [[0.6, 0.4, 0.8, 1]]


def test_terminal_rewards_come_with_an_episodes_last_step():
    assert rewards([0, 1, 0.2, 0.8], steps=6, reward_mode="terminal") == [[0, 0, 1, 0, 0, 1]]


def test_the_environments_reward_is_added_by_weight():
    assert rewards([0, 1, 0], steps=2) == [[1, 0]]
    assert rewards([0, 1, 0], steps=2, env_reward_weight=0.5) == [[6, 5]]
    assert rewards([0, 1, 0], steps=2, reward_weight=3.0, env_reward_weight=-1.0) == [[-7, -10]]
    result = rewards([0, 1, 0], steps=4, mode=AutoresetMode.NEXT_STEP, env_reward_weight=1.0)
    assert result == [[11, 10, 0, 11]]


def test_smoothing_is_a_mean_over_the_frames_of_one_episode():
    levels = [1, 0.2, 0.4, 0.9, 0]
    result = rewards(levels, steps=6, reward_type="continuous", smoothing=3)
    assert result == [[0.2, 0.3, 0.5, 0.43, 0.2, 0.3]]  # the reset's frame is not of a step
    assert rewards(levels, steps=4, smoothing=2) == [[0, 0, 1, 0]]


def test_held_rewards_need_successes_after_one_another():
    assert rewards([0, 1, 1, 0, 1, 1, 1], steps=6, hold=2) == [[0, 1, 0, 0, 1, 1]]
    assert rewards([0, 0, 1], steps=4, hold=2) == [[0, 0, 0, 0]]  # successes of two episodes


def test_info_says_what_the_reward_is_made_of():
    env = FrameReward(clocks([0, 0.6, 0.2, 1]), RewardModelSettings(smoothing=2, env_reward_weight=1.0), Eye())
    env.reset(seed=0)
    info = [env.step(np.zeros(1, dtype=np.int64))[4] for _ in range(2)][-1]
    assert info["frame_probability"].round(2).tolist() == [0.2]
    assert (info["frame_reward"].tolist(), info["env_reward"].tolist()) == ([0.0], [10.0])
    assert info["_frame_reward"].all() and "images" in info


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    model = small_classifier()
    save_classifier(tmp_path / "model.pt", model, model.spec.model_copy(update={"qualified": True}))
    return tmp_path / "model.pt"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image_keys": ["wrist"]}, r"image_keys is \['wrist'\] in the configuration and \['base_camera'\] in"),
        ({"image_size": (3, 64, 64)}, r"image_size is \[3, 64, 64\] in the configuration and \[3, 32, 32\] in"),
        ({"hidden_dim": 256}, "hidden_dim is 256 in the configuration and 16 in"),
        ({"num_spatial_blocks": 8}, "num_spatial_blocks is 8 in the configuration and 2 in"),
        ({"freeze_encoder": True}, "freeze_encoder is True in the configuration and False in"),
    ],
)
def test_a_configuration_that_is_not_the_checkpoints_is_refused(checkpoint, changes, words):
    with pytest.raises(ConfigError, match=words):
        FrameReward(clocks([0, 1]), RewardModelSettings(checkpoint_path=checkpoint, **changes))


def test_equal_settings_pass_and_use_pretrain_is_the_checkpoints(checkpoint, caplog):
    values = {"image_keys": ["base_camera"], "image_size": (3, SIDE, SIDE), "hidden_dim": 16, "num_spatial_blocks": 2}
    FrameScorer.open(RewardModelSettings(checkpoint_path=checkpoint, freeze_encoder=False, **values))
    assert not caplog.records
    settings = RewardModelSettings(checkpoint_path=checkpoint, use_pretrain=True, pretrained_encoder_path="nowhere.pt")
    assert FrameScorer.open(settings).config.use_pretrain is False
    assert "use_pretrain is True in the configuration and False in" in caplog.text


def test_a_document_file_takes_its_image_size_from_the_configuration(tmp_path):
    model = small_classifier(image_size=(3, 64, 64))
    torch.save({"model_state_dict": model.state_dict()}, tmp_path / "old.pt")
    settings = RewardModelSettings(
        checkpoint_path=tmp_path / "old.pt", image_size=(3, 64, 64), hidden_dim=16, freeze_encoder=False
    )
    assert FrameScorer.open(settings).config.use_pretrain is True
    with pytest.raises(ConfigError, match="hidden_dim is 8 in the configuration and 16 in"):
        FrameScorer.open(settings.model_copy(update={"hidden_dim": 8}))


def test_a_missing_checkpoint_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="there is no reward model"):
        FrameReward(clocks([0, 1]), RewardModelSettings(checkpoint_path=tmp_path / "nowhere.pt"))
    with pytest.raises(ConfigError, match="no checkpoint_path"):
        FrameReward(clocks([0, 1]), RewardModelSettings())


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"reward_type": "binry"}, "reward_type"),
        ({"reward_mode": "sometimes"}, "reward_mode"),
        ({"smoothing": 0}, "smoothing"),
        ({"hold": 2, "reward_type": "continuous"}, "no successes to hold"),
        ({"reward_weight": float("nan")}, "reward_weight"),
        ({"checkpoint": "x"}, r"unknown key checkpoint \(did you mean checkpoint_path"),
    ],
)
def test_settings_that_cannot_be_are_refused(block, words):
    with pytest.raises(ConfigError, match=words):
        validate(RewardModelSettings, block, "rl.yaml")


def test_environments_without_the_pictures_are_refused():
    eye = Eye()
    eye.config = small_config(image_keys=("wrist",))
    env = FrameReward(clocks([0, 1, 1]), RewardModelSettings(), eye)
    env.reset(seed=0)
    with pytest.raises(DataError, match="environment 0 shows no image 'wrist'"):
        env.step(np.zeros(1, dtype=np.int64))
    silent = clocks([0, 1])
    silent.metadata = {}
    with pytest.raises(ConfigError, match="autoreset_mode"):
        FrameReward(silent, RewardModelSettings(), Eye())


# The classifier as a function ----------------------------------------------------------------------------------------


def test_stored_and_shown_frames_score_alike_and_alone_as_together(checkpoint):
    scorer = FrameScorer.open(RewardModelSettings(checkpoint_path=checkpoint))
    stored = np.random.default_rng(0).integers(0, 256, (6, 3, SIDE, SIDE), dtype=np.uint8)
    stored[0] //= 200  # frames of 0 and 1 are dark, not floats
    together = scorer.probabilities({"base_camera": stored})
    alone = [scorer.probabilities({"base_camera": frame[None]})[0] for frame in stored]
    np.testing.assert_allclose(together, alone, rtol=1e-4)
    np.testing.assert_allclose(together, scorer.probabilities({"base_camera": stored / np.float32(255)}), rtol=1e-5)
    with torch.no_grad():
        logits = scorer.model({"base_camera": torch.from_numpy(stored).float() / 255})
    np.testing.assert_allclose(together, torch.sigmoid(logits).numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        (np.full((1, 3, SIDE, SIDE), 200.0, dtype=np.float32), r"3072 of 3072 values outside \[0, 1\], from 200 to"),
        (np.full((1, 3, SIDE, SIDE), np.nan, dtype=np.float32), "3072 of 3072 values outside"),
        (np.ones((1, 3, SIDE, SIDE), dtype=np.int64), "int64"),
        (np.ones((1, SIDE, SIDE, 3), dtype=np.uint8), r"\[3, 32, 32\], and those of base_camera are \[32, 32, 3\]"),
    ],
)
def test_frames_that_are_none_are_refused(checkpoint, frames, words):
    with pytest.raises((DataError, ConfigError), match=words):
        FrameScorer.open(RewardModelSettings(checkpoint_path=checkpoint)).probabilities({"base_camera": frames})
