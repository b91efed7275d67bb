"""Any environment is collected from: Gymnasium's, one that a module registers, or what a user's function returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from robot_worlds.squares import settings as training_settings

from vlmrm.errors import ConfigError, DataError
from vlmrm.settings import validate
from vlmrm_robots.frames.checkpoint import load_classifier
from vlmrm_robots.frames.collecting import collect
from vlmrm_robots.frames.collector import RewardDataCollector
from vlmrm_robots.frames.environments import make_environments
from vlmrm_robots.frames.evaluation import qualify_classifier
from vlmrm_robots.frames.frame_reward import FrameReward, FrameScorer
from vlmrm_robots.frames.settings import CollectSettings, Limits, RewardModelSettings
from vlmrm_robots.frames.training import train_classifier
from vlmrm_robots.trajectories.trajectory import Trajectory, open_folder, write_trajectory

ROOM = '''
import gymnasium as gym
import numpy as np


class Room(gym.Env):
    """A lamp is on after four steps of action 1; two cameras see it, and `side` sees a lamp that tells nothing too."""

    observation_space = gym.spaces.Dict({"pixels": gym.spaces.Dict({
        "top": gym.spaces.Box(0, 255, (24, 48, 3), np.uint8), "side": gym.spaces.Box(0, 255, (24, 48, 3), np.uint8),
    })})
    action_space = gym.spaces.Discrete(2)

    def __init__(self, lamp=4, broken=None):
        self.lamp, self.broken = lamp, broken

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.on = 0
        return self.shown(), {"is_success": True}  # of another task

    def step(self, action):
        self.on += int(action)
        if self.broken == "step" and self.on == 3:
            raise RuntimeError("the lamp burst")
        return self.shown(), 0.0, False, False, {"lit": self.on / self.lamp}

    def shown(self):
        views = {name: self.np_random.integers(0, 60, (24, 48, 3), dtype=np.uint8) for name in ("top", "side")}
        views["top"][:, 24:] = self.np_random.integers(0, 256)
        views["top"][8:16, 8:16] = 255 if self.on >= self.lamp else 0
        if self.broken == "size" and self.on > 2:
            views["top"] = views["top"][:20]
        return {"pixels": views}


def policy(observations):
    return np.ones(len(observations["pixels"]["top"]), dtype=np.int64)


def three(observations):
    return np.zeros(3)


def vector():
    return gym.vector.SyncVectorEnv([Room])


gym.register("Lamp/Room-v0", Room)
'''
BURST, CUT = (
    {"policy": "lamp_room:policy", "noise": 0, "env_options": {"broken": broken}} for broken in ("step", "size")
)
CROP = {"top": [0, 0, 0.5, 1]}


@pytest.fixture(autouse=True)
def room(tmp_path, monkeypatch) -> None:
    """A module of the user's in the working directory."""
    (tmp_path / "lamp_room.py").write_text(ROOM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "lamp_room", raising=False)
    monkeypatch.delitem(gym.registry, "Lamp/Room-v0", raising=False)


def settings(name: str, folder: str = "data", **changes: Any) -> CollectSettings:
    data = {"positive_dir": f"{folder}/positive", "negative_dir": f"{folder}/negative"}
    model = {"image_size": (3, 16, 16)}
    values = {"env": name, "episodes": 6, "max_steps": 10, "num_envs": 2, "policy": "random"}
    data |= {key: changes.pop(key) for key in ("crop", "image_keys") if key in changes}
    return validate(
        CollectSettings, values | {"reward": {"data_collection": data, "reward_model": model}} | changes, "the test"
    )


def labels(folder: str = "data") -> list[list[float]]:
    return [
        file.labels.tolist()
        for side in ("positive", "negative")
        if any(Path(folder, side).iterdir())
        for file in open_folder(Path(folder, side))
    ]


def test_a_final_reward_labels_no_failures_after_it():
    """The lake rewards the step to the goal alone: what came after it would be labelled as failures."""
    options = {"success": "reward > 0", "image_keys": ["render"], "episodes": 8, "policy": "scripted"}
    collect(settings("FrozenLake-v1", stop_at_success=False, **options))
    reached = [values for values in labels() if sum(values)]
    assert reached and all(values[-1] == 1 == sum(values) for values in reached)


