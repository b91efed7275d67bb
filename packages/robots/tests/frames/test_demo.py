"""`vlmrm frames demo` in its smallest: it collects, trains, measures on other episodes and rewards."""

from __future__ import annotations

import json

import pytest

from vlmrm import cli
from vlmrm_robots.frames import demo


@pytest.mark.smoke
def test_it_measures_the_classifier_and_its_reward(tmp_path, monkeypatch, capsys):
    short = {"EPISODES": {"scripted": 3, "random": 3}, "EPOCHS": 1, "STEPS": 5, "ENVIRONMENTS": 2}
    for name, value in short.items():
        monkeypatch.setattr(demo, name, value)
    for _ in range(2):  # an interrupted one goes on: here there is all of it
        cli.app(["frames", "demo", "--output", str(tmp_path)], result_action="return_value", exit_on_error=False)
    text = capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["new_episodes"] == 6 and summary["steps"] == 10
    assert summary["rewarded"] - summary["false_positives"] == summary["successes"] - summary["missed"]
    assert "6 episodes were collected before" in text or "3 episodes were collected before" in text
    assert "it does not qualify as a reward" in text and str(tmp_path / "summary.json") in text
