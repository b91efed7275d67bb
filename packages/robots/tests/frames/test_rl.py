"""`vlmrm frames rl`: PPO and SAC learn from each source of reward, and the comparison says what they truly learned."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from robot_worlds.squares import small_classifier
from stable_baselines3 import PPO, SAC

from vlmrm import cli
from vlmrm.errors import CheckpointError, ConfigError, DataError
from vlmrm.settings import load_file, validate
from vlmrm_robots.frames.checkpoint import save_classifier
from vlmrm_robots.frames.settings import RLSettings
from vlmrm_robots.policies.comparison import markdown, summarise, write_comparison
from vlmrm_robots.policies.environments import Counts, StableBaselinesEnv
from vlmrm_robots.policies.training import Point, PolicyRun, Trial, success_rate, train_policies, untrained_policy
from vlmrm_robots.trajectories.trajectory import open_folder

COLUMNS = [
    "source", "seed", "steps", "true_success_rate", "training_steps", "true_successes", "rewarded", "false_positives",
    "missed", "false_positive_share",
]  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A classifier of 16x16 frames that has learned nothing and says yes to about half of them."""
    model = small_classifier(image_size=(3, 16, 16))
    save_classifier(tmp_path / "model.safetensors", model, model.spec)
    return tmp_path / "model.safetensors"


def content(folder: Path, checkpoint: Path | None = None, **changes) -> dict:
    """The documented block around a tiny training on a lake of ice."""
    configuration = {
        "env": "FrozenLake-v1",
        "hyperparameters": {"n_steps": 16, "batch_size": 32, "n_epochs": 1},
        "total_steps": 128,
        "num_envs": 4,
        "max_steps": 20,
        "evaluate_every": 64,
        "evaluation_episodes": 10,
        "output_dir": str(folder / "rl"),
        "reward": {"use_reward_model": checkpoint is not None, "collect_data": False, "reward_model": {}},
    }
    if checkpoint is not None:
        configuration["reward"]["reward_model"] = {"checkpoint_path": str(checkpoint), "reward_type": "binary"}
    model = changes.pop("reward_model", {})
    configuration["reward"]["reward_model"] |= model
    return configuration | changes


def settings(folder: Path, checkpoint: Path | None = None, **changes) -> RLSettings:
    return validate(RLSettings, content(folder, checkpoint, **changes), "the test")


# Training ------------------------------------------------------------------------------------------------------------


def test_ppo_learns_the_lake_from_its_true_success(tmp_path):
    learning = {"n_steps": 32, "batch_size": 64, "n_epochs": 10, "learning_rate": 3e-3, "ent_coef": 0.01}
    [run] = train_policies(
        settings(tmp_path, hyperparameters=learning, num_envs=8, total_steps=6144, evaluate_every=2048)
    )
    assert run.random_success_rate < 0.3 and run.final > 0.6  # with six seeds at most 0.1, and at least 0.9
    assert [point.steps for point in run.points] == [0, 2048, 4096, 6144]


def test_ppo_compares_every_source_of_reward(tmp_path, checkpoint, capsys):
    sources = ["success", "learned", "both"]
    configuration = content(
        tmp_path, checkpoint, sources=sources, seeds=[0, 1], reward_model={"env_reward_weight": 1.0}
    )
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(configuration))
    cli.app(["frames", "rl", str(tmp_path / "rl.yaml")], result_action="return_value", exit_on_error=False)
    assert "| learned reward |" in capsys.readouterr().out
    table = pd.read_csv(tmp_path / "rl" / "comparison.csv")
    assert list(table.columns) == COLUMNS
    assert table.groupby(["source", "seed"])["steps"].apply(list).tolist() == [[0, 64, 128]] * 6
    assert table["true_success_rate"].between(0, 1).all()
    learned = table[table["source"] != "success"]
    assert learned["training_steps"].tolist() == [0, 64, 64] * 4
    assert table[table["source"] == "success"]["rewarded"].isna().all()
    summary = json.loads((tmp_path / "rl" / "comparison.json").read_text())
    assert list(summary["sources"]) == sources
    assert (tmp_path / "rl" / "comparison.md").read_text() == markdown(summary)
    for name in ("comparison.png", "comparison.svg", "both-seed0/policy.zip"):
        assert (tmp_path / "rl" / name).stat().st_size > 0


def test_an_unqualified_classifier_is_named_under_the_comparison(tmp_path, checkpoint):
    model = small_classifier(image_size=(3, 16, 16))
    update = {"qualified": False, "unqualified_because": "its AUC is 0.510"}
    save_classifier(checkpoint, model, model.spec.model_copy(update=update))
    configuration = settings(tmp_path, checkpoint, total_steps=64, reward_model={"accept_unqualified": True})
    for _ in range(2):  # a finished run is read
        summary = write_comparison(train_policies(configuration), configuration)
        assert markdown(summary).endswith("\nThe classifier does not qualify as a reward: its AUC is 0.510.\n")


