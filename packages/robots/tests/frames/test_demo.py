"""`vlmrm frames demo` around a classifier that is there already: it collects, measures it and rewards."""

from __future__ import annotations

import json

import pytest
import torch

from vlmrm import cli
from vlmrm_robots.frames import demo
from vlmrm_robots.frames.checkpoint import save_classifier
from vlmrm_robots.frames.classifier import FrameClassifier, classifier_config


@pytest.mark.smoke
def test_it_measures_the_classifier_and_its_reward(tmp_path, monkeypatch, capsys):
    for name, value in {"EPISODES": {"scripted": 1, "random": 1}, "STEPS": 5, "ENVIRONMENTS": 2}.items():
        monkeypatch.setattr(demo, name, value)
    torch.manual_seed(0)
    config = classifier_config(image_keys=("base_camera",), image_size=(3, 64, 64))
    save_classifier(tmp_path / "reward_model.safetensors", FrameClassifier(config), config)
    cli.app(["frames", "demo", "--output", str(tmp_path)], result_action="return_value", exit_on_error=False)
    text = capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["new_episodes"] == 2 and summary["steps"] == 10
    assert summary["rewarded"] - summary["false_positives"] == summary["successes"] - summary["missed"]
    assert "it does not qualify as a reward" in text and str(tmp_path / "summary.json") in text
