"""The example frames_loop.py: what becomes of rounds, with squares in place of a simulator and planted figures."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from robot_worlds.squares import SIDE, small_classifier, square_trajectory

from vlmrm.data.comparisons import data_fingerprint
from vlmrm.errors import BelowThreshold, ConfigError
from vlmrm.settings import load_file, validate
from vlmrm_robots.frames.checkpoint import save_classifier
from vlmrm_robots.frames.dataset import index_frames, outline_of
from vlmrm_robots.policies.environments import Counts
from vlmrm_robots.policies.training import episodes_folder
from vlmrm_robots.trajectories.trajectory import open_folder, trajectory_paths, write_trajectory

EXAMPLES = Path(__file__).parents[2] / "examples"


def import_file(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


loop = import_file(EXAMPLES / "frames_loop.py")
GOOD = {"precision": 0.99, "precision_low": 0.97, "failed_episodes": 12.0, "false_fires": 1.0}
BAD = {"precision": 0.5, "precision_low": 0.3, "failed_episodes": 12.0, "false_fires": 12.0}
CALLS = [
    "collect scripted", "collect random", "train on 12", "policy", "evaluate 5",
    "train on 17", "policy", "evaluate 5",
]  # fmt: skip


class Killed(BaseException):
    """The end of a process, which nothing handles."""


@dataclass
class Planted:
    """Stands for simulator, training and measurement: `figures` of each round's policy, and the calls."""

    figures: list[dict[str, float]]
    qualified: bool = True
    calls: list[str] = field(default_factory=list)
    reference: float = 0.5  # the true success rate with the true success as the reward
    references: int = 0
    killed_at: int | None = None  # the call at which the process ends

    def call(self, name):
        self.calls.append(name)
        if self.killed_at == len(self.calls) - 1:
            raise Killed

    def collect(self, settings):
        self.call(f"collect {settings.policy}")
        data = settings.reward.data_collection
        positive = settings.policy == "scripted"
        folder = data.positive_dir if positive else data.negative_dir
        if not trajectory_paths(folder):
            self.write(folder, settings.episodes, 5 if positive else 0)

    def train(self, settings):
        index, _ = index_frames(settings.positive_dir, settings.negative_dir, ("base_camera",), (3, SIDE, SIDE))
        self.call(f"train on {len(index.files)}")
        episodes = tuple(outline_of(file, ("base_camera",)) for file in index.files)
        reason = None if self.qualified else "it knows nothing"
        data = data_fingerprint([str(settings.positive_dir), str(settings.negative_dir)])
        update = {"episodes": episodes, "qualified": self.qualified, "unqualified_because": reason}
        update["data_fingerprint"] = data
        model = small_classifier()
        save_classifier(settings.output_checkpoint, model, config := model.spec.model_copy(update=update))
        return SimpleNamespace(config=config)

    def train_policies(self, settings):
        if settings.sources == ["success"]:
            self.references += 1
            return [SimpleNamespace(final=self.reference)]
        self.call("policy")
        assert settings.sources == ["learned"] and settings.reward.use_reward_model
        folder = episodes_folder(settings, "learned", settings.seeds[0])
        if not folder.exists():  # a finished run is read
            self.write(folder / "positive", 3, 5)
            self.write(folder / "negative", 2, 0)
        counts = Counts(training_steps=100, true_successes=50, rewarded=60, false_positives=15)
        return [SimpleNamespace(final=0.5, counts=counts)]

    def evaluate(self, loaded, folders):
        self.call(f"evaluate {sum(len(trajectory_paths(folder)) for folder in folders)}")
        return SimpleNamespace(metrics=self.figures.pop(0))

    def write(self, folder, episodes, successes):
        generator = np.random.default_rng(len(self.calls))
        folder.mkdir(parents=True, exist_ok=True)
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


def looped(folder, *words, **changes):
    content = {"env": "Acrobot-v1", "rounds": 3, "episodes": 8, "random_episodes": 4, "image_size": [3, SIDE, SIDE]}
    content |= {"output_dir": str(folder / "loop"), **changes}
    (folder / "loop.yaml").write_text(yaml.safe_dump(content))
    loop.main([str(folder / "loop.yaml"), *words])


def rounds_of(folder):
    return json.loads((folder / "loop" / "loop.json").read_text())["rounds"]


