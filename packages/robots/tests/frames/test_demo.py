"""`vlmrm frames demo` around a classifier that is there already and a training of a few steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from vlmrm import cli
from vlmrm.errors import ConfigError
from vlmrm.settings import load_file
from vlmrm_robots.frames.checkpoint import save_classifier
from vlmrm_robots.frames.classifier import FrameClassifier, classifier_config
from vlmrm_robots.policies import demo

ROOT = Path(__file__).resolve().parents[4]
TINY = {"n_steps": 16, "batch_size": 32}


@pytest.fixture
def output(tmp_path, monkeypatch):
    """A demo's folder with an untrained classifier; what comes of the shipped configuration is made short."""
    short = {"total_steps": 64, "num_envs": 2, "max_steps": 40, "evaluate_every": 32, "evaluation_episodes": 3}
    monkeypatch.setattr(demo, "load_file", lambda path: load_file(path) | short | {"hyperparameters": TINY})
    torch.manual_seed(0)
    figures = {"auc": 0.5, "validation_frames": 10, "validation_successes": 2, "precision": 0.2, "recall": 1.0}
    config = classifier_config(image_keys=("base_camera",), image_size=(3, 64, 64), metrics=figures)
    save_classifier(tmp_path / "reward_model.safetensors", FrameClassifier(config), config)
    return tmp_path


@pytest.mark.smoke
def test_it_says_what_the_policy_truly_learned(output, capsys):
    cli.app(["frames", "demo", "--output", str(output)], result_action="return_value", exit_on_error=False)
    text = capsys.readouterr().out
    summary = json.loads((output / "summary.json").read_text())
    assert summary["auc"] == 0.5 and 0 <= summary["true_success_rate"] <= 1
    assert summary["false_positives"] <= summary["rewarded"] <= 64
    assert "using" in text and "its AUC is 0.5000" in text
    for name in ("rl/comparison.png", "rl/comparison.csv", "summary.json"):
        assert str(output / name) in text and (output / name).is_file()


def test_an_impossible_configuration_is_named_before_work(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "CONFIG", tmp_path / "frames_rl.yaml")
    monkeypatch.setattr(demo, "classifier", lambda *args: pytest.fail("it began to collect"))
    with pytest.raises(ConfigError, match=r"there is no configuration file .*frames_rl\.yaml"):
        demo.run_demo(tmp_path / "demo")
    assert not (tmp_path / "demo").exists()
