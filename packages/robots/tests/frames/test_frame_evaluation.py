"""`vlmrm frames qualify`: figures of any scorer on new episodes, by frame and by episode, and what follows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from robot_worlds.squares import SIDE, settings, write_squares
from scipy.special import logit
from sklearn.metrics import precision_score, recall_score, roc_auc_score

from vlmrm.errors import BelowThreshold, CheckpointError, ConfigError, DataError
from vlmrm_robots.commands import app
from vlmrm_robots.frames.checkpoint import load_classifier, read_config, save_classifier
from vlmrm_robots.frames.foreign_classifiers import export_classifier
from vlmrm_robots.frames.frame_reward import FrameScorer
from vlmrm_robots.frames.settings import RewardModelSettings
from vlmrm_robots.trajectories.pictures import PITCH
from vlmrm_robots.trajectories.trajectory import open_folder


def new_squares(root, positive=10, negative=8):
    """Write episodes that no training has, and return their folders."""
    write_squares(root, positive, negative, spread=4, seed=7)
    return [str(root / "positive"), str(root / "negative")]


def evaluated(*words):
    app(["qualify", *map(str, words), "--ignore-around", "0"], result_action="return_value")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """The checkpoint of a classifier that has learned squares."""
    from vlmrm_robots.frames.training import train_classifier

    root = write_squares(tmp_path_factory.mktemp("squares"), positive=16, negative=16, spread=4)
    train_classifier(settings(root, epochs=8, batch_size=16, val_fraction=0.4))
    return root / "model.safetensors"


def test_figures_match_scikit_learn_by_frame_and_episode(classifier, tmp_path, capsys):
    folders = new_squares(tmp_path)
    evaluated(classifier, *folders, "--output", tmp_path / "eval.json", "--threshold", "0.3")
    written = json.loads((tmp_path / "eval.json").read_text())
    scorer = FrameScorer(load_classifier(classifier, device="cpu"))
    files = [file for folder in folders for file in open_folder(folder)]
    probabilities = [scorer.probabilities({"base_camera": file.frames("base_camera")}) for file in files]
    scores, labels = np.concatenate(probabilities), np.concatenate([file.labels for file in files])
    figures = written["metrics"]
    assert figures["auc"] == pytest.approx(roc_auc_score(labels, scores))
    assert figures["recall"] == pytest.approx(recall_score(labels, scores > 0.3))
    assert figures["precision"] == pytest.approx(precision_score(labels, scores > 0.3))
    episodes = [(values, file.labels == 1) for values, file in zip(probabilities, files, strict=True)]
    failed = [values for values, success in episodes if not success.any()]
    assert (figures["failed_episodes"], figures["successful_episodes"]) == (8, 10)
    assert figures["false_fires"] == sum((values > 0.3).any() for values in failed)
    assert figures["validation_frames"] == 180 and written["threshold"] == 0.3 and written["qualified"]
    assert "18 trajectories" not in (words := capsys.readouterr().out) and "8 trajectories, 80 frames" in words


def constant(model):
    torch.nn.init.zeros_(model.head.weight)


def eager(model):
    model.head.bias.add_(30.0)


@pytest.mark.parametrize("plant", [constant, eager])
def test_planted_classifiers_without_use_do_not_qualify(plant, classifier, tmp_path):
    loaded = load_classifier(classifier, device="cpu")
    plant(loaded.model)
    save_classifier(tmp_path / "planted", loaded.model, loaded.config)
    with pytest.raises(BelowThreshold, match="does not qualify as a reward on these episodes"):
        evaluated(tmp_path / "planted", *new_squares(tmp_path), "--output-checkpoint", tmp_path / "planted")
    with pytest.raises(CheckpointError, match="does not qualify as a reward"):
        FrameScorer.open(RewardModelSettings(checkpoint_path=tmp_path / "planted"))


def test_training_episodes_are_left_out_of_evaluation(classifier, tmp_path, capsys):
    trained_on = [classifier.parent / name for name in ("positive", "negative")]
    with pytest.raises(DataError, match="was trained on or chosen by all 32 episodes"):
        evaluated(classifier, *trained_on)
    evaluated(classifier, *trained_on, *new_squares(tmp_path))
    assert "32 episodes of its training are left out" in capsys.readouterr().out


def test_too_few_episodes_qualify_nothing(classifier, tmp_path):
    with pytest.raises(BelowThreshold, match=r"2 held-out episodes show a success .*collect more: 12 that succeed"):
        evaluated(classifier, *new_squares(tmp_path, positive=2))
    only_failures = tmp_path / "failures"
    new_squares(only_failures, positive=0)
    with pytest.raises(BelowThreshold, match="0 held-out episodes show a success"):
        evaluated(classifier, only_failures / "negative", "--output", tmp_path / "eval.json")
    assert json.loads((tmp_path / "eval.json").read_text())["metrics"]["auc"] is None


def test_a_classifier_of_others_gets_a_threshold_and_takes_it_along(classifier, tmp_path):
    """RLinf's files say neither a threshold nor figures, and theirs is 0.5."""
    size, folders = ["--image-size", "3", str(SIDE), str(SIDE)], new_squares(tmp_path)
    model = load_classifier(classifier, device="cpu").model
    model.head.bias.data += 3.0
    torch.save({"model_state_dict": model.state_dict()}, tmp_path / "rlinf.pt")
    with pytest.raises(ConfigError, match="exists: name a new file"):
        evaluated(tmp_path / "rlinf.pt", *folders, *size, "--output-checkpoint", tmp_path / "rlinf.pt")
    own = tmp_path / "own.safetensors"
    evaluated(tmp_path / "rlinf.pt", *folders, *size, "--output-checkpoint", own, "--worst", tmp_path / "worst.png")
    assert Image.open(tmp_path / "worst.png").size[0] == 12 * PITCH
    loaded = load_classifier(own, device="cpu")
    config = loaded.config
    assert config.qualified is True and config.threshold > 0.6 and config.metrics["validation_frames"] == 180
    export_classifier(loaded.model, own, tmp_path / "back.pt")
    back = load_classifier(tmp_path / "back.pt", image_size=(3, SIDE, SIDE), device="cpu").model
    frames = torch.rand(8, 3, SIDE, SIDE)
    expected = loaded.model({"base_camera": frames}) - float(logit(config.threshold))
    torch.testing.assert_close(back({"base_camera": frames}), expected)


