"""A frame classifier as one more model of the sweep: the ordinary table, report and intervals on pairs of episodes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from robot_worlds.squares import write_squares

from vlmrm import cli
from vlmrm.errors import BelowThreshold
from vlmrm_robots.frames.checkpoint import load_classifier
from vlmrm_robots.frames.frame_reward import FrameScorer
from vlmrm_robots.trajectories.trajectory import open_folder

DONE = """
rewards:
  - name: done
    reward_model: frame_success
    checkpoint_path: model.safetensors
    reward_type: continuous
    dtype: float32
    device: cpu
    batch_size: 64
    accept_unqualified: true
"""


def run(*words) -> None:
    cli.app([*map(str, words)], exit_on_error=False, result_action="return_value")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_squares(tmp_path, positive=10, negative=8)
    return tmp_path


def test_a_frame_classifier_is_evaluated_on_pairs(here):
    train = ["--output-checkpoint", "model.safetensors", "--image-size", 3, 32, 32, "--epochs", 8, "--lr", 1e-3]
    train += ["--hidden-dim", 16, "--num-spatial-blocks", 2, "--max-false-fires", 0.9, "--val-fraction", 0.5]
    with pytest.raises(BelowThreshold, match="of which at least 6 each are needed"):
        run("frames", "train", "--positive-dir", "positive", "--negative-dir", "negative", *train)
    run(
        "frames", "pairs", "positive", "negative", "--output", "pairs.jsonl", "--task", "Show a square.", "--frames", 4
    )
    (here / "done.yaml").write_text(DONE)
    run("eval", "--scorer", "reward:done.yaml", "--data", "pairs.jsonl", "--output-file", "table.csv")
    [row] = pd.read_csv("table/pairs.csv").to_dict("records")
    assert np.isnan(row["error"]) and row["sample_count"] == 30 and row["dropped_rows"] == 0
    assert row["accuracy/outcome"] == row["accuracy/truncation"] == row["accuracy/rewind"] == 1.0
    # All pairs have one prompt, the task: the ten episodes with a success are what is independent.
    [row] = pd.read_csv("table.csv").to_dict("records")
    assert 0.5 < row["pairs/low"] < row["pairs"] == 1.0
    scores = pd.read_parquet("table/pairs.scores.parquet").set_index("comparison_id")
    assert scores["cluster"].nunique() == 10
    # Each score is the classifier's probability for the last frame that the columns name.
    scorer = FrameScorer(load_classifier("model.safetensors", device="cpu"))
    files = {file.path.name: file for folder in ("positive", "negative") for file in open_folder(here / folder)}
    for line in map(json.loads, (here / "pairs.jsonl").read_text().splitlines()):
        for side in ("chosen", "rejected"):
            file, step = files[Path(line[f"{side}_episode"]).name], int(line[f"{side}_steps"].split()[-1])
            frame = torch.from_numpy(file.frame("base_camera", step))[None]
            expected = scorer.probabilities({"base_camera": frame}).item()
            assert scores.loc[line["id"], f"{side}_score"] == pytest.approx(expected, abs=1e-6)
    run("report", "table/pairs.csv", "--output", "report")
    page = (here / "report" / "report.html").read_text()
    assert "done" in page and "rewind" in page
