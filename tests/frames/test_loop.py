"""`vlmrm frames loop`: what becomes of rounds, with squares in place of a simulator and planted figures."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from squares import SIDE, small_classifier, square_trajectory

from vlmrm.commands.frames import app
from vlmrm.errors import BelowThreshold, ConfigError
from vlmrm.frames import loop
from vlmrm.frames.checkpoint import save_classifier
from vlmrm.frames.dataset import index_frames, outline_of
from vlmrm.frames.rl import Counts
from vlmrm.frames.trajectory import trajectory_paths, write_trajectory
from vlmrm.settings import load_file, validate

ROOT = Path(__file__).parents[2]
GOOD = {"precision": 0.99, "precision_low": 0.97, "failed_episodes": 12.0, "false_fires": 1.0}
BAD = {"precision": 0.5, "precision_low": 0.3, "failed_episodes": 12.0, "false_fires": 12.0}
CALLS = [
    "collect scripted", "collect random", "train on 12", "policy", "evaluate 5",
    "train on 17", "policy", "evaluate 5",
]  # fmt: skip


@dataclass
class Planted:
    """Stands for simulator, training and measurement: `figures` of each round's policy, and the calls."""

    figures: list[dict[str, float]]
    qualified: bool = True
    calls: list[str] = field(default_factory=list)

    def collect(self, settings):
        self.calls.append(f"collect {settings.policy}")
        data = settings.reward.data_collection
        positive = settings.policy == "scripted"
        self.write(data.positive_dir if positive else data.negative_dir, settings.episodes, 5 if positive else 0)

    def train(self, settings):
        index, _ = index_frames(settings.positive_dir, settings.negative_dir, ("base_camera",), (3, SIDE, SIDE))
        self.calls.append(f"train on {len(index.files)}")
        episodes = tuple(outline_of(file, ("base_camera",)) for file in index.files)
        reason = None if self.qualified else "it knows nothing"
        update = {"episodes": episodes, "qualified": self.qualified, "unqualified_because": reason}
        model = small_classifier()
        save_classifier(settings.output_checkpoint, model, config := model.spec.model_copy(update=update))
        return SimpleNamespace(config=config)

    def train_policies(self, settings):
        self.calls.append("policy")
        assert settings.sources == ["learned"] and settings.reward.use_reward_model
        self.write(settings.episodes_dir / "positive", 3, 5)
        self.write(settings.episodes_dir / "negative", 2, 0)
        counts = Counts(training_steps=100, true_successes=50, rewarded=60, false_positives=15)
        return [SimpleNamespace(final=0.5, counts=counts)]

    def evaluate(self, loaded, folders):
        self.calls.append(f"evaluate {sum(len(trajectory_paths(folder)) for folder in folders)}")
        return SimpleNamespace(metrics=self.figures.pop(0))

    def write(self, folder, episodes, successes):
        generator = np.random.default_rng(len(self.calls))
        for _ in range(episodes):
            write_trajectory(folder, square_trajectory(generator, successes))


@pytest.fixture
def planted(monkeypatch):
    def plant(*figures, **options):
        stub = Planted([*figures], **options)
        for name in ("collect", "train_policies", "evaluate"):
            monkeypatch.setattr(loop, name, getattr(stub, name))
        monkeypatch.setattr(loop, "train_classifier", stub.train)
        monkeypatch.setattr(loop, "summarise", str)
        return stub

    return plant


def looped(folder, **changes):
    content = {"env": "Acrobot-v1", "rounds": 3, "episodes": 8, "random_episodes": 4, "image_size": [3, SIDE, SIDE]}
    content |= {"output_dir": str(folder / "loop"), **changes}
    (folder / "loop.yaml").write_text(yaml.safe_dump(content))
    app(["loop", str(folder / "loop.yaml")], result_action="return_value")


def rounds_of(folder):
    return json.loads((folder / "loop" / "loop.json").read_text())["rounds"]


