"""FrameReward on environments whose picture says how far they are, with a classifier that reads it off."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from robot_worlds.played import Played
from robot_worlds.squares import SIDE, small_classifier, small_config

from vlmrm.errors import ConfigError, DataError
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


def test_frames_of_another_size_are_scaled_as_collected():
    env = FrameReward(Larger(clocks([0, 0.2, 1, 0]), 0), RewardModelSettings(reward_type="continuous"), Eye())
    assert played(env, 2).T.round(2).tolist() == [[0.2, 1]]


# When ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["info", "observation"])
def test_the_last_frame_belongs_to_its_own_episode(where):
    env = FrameReward(
        clocks([0, 0.2, 1], [0.4, 0, 0, 0.8], where=where), RewardModelSettings(reward_type="continuous"), Eye()
    )
    assert played(env, 5).T.round(2).tolist() == [[0.2, 1, 0.2, 1, 0.2], [0, 0, 0.8, 0, 0]]


def test_a_step_only_starting_an_episode_earns_nothing():
    result = rewards([1, 0.2, 1], steps=5, mode=AutoresetMode.NEXT_STEP, reward_type="continuous")
    assert result == [[0.2, 1, 0, 0.2, 1]]  # the reset's frame is bright, and of no step


def test_manual_resets_forget_only_their_own_episode():
    env = FrameReward(
        clocks([0, 1, 1, 1, 1], [0, 1, 1, 1, 1], mode=AutoresetMode.DISABLED), RewardModelSettings(hold=2), Eye()
    )
    assert played(env, 2).T.tolist() == [[0, 1], [0, 1]]
    env.reset(options={"reset_mask": np.array([True, False])})
    assert env.step(np.zeros(2, dtype=np.int64))[1].tolist() == [0, 1]


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


def test_several_frames_of_one_step_are_refused():
    env = FrameReward(
        ShownAs(clocks([0, 0, 1]), lambda frames: frames[:, None].repeat(3, 1)), RewardModelSettings(), Eye()
    )
    with pytest.raises(DataError, match="environment 0 showed 3 frames of 'base_camera' for 1 states"):
        played(env, 1)


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


def test_held_rewards_need_successes_after_one_another():
    assert rewards([0, 1, 1, 0, 1, 1, 1], steps=6, hold=2) == [[0, 1, 0, 0, 1, 1]]
    assert rewards([0, 0, 1], steps=4, hold=2) == [[0, 0, 0, 0]]  # successes of two episodes


def test_info_says_what_the_reward_is_made_of():
    env = FrameReward(clocks([0, 0.6, 0.2, 1]), RewardModelSettings(env_reward_weight=1.0), Eye())
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
def test_a_configuration_unlike_the_checkpoint_is_refused(checkpoint, changes, words):
    with pytest.raises(ConfigError, match=words):
        FrameReward(clocks([0, 1]), RewardModelSettings(checkpoint_path=checkpoint, **changes))


def test_equal_settings_pass_and_checkpoint_use_pretrain_wins(checkpoint, caplog):
    values = {"image_keys": ["base_camera"], "image_size": (3, SIDE, SIDE), "hidden_dim": 16, "num_spatial_blocks": 2}
    FrameScorer.open(RewardModelSettings(checkpoint_path=checkpoint, freeze_encoder=False, **values))
    assert not caplog.records
    settings = RewardModelSettings(checkpoint_path=checkpoint, use_pretrain=True, pretrained_encoder_path="nowhere.pt")
    assert FrameScorer.open(settings).config.use_pretrain is False
    assert "use_pretrain is True in the configuration and False in" in caplog.text


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"reward_type": "binry"}, "reward_type"),
        ({"reward_mode": "sometimes"}, "reward_mode"),
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


def test_frames_score_alike_stored_or_shown_or_alone(checkpoint):
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
