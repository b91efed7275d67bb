"""`vlmrm frames eval`: figures of a classifier on new episodes, by frame and by episode, and what follows."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from robot_worlds.squares import SIDE, settings, small_classifier, square_trajectory, write_squares
from sklearn.metrics import precision_score, recall_score, roc_auc_score

from vlmrm.errors import BelowThreshold, CheckpointError, ConfigError, DataError
from vlmrm_robots.commands import app
from vlmrm_robots.frames.checkpoint import load_classifier, read_config, save_classifier
from vlmrm_robots.frames.frame_reward import FrameScorer
from vlmrm_robots.frames.settings import RewardModelSettings
from vlmrm_robots.trajectories.trajectory import open_folder, write_trajectory


def new_squares(root, positive=8, negative=8, seed=7):
    """Write episodes that no training has, and return their folders."""
    generator = np.random.default_rng(seed)
    for _ in range(positive):
        write_trajectory(root / "positive", square_trajectory(generator, 5))
    for _ in range(negative):
        write_trajectory(root / "negative", square_trajectory(generator, 0))
    return [str(root / "positive"), str(root / "negative")]


def evaluated(*words):
    app(["eval", *map(str, words)], result_action="return_value")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """The checkpoint of a classifier that has learned squares."""
    from vlmrm_robots.frames.training import train_classifier

    root = write_squares(tmp_path_factory.mktemp("squares"), positive=16, negative=16)
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
    assert (figures["failed_episodes"], figures["successful_episodes"]) == (8, 8)
    assert figures["false_fires"] == sum((values > 0.3).any() for values in failed)
    assert figures["validation_frames"] == 160 and written["threshold"] == 0.3 and written["qualified"]
    assert "16 trajectories" not in (words := capsys.readouterr().out) and "8 trajectories, 80 frames" in words


def constant(model):
    torch.nn.init.zeros_(model.head.weight)


def inverted(model):
    model.head.weight.neg_()
    model.head.bias.neg_()


def eager(model):
    model.head.bias.add_(30.0)


@pytest.mark.parametrize("plant", [constant, inverted, eager])
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
    with pytest.raises(BelowThreshold, match=r"2 held-out episodes show a success"):
        evaluated(classifier, *new_squares(tmp_path, positive=2))
    only_failures = tmp_path / "failures"
    new_squares(only_failures, positive=0)
    with pytest.raises(BelowThreshold, match="0 held-out episodes show a success"):
        evaluated(classifier, only_failures / "negative", "--output", tmp_path / "eval.json")
    assert json.loads((tmp_path / "eval.json").read_text())["metrics"]["auc"] is None


def test_a_classifier_of_others_is_measured_and_recorded(tmp_path):
    """RLinf's files say neither a threshold nor figures."""
    model = small_classifier(pooling="mean")
    torch.save({"model_state_dict": model.state_dict()}, tmp_path / "rlinf.pt")
    size, folders = ["--image-size", "3", str(SIDE), str(SIDE)], new_squares(tmp_path)
    with pytest.raises(ConfigError, match="exists: name a new file"):
        evaluated(tmp_path / "rlinf.pt", *folders, *size, "--output-checkpoint", tmp_path / "rlinf.pt")
    with pytest.raises(BelowThreshold):
        evaluated(tmp_path / "rlinf.pt", *folders, *size, "--output-checkpoint", tmp_path / "own.safetensors")
    config = read_config(tmp_path / "own.safetensors")
    assert config.qualified is False and config.unqualified_because and config.metrics["validation_frames"] == 160


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