def test_a_policy_s_episodes_join_the_data_until_its_rewards_hold(planted, tmp_path, capsys):
    stub = planted(BAD, GOOD)
    looped(tmp_path)
    assert stub.calls == CALLS
    first, second = rounds_of(tmp_path)
    assert "50.0% of its policy's rewards are for successes" in first["reason"]
    assert "12 of 12 failed episodes are rewarded" in first["reason"]
    assert second["reason"] is None and (first["episodes"], second["episodes"]) == (12, 17)
    table = (tmp_path / "loop" / "loop.md").read_text()
    assert table.splitlines()[-1] == "| 2 | 17 | 50% | 60 | 15 (25.0%) | 1.0% | 1 of 12 | holds |"
    assert table in capsys.readouterr().out


def test_an_interrupted_loop_keeps_its_classifiers(planted, tmp_path):
    planted(GOOD)
    looped(tmp_path)
    again = planted(GOOD)
    looped(tmp_path)
    assert not [call for call in again.calls if call.startswith("train")]


def test_a_classifier_that_does_not_qualify_teaches_no_policy(planted, tmp_path):
    stub = planted(qualified=False)
    with pytest.raises(BelowThreshold, match="holds: the classifier does not qualify: it knows nothing"):
        looped(tmp_path)
    assert rounds_of(tmp_path)[0]["policy"] is None and "policy" not in stub.calls


def test_a_loop_that_never_holds_says_so(planted, tmp_path):
    planted(BAD, BAD)
    with pytest.raises(BelowThreshold, match="where min_precision is"):
        looped(tmp_path, rounds=2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"epoch": 4}}, "epoch"),
        ({"train": {"positive_dir": "x"}}, "train has positive_dir, which the loop itself decides"),
        ({"policy": {"env": "x", "seeds": [1]}}, "policy has env, seeds"),
        ({"policy": {"total_step": 4}}, "total_step"),
        ({"policy": {"hyperparameters": {"n_step": 64}}}, "unknown hyperparameter n_step: did you mean n_steps?"),
        ({"policy": {"hyperparameters": {"mood": 1}}}, "unknown hyperparameter mood: ppo and sac of .* have none"),
        ({"round": 4}, "round"),
        ({"min_precision": 1.0}, "min_precision"),
    ],
)
def test_settings_are_checked_before_anything_runs(planted, tmp_path, changes, words):
    stub = planted()
    with pytest.raises(ConfigError, match=words):
        looped(tmp_path, **changes)
    assert not stub.calls and not (tmp_path / "loop").exists()


def test_a_policy_that_is_never_rewarded_is_not_believed():
    figures = loop.PolicyFigures(0.0, 0, 0, float("nan"), 0.0, failed_episodes=50, false_fires=0)
    assert loop.doubt(loop.LoopSettings(env="Acrobot-v1"), figures) == "its policy's episodes are never rewarded"


def test_failed_episodes_that_are_rewarded_count_only_if_there_are_enough():
    settings = loop.LoopSettings(env="Acrobot-v1")
    few = loop.PolicyFigures(0.9, 100, 1, 0.99, 0.97, failed_episodes=3, false_fires=1)
    assert loop.doubt(settings, few) is None
    many = loop.PolicyFigures(0.1, 100, 1, 0.99, 0.97, failed_episodes=20, false_fires=12)
    assert "12 of 20 failed episodes are rewarded" in (loop.doubt(settings, many) or "")


@pytest.mark.parametrize("name", ["frames_loop", "frames_loop_cartpole"])
def test_the_shipped_configurations_are_of_loops(name):
    settings = validate(loop.LoopSettings, load_file(ROOT / "training_configs" / f"{name}.yaml"), "the file")
    assert loop.classifier_settings(settings, 1).epochs == settings.train["epochs"]
    assert loop.policy_settings(settings, 2).hyperparameters == settings.policy["hyperparameters"]