def test_sac_with_a_learned_reward(tmp_path, checkpoint):
    small = {"learning_starts": 20, "batch_size": 16, "buffer_size": 500}
    [run] = train_policies(
        settings(tmp_path, checkpoint, env="MountainCarContinuous-v0", hyperparameters=small, sources=["learned"])
    )
    assert run.points[-1].steps == 128 and run.counts.training_steps == 128
    assert run.counts.rewarded == run.counts.false_positives  # nobody gets to the flag in 20 steps


def test_equal_seeds_train_equally_and_others_do_not(tmp_path, checkpoint):
    def trained(name: str, seed: int) -> PolicyRun:
        [run] = train_policies(settings(tmp_path / name, checkpoint, seeds=[seed]))
        return run

    first, again, different = trained("a", 0), trained("b", 0), trained("c", 1)

    def weights(run: PolicyRun) -> torch.Tensor:
        return PPO.load(run.folder / "policy.zip", device="cpu").policy.state_dict()["action_net.weight"]

    assert first.points == again.points and torch.equal(weights(first), weights(again))
    assert not torch.equal(weights(first), weights(different))


def test_evaluations_change_nothing_in_the_training(tmp_path, checkpoint):
    often, seldom = (
        train_policies(settings(tmp_path / str(every), checkpoint, evaluate_every=every))[0] for every in (32, 128)
    )
    assert len(often.points) == 5 and len(seldom.points) == 2
    assert often.counts == seldom.counts
    assert often.points[-1].true_success_rate == seldom.points[-1].true_success_rate


def test_the_policy_never_learns_success_from_episode_ends(tmp_path):
    """An action that succeeds goes on for max_steps in training, and ends the evaluation."""
    trial = Trial(settings(tmp_path, env="FrozenLake-v1"), None, "success", 0)
    way = [1, 1, 2, 1, 2, 2]  # to the goal
    training, evaluation = trial.training_environments(), trial.evaluation_environments()
    for env, stops in ((training, False), (evaluation, True)):
        env.reset()
        for action in way:
            _, reward, terminated, _, _ = env.step(np.full(env.num_envs, action))
        assert reward.all() and terminated.all() == stops


def test_evaluations_share_start_states_that_training_lacks(tmp_path):
    trial = Trial(settings(tmp_path, env="MountainCar-v0"), None, "success", 0)
    first, again = (trial.evaluation_environments().reset()[0] for _ in range(2))
    assert (first == again).all() and len(np.unique(first[:, 0])) == 10
    assert not np.isin(trial.training_environments().reset()[0][:, 0], first[:, 0]).any()


def test_the_success_rate_counts_only_first_episodes(tmp_path):
    configuration = settings(tmp_path, env="MountainCarContinuous-v0", max_steps=200)
    trial = Trial(configuration, None, "success", 0)
    assert success_rate(trial, lambda observations: np.where(observations[:, 1:] >= 0, 1.0, -1.0)) == 1.0
    assert success_rate(trial, lambda observations: np.zeros((len(observations), 1))) == 0.0


def test_frames_are_collected_while_a_policy_trains(tmp_path):
    folders = {"positive_dir": str(tmp_path / "positive"), "negative_dir": str(tmp_path / "negative")}
    reward = {"collect_data": True, "data_collection": folders, "reward_model": {"image_size": (3, 16, 16)}}
    train_policies(settings(tmp_path, reward=reward))
    files = open_folder(tmp_path / "negative")
    assert files[0].shapes["base_camera"] == (3, 16, 16) and files[0].metadata["environment"] == "FrozenLake-v1"


# Resuming ------------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_kept_while_others_join(tmp_path):
    [first] = train_policies(settings(tmp_path))
    file = first.folder / "run.json"
    before = file.stat().st_mtime_ns
    again, added = train_policies(settings(tmp_path, seeds=[0, 1]))
    assert again == first and file.stat().st_mtime_ns == before
    assert added.seed == 1 and added.folder != first.folder


def test_runs_of_other_settings_or_classifiers_never_mix(tmp_path, checkpoint):
    train_policies(settings(tmp_path, checkpoint))
    with pytest.raises(ConfigError, match=r"learned-seed0 is a run with total_steps 128, not 256: choose another"):
        train_policies(settings(tmp_path, checkpoint, total_steps=256))
    model = small_classifier(1, image_size=(3, 16, 16))
    save_classifier(checkpoint, model, model.spec)
    with pytest.raises(ConfigError, match="checkpoint_sha256"):
        train_policies(settings(tmp_path, checkpoint))
    with pytest.raises(ConfigError, match="checkpoint_sha256"):  # before the seed that is missing is trained
        train_policies(settings(tmp_path, checkpoint, seeds=[1, 0]))
    assert not (tmp_path / "rl" / "learned-seed1").exists()
    (tmp_path / "rl" / "learned-seed0" / "run.json").write_text("{}")
    with pytest.raises(DataError, match=r"run\.json cannot be read .* delete its folder"):
        train_policies(settings(tmp_path, checkpoint))


