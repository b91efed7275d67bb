"""Scores after each frame of an episode, and the value-order correlation against scipy's."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.stats import spearmanr
from squares import write_squares

from vlmrm import cli
from vlmrm.errors import ConfigError
from vlmrm.frames.progress import Scored, score_episodes, value_order
from vlmrm.frames.trajectory import open_folder


@pytest.fixture
def files(tmp_path):
    root = write_squares(tmp_path, positive=3, negative=2)
    return open_folder(root / "positive") + open_folder(root / "negative")


def test_the_mean_is_that_of_scipy_s_by_episode_and_its_interval_covers(files):
    chance = np.random.default_rng(0)

    def episodes(count: int) -> list[Scored]:
        lengths = chance.integers(4, 12, count)
        return [Scored(files[0], range(n), np.arange(n) / 3 + chance.normal(size=n)) for n in lengths]

    def reference(scored) -> float:
        return np.mean([spearmanr(e.steps, e.scores).statistic for e in scored])

    truth = reference(episodes(4000))
    inside = 0
    for _ in range(200):
        sample = episodes(20)
        found = value_order([*sample, Scored(files[0], [0], [1.0])])  # of one frame: no order
        assert found.value == pytest.approx(reference(sample)) and found.n == 20
        inside += found.low <= truth <= found.high
    assert 0.9 <= inside / 200 <= 1.0
    assert value_order([Scored(files[0], range(5), range(5, 0, -1))] * 3).value == pytest.approx(-1)
    assert np.isnan(value_order([]).value)


def test_the_command_writes_the_scores_of_episodes_up_to_success(files, tmp_path, tiny_reward_model, capsys):
    output = tmp_path / "progress.jsonl"
    words = ["frames", "progress", tmp_path / "positive", tmp_path / "negative", "--model", tiny_reward_model]
    words += ["--output", output, "--task", "Show a square.", "--frames", "4"]
    cli.app([*map(str, words)], exit_on_error=False, result_action="return_value")
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["success"] for line in lines] == [True] * 3 + [False] * 2
    assert lines[0]["steps"] == [0, 2, 3, 5] and lines[4]["steps"] == [0, 3, 6, 9]  # the sixth of ten is a success
    assert len(lines[0]["scores"]) == 4 and len(set(lines[0]["scores"])) == 4
    said = capsys.readouterr().out
    assert "value-order correlation of 3 successes" in said and "of 2 failures" in said


def test_one_frame_has_no_order(files):
    with pytest.raises(ConfigError, match="1 frames of an episode have no order"):
        score_episodes(None, files, task="", frames=1, image_key=None)