SCORERS = """
import numpy as np

def brightest(task, pictures):
    return [float(np.asarray(picture).mean()) for picture in pictures]

def clock(task, pictures):
    return range(len(pictures))

def short(task, pictures):
    return [1]
"""


def test_any_function_is_qualified_and_the_worst_frames_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("square_scorers.py").write_text(SCORERS)
    folders, task = new_squares(tmp_path), ["--task", "Show a square."]
    evaluated("python:square_scorers:brightest", *folders, *task, "--output", "all.json")
    evaluated("python:square_scorers:brightest", *folders, *task, "--output", "some.json", "--every", "5")
    every, some = (json.loads(Path(name).read_text()) for name in ("all.json", "some.json"))
    assert every["qualified"] and every["metrics"]["auc"] == 1.0 and 49 < every["threshold"] < 100
    assert some["metrics"]["validation_frames"] == 180  # a success begins at each step
    with pytest.raises(BelowThreshold, match="it may know scenery and step alone"):
        evaluated("python:square_scorers:clock", *folders, *task)
    with pytest.raises(DataError, match="returned 1 scores of 10 frames"):
        evaluated("python:square_scorers:short", *folders, *task)
    with pytest.raises(ConfigError, match="is no classifier of frames: leave out output_checkpoint"):
        evaluated("python:square_scorers:clock", *folders, *task, "--output-checkpoint", "x.safetensors")
    for unmarked in ("square_scorers.py", "square_scorers:clock"):
        with pytest.raises(ConfigError, match="write a function as python:module:name"):
            evaluated(unmarked, *folders, *task)


# The threshold at run time -------------------------------------------------------------------------------------------


def test_only_a_higher_threshold_replaces_the_checkpoint_one(classifier, caplog):
    before = read_config(classifier).threshold
    with pytest.raises(ConfigError, match="was qualified at"):
        FrameScorer.open(RewardModelSettings(checkpoint_path=classifier, threshold=before / 2))
    higher = FrameScorer.open(RewardModelSettings(checkpoint_path=classifier, threshold=(1 + before) / 2))
    assert higher.config.threshold == (1 + before) / 2
    assert f"in place of {before:.4g}" in caplog.text
    accepted = RewardModelSettings(checkpoint_path=classifier, threshold=before / 2, accept_unqualified=True)
    assert FrameScorer.open(accepted).config.threshold == before / 2