def test_policy_episodes_join_the_data_until_rewards_hold(planted, tmp_path, capsys):
    stub = planted(BAD, GOOD)
    looped(tmp_path)
    assert stub.calls == CALLS
    first, second = rounds_of(tmp_path)
    assert "50.0% of its policy's rewards are for successes" in first["reason"]
    assert "12 of 12 failed episodes are rewarded" in first["reason"]
    assert second["reason"] is None and (first["episodes"], second["episodes"]) == (12, 17)
    table = (tmp_path / "loop" / "loop.md").read_text()
    assert table.splitlines()[-1] == "| 2 | 17 | 50% | 50% | 60 | 15 | 1.0% | 1 of 12 | holds |"
    assert table in capsys.readouterr().out


@pytest.mark.parametrize("step", range(len(CALLS)))
def test_a_killed_loop_ends_like_an_unkilled_one(planted, tmp_path, step):
    stub = planted(BAD, GOOD)
    stub.killed_at = step
    with pytest.raises(Killed):
        looped(tmp_path)
    stub.killed_at = None
    stub.figures = [BAD, GOOD]
    looped(tmp_path)
    trained = [call for call in stub.calls if call.startswith("train on")]
    assert list(dict.fromkeys(trained)) == ["train on 12", "train on 17"]
    assert [one["episodes"] for one in rounds_of(tmp_path)] == [12, 17]
    loop_dir = tmp_path / "loop"
    for number, count in ((1, 12), (2, 17)):
        assert len(list((loop_dir / f"round-{number}" / "data").glob("*/*.safetensors"))) == count
    assert (loop_dir / "loop.md").read_text().endswith("| 1.0% | 1 of 12 | holds |\n")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"episodes": 9}, "holds a loop with episodes 8, not 9"),
        ({"train": {"epochs": 3}}, r"holds a loop with train \{\}, not \{'epochs': 3\}"),
    ],
)
def test_another_loop_in_the_folder_is_refused(planted, tmp_path, changes, words):
    planted(GOOD)
    looped(tmp_path)
    stub = planted(GOOD)
    with pytest.raises(ConfigError, match=words):
        looped(tmp_path, **changes)
    assert not stub.calls


def test_a_loop_failing_before_episodes_may_be_corrected(planted, tmp_path):
    stub = planted(GOOD)
    stub.killed_at = 0
    with pytest.raises(Killed):
        looped(tmp_path, env="Acrobat-v1")
    stub.killed_at = None
    looped(tmp_path)
    assert json.loads((tmp_path / "loop" / "settings.json").read_text())["env"] == "Acrobot-v1"


def test_a_classifier_of_other_episodes_is_refused(planted, tmp_path):
    planted(GOOD)
    looped(tmp_path)
    [first, *_] = trajectory_paths(tmp_path / "loop" / "round-1" / "data" / "positive")
    first.unlink()
    stub = planted(GOOD)
    with pytest.raises(ConfigError, match=r"was trained on other episodes than .*data has now: restore them"):
        looped(tmp_path)
    assert "policy" not in stub.calls


def test_an_unqualified_classifier_teaches_no_policy(planted, tmp_path):
    stub = planted(qualified=False)
    with pytest.raises(BelowThreshold, match="holds: the classifier does not qualify: it knows nothing"):
        looped(tmp_path)
    assert rounds_of(tmp_path)[0]["policy"] is None and "policy" not in stub.calls


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"positive_dir": "x"}}, "train has positive_dir, which the loop itself decides"),
        ({"policy": {"env": "x", "seeds": [1]}}, "policy has env, seeds"),
        ({"policy": {"hyperparameters": {"n_step": 64}}}, "unknown hyperparameter n_step: did you mean n_steps?"),
    ],
)
def test_settings_are_checked_before_anything_runs(planted, tmp_path, changes, words):
    stub = planted()
    with pytest.raises(ConfigError, match=words):
        looped(tmp_path, **changes)
    assert not stub.calls and not (tmp_path / "loop").exists()


def test_a_policy_behind_true_success_training_never_holds(planted, tmp_path):
    stub = planted(GOOD, GOOD)
    stub.reference = 0.6  # its own is 0.5
    with pytest.raises(BelowThreshold, match=r"succeeds in 50.0% of episodes, less than 0\.9 times the 60\.0% of one"):
        looped(tmp_path, rounds=2)
    assert [one["reference"] for one in rounds_of(tmp_path)] == [0.6, 0.6]
    stub.figures = [GOOD, GOOD]
    looped(tmp_path, min_success=0.8, output_dir=str(tmp_path / "easier"))
    looped(tmp_path, min_success=0, output_dir=str(tmp_path / "never"))
    assert stub.references == 3  # it is not trained where nothing depends on it