@pytest.mark.parametrize("name", ["lamp_room:Room", "lamp_room:Lamp/Room-v0"])
def test_a_class_or_module_id_gets_its_options(name):
    choice = {"env_options": {"lamp": 3}, "success": "info.lit >= 1", "policy": "lamp_room:policy", "noise": 0}
    collect(settings(name, image_keys=["top", "side"], **choice))
    assert labels() == [[0, 0] + [1] * 8] * 6  # a reset has no declared label
    assert open_folder(Path("data/positive"))[0].keys == ["top", "side"]
    played = collect(settings(name, image_keys=["top", "side"], **choice))
    assert played.earlier == 6 and played.frames == 0


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("CartPol-v1", {}, r"there is no simulator 'CartPol-v1': did you mean CartPole-v1\?"),
        ("lamp_room:Roon", {}, r"no simulator 'lamp_room:Roon': did you mean Room\?"),
        ("no_lamp_room:Room", {}, "there is no module no_lamp_room"),
        (
            "CartPole-v1",
            {"success": None},
            "has no success of its own: declare one with success, as info.KEY",
        ),
        ("lamp_room:Room", {"success": "info.lid > 1"}, "there is no lid: choose from lit"),
        ("lamp_room:Room", {"env_options": {"lamps": 1}}, "lamp_room:Room cannot be made: TypeError: .*lamps"),
        ("lamp_room:Room", {"policy": "scripted"}, "lamp_room:Room has no scripted policy: give policy random"),
        ("FrozenLake-v1", {"policy": "scriptd"}, "there is no policy scriptd"),
        ("lamp_room:vector", {}, "returns SyncVectorEnv.* wrap a vector of them in RewardDataCollector"),
        ("lamp_room:Room", {"image_keys": ["topp"]}, "shows no image 'topp': it shows top, side.*'render' is"),
        ("lamp_room:Room", {"image_keys": ["render"]}, "make it with render_mode='rgb_array'"),
        ("lamp_room:Room", {"policy": "lamp_room:three"}, r"three returns actions of shape \[3\], .* are \[2\]"),
        ("lamp_room:Room", BURST, r"Room.* raises RuntimeError in a step \(the lamp burst\)"),
        ("lamp_room:Room", CUT, r"shows 'top' as \[3, 20, 48\] after \[3, 24, 48\]: an episode has frames"),
        ("lamp_room:Room", {"crop": {"top": [0, 0, 90, 9]}}, "not within the images 'top', 48 wide and 24 high"),
    ],
)
def test_what_cannot_be_collected_is_refused_by_name(name, changes, message):
    with pytest.raises((ConfigError, DataError), match=message):
        collect(settings(name, **{"success": "info.lit >= 1", "image_keys": ["top"], "episodes": 2} | changes))
    assert not list(Path().glob("data/*/*.safetensors"))


def test_two_cameras_with_crop_reach_the_reward(caplog):
    options = {"image_keys": ["top", "side"], "success": "info.lit >= 1", "policy": "lamp_room:policy", "noise": 0.5}
    collect(settings("lamp_room:Room", crop=CROP, episodes=20, **options))
    write_unlit()
    trained = train_classifier(
        training_settings(Path("data"), image_key=("top", "side"), image_size=(3, 16, 16), epochs=4, use_cpu=True)
    )
    assert trained.config.crop == {"top": (0, 0, 0.5, 1)}
    assert trained.config.metrics["auc"] > 0.95

    model = RewardModelSettings(checkpoint_path=trained.path, accept_unqualified=True, reward_type="continuous")
    scorer = FrameScorer.open(model)
    shared = {"seed": 3, "success": "info.lit >= 1", "keys": ["top", "side"], "image_size": (3, 16, 16)}
    shared |= {"stop_at_success": False}
    cropped = FrameReward(make_environments("lamp_room:Room", 2, crop=scorer.config.crop, **shared), model, scorer)
    import lamp_room  # ty: ignore[unresolved-import]

    raw = SyncVectorEnv([lamp_room.Room] * 2, autoreset_mode=AutoresetMode.SAME_STEP)  # the user's own, whole frames
    whole = FrameReward(raw, model, scorer)
    cropped.reset(seed=3), whole.reset(seed=3)
    for _ in range(6):
        rewards = [env.step(np.ones(2, dtype=int))[1] for env in (cropped, whole)]
        assert (rewards[0] == rewards[1]).all()
    assert (rewards[0] > trained.config.threshold).all()

    with pytest.raises(ConfigError, match=r"the environment shows the crop \{\}, and the classifier was trained on"):
        FrameReward(make_environments("lamp_room:Room", 2, **shared), model, scorer)
    collect(settings("lamp_room:Room", "whole", episodes=4, **options))
    with pytest.raises(DataError, match=r"was trained on \{.*, and these frames have the crop \{\}"):
        qualify_classifier(load_classifier(trained.path), open_folder(Path("whole/positive")), Limits())
    collect(settings("lamp_room:Room", "data", episodes=22, seed=9, **options))
    with pytest.raises(DataError, match=r"has the crop .* a classifier looks at frames of one"):
        train_classifier(training_settings(Path("data"), image_key=("top", "side"), image_size=(3, 16, 16)))


def write_unlit() -> None:
    """Store failures: with the policy of the test, all episodes light the lamp."""
    for file in open_folder(Path("data/positive"))[:6]:
        dark = np.flatnonzero(~file.successes)
        images = {key: file.frames(key)[dark] for key in file.keys}
        metadata = {key: file.metadata[key] for key in ("environment", "crop")} | {"seed": f"{file.path.name}-dark"}
        write_trajectory(Path("data/negative"), Trajectory(images, file.labels[dark], metadata))


def test_a_custom_loop_crops_and_scales_too():
    import lamp_room  # ty: ignore[unresolved-import]

    class Labelled(lamp_room.Room):
        def reset(self, **options):
            return super().reset(**options)[0], {}

        def step(self, action):
            *result, info = super().step(action)
            return *result, info | {"success": info["lit"] >= 1}

    env = SyncVectorEnv([Labelled], autoreset_mode=AutoresetMode.SAME_STEP)
    collector = RewardDataCollector(env, "a", "b", ["top"], image_size=(1, 12, 12), crop={"top": (8, 8, 16, 16)})
    collector.reset(seed=0)
    for _ in range(5):
        collector.step(np.ones(1, dtype=int))
    collector.close()
    [file] = open_folder(Path("a"))
    assert file.metadata["crop"] == '{"top": [8, 8, 16, 16]}' and file.labels.tolist() == [0, 0, 0, 1, 1]
    assert (file.frames("top").mean(axis=(1, 2, 3)) == [0, 0, 0, 255, 255]).all()