# The file ------------------------------------------------------------------------------------------------------------


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_model": {"reward_typ": "binary"}}, "did you mean reward_type"),
        ({"sources": ["success", "success"]}, "which names one twice"),
        ({"sources": ["both"]}, "env_reward_weight is 0: give it a weight"),
        ({"reward_model": {"reward_weight": 0}}, "reward_weight is 0, which takes the learned reward away"),
        ({"seeds": [-1]}, "a seed is at least 0"),
        ({"sources": ["learned"], "reward": {}}, "use_reward_model is false: set it to true"),
    ],
)
def test_settings_that_cannot_be_are_named(tmp_path, checkpoint, changes, message):
    with pytest.raises(ConfigError, match=message):
        settings(tmp_path, checkpoint, **changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"reward_model": {"checkpoint_path": "none.safetensors"}}, CheckpointError, "no reward model none.safe"),
        ({"reward_model": {"checkpoint_path": None}}, ConfigError, "reward_model has no checkpoint_path"),
        ({"reward_model": {"hidden_dim": 256}}, ConfigError, "hidden_dim is 256 in the configuration and 16"),
        ({"env": "Pong"}, ConfigError, "there is no simulator 'Pong'"),
        ({"algorithm": "sac"}, ConfigError, "the actions of FrozenLake-v1 are discrete: choose ppo"),
        ({"hyperparameters": {"n_step": 1}}, ConfigError, "hyperparameters do not suit ppo .*n_step"),
    ],
)
def test_mismatched_settings_are_named_before_any_training(tmp_path, checkpoint, changes, error, message):
    with pytest.raises(error, match=message):
        train_policies(settings(tmp_path, checkpoint, **changes))
    assert not (tmp_path / "rl").exists()


def test_a_classifier_of_another_simulator_is_warned_of(tmp_path, checkpoint, caplog):
    model = small_classifier(image_size=(3, 16, 16))
    save_classifier(checkpoint, model, model.spec.model_copy(update={"environment": "Acrobot-v1"}))
    train_policies(settings(tmp_path, checkpoint))
    assert "trained on Acrobot-v1, not on FrozenLake-v1" in caplog.text


@pytest.mark.parametrize(("name", "algorithm"), [("frames_rl", PPO), ("frames_sac", SAC)])
def test_shipped_configurations_train_by_the_learned_reward(name, algorithm):
    file = Path(__file__).resolve().parents[4] / "training_configs" / f"{name}.yaml"
    configuration = validate(RLSettings, load_file(file), name)
    assert configuration.sources == ["learned"] and configuration.reward.reward_model.reward_type == "binary"
    trial = Trial(configuration, None, "success", 0)  # without the classifier, which is yet to be trained
    with closing(StableBaselinesEnv(trial.training_environments())) as env:
        assert isinstance(untrained_policy(trial, env), algorithm)


# The comparison ------------------------------------------------------------------------------------------------------


def runs(folder: Path) -> list[PolicyRun]:
    def run(source, seed, rates, counts):
        points = [Point(10 * i, rate, count) for i, (rate, count) in enumerate(zip(rates, counts, strict=True))]
        return PolicyRun(source, seed, 0.1, points, folder)

    none = Counts()
    return [
        run("success", 0, (0.0, 1.0), (none, none)),
        run("learned", 0, (0.0, 0.5), (none, Counts(10, 3, 4, 1, 0))),
        run("learned", 1, (0.2, 0.7), (none, Counts(10, 3, 4, 2, 1))),
    ]


def test_the_summary_is_of_all_seeds(tmp_path):
    configuration = settings(
        tmp_path, None, reward={"use_reward_model": True}, sources=["success", "learned"], seeds=[0, 1]
    )
    summary = summarise(runs(tmp_path), configuration)
    learned = summary["sources"]["learned"]
    assert (learned["lowest"], learned["highest"], learned["steps"]) == (0.5, 0.7, 10)
    assert learned["true_success_rate"] == pytest.approx(0.6)
    assert learned["learned_rewards"] == {
        "training_steps": 20, "true_successes": 6, "rewarded": 8, "false_positives": 3, "missed": 1,
        "false_positive_share": 0.375,
    }  # fmt: skip
    assert summary["sources"]["success"]["learned_rewards"] is None
    assert "| learned reward | 60.0% | 50.0% to 70.0% | 8 | 3 (37.50%) | 1 |" in markdown(summary)
    assert "| true success | 100.0% | 100.0% to 100.0% | | | |" in markdown(summary)