def test_an_accepted_unqualified_classifier_teaches_but_never_holds(planted, tmp_path):
    stub = planted(GOOD, GOOD, qualified=False)
    with pytest.raises(BelowThreshold, match="holds: the classifier does not qualify: it knows nothing"):
        looped(tmp_path, rounds=2, reward_model={"accept_unqualified": True})
    assert stub.calls.count("policy") == 2 and [one["episodes"] for one in rounds_of(tmp_path)] == [12, 17]


@pytest.mark.parametrize(
    ("figures", "doubt"),
    [
        ({"precision": None, "precision_low": 0.0, "failed_episodes": 50, "false_fires": 0}, "are never rewarded"),
        ({"precision": 0.99, "precision_low": 0.97, "failed_episodes": 3, "false_fires": 1}, None),  # too few
        ({"precision": 0.99, "precision_low": 0.97, "failed_episodes": 20, "false_fires": 12}, "12 of 20 failed"),
    ],
)
def test_policy_rewards_are_doubted_by_their_figures(figures, doubt):
    found = loop.doubts(loop.LoopSettings(env="Acrobot-v1"), figures)

    assert (doubt in found[0]) if doubt else found == []


@pytest.mark.parametrize("name", ["frames_loop", "frames_loop_cartpole"])
def test_the_shipped_configurations_are_of_loops(name):
    settings = validate(loop.LoopSettings, load_file(EXAMPLES / f"{name}.yaml"), "the file")
    second = loop.Round(settings, 2)
    assert second.training().epochs == settings.train["epochs"]
    assert second.policy().hyperparameters == settings.policy["hyperparameters"]


def test_words_override_the_file(planted, tmp_path):
    stub = planted(GOOD)
    looped(tmp_path, "--episodes", "5", "--train.epochs", "3", "--policy.hyperparameters.n_steps", "64", train=None)
    kept = json.loads((tmp_path / "loop" / "settings.json").read_text())
    assert kept["episodes"] == 5 and kept["train"] == {"epochs": 3} and "train on 9" in stub.calls
    assert kept["policy"] == {"hyperparameters": {"n_steps": 64}}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--episode", "5"], r"unknown key episode \(did you mean episodes\?\)"),
        (["--episodes"], "--episodes is no key with a value"),
        (["episodes", "5"], "episodes is no key with a value"),
        (["--seed.x", "5"], "seed is 7: it has no key x"),
        (["--train", "{epochs"], "the value of --train is not valid YAML: {epochs"),
    ],
)
def test_words_that_are_no_keys_are_refused(planted, tmp_path, words, message):
    stub = planted()
    with pytest.raises(ConfigError, match=message):
        looped(tmp_path, *words, seed=7)
    assert not stub.calls


def test_the_program_exits_with_its_error_status(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["frames_loop.py", str(tmp_path / "no.yaml")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "frames_loop.py"), run_name="__main__")
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("error: there is no configuration file")


def test_the_loop_takes_custom_success_and_demonstrator(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("cart.py").write_text("def right(observations):\n    return [1] * len(observations)\n")
    content = {"env": "CartPole-v1", "success": "observation.0 > 0.05", "demonstrator": "cart:right", "rounds": 1}
    content |= {"episodes": 8, "random_episodes": 3, "max_steps": 20, "image_size": (3, 16, 16), "output_dir": "loop"}
    policy = {"total_steps": 64, "num_envs": 2, "evaluation_episodes": 4, "max_steps": 20, "evaluate_every": 64}
    content["policy"] = policy | {"hyperparameters": {"n_steps": 32, "batch_size": 32}}
    content |= {"train": {"epochs": 1}, "reward_model": {"accept_unqualified": True}}
    settings = validate(loop.LoopSettings, content, "the test")
    [played] = loop.run_loop(settings)
    assert played["episodes"] == 11
    assert {file.metadata["environment"] for file in open_folder(Path("loop/round-1/data/positive"))} == {
        "CartPole-v1"
    }
    with pytest.raises(ConfigError, match="policy has success, which the loop itself decides"):
        loop.run_loop(validate(loop.LoopSettings, content | {"policy": {"success": "terminated"}}, "the test"))
