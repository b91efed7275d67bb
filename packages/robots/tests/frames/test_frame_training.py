"""Training a classifier of frames: that it learns, what it keeps, and what its checkpoint says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from robot_worlds.counting import counting
from robot_worlds.squares import SIDE, settings, small_classifier, square_trajectory, write_squares
from safetensors import safe_open

from vlmrm.errors import BelowThreshold, CheckpointError, ConfigError
from vlmrm.rewards import RewardSet
from vlmrm_robots.commands import app
from vlmrm_robots.frames import training
from vlmrm_robots.frames.checkpoint import load_classifier, read_config, save_classifier
from vlmrm_robots.frames.dataset import FrameIndex, index_frames, split
from vlmrm_robots.frames.frame_reward import FrameReward, FrameScorer
from vlmrm_robots.frames.settings import RewardModelSettings
from vlmrm_robots.frames.training import train_classifier
from vlmrm_robots.trajectories.trajectory import Trajectory, open_folder, write_trajectory


def weights(path) -> dict[str, torch.Tensor]:
    return load_classifier(path, device="cpu").model.state_dict()


def encoder_file(folder):
    """A pretrained encoder: the backbone of a random classifier, as torch saves it."""
    backbone = small_classifier(seed=7).encoders["base_camera"].resnet_backbone
    torch.save(backbone.state_dict(), folder / "encoder.pt")
    return folder / "encoder.pt"


def test_it_learns_whether_a_bright_square_is_there(tmp_path):
    trained = train_classifier(settings(write_squares(tmp_path), epochs=12, batch_size=16))
    assert trained.config.metrics["auc"] == 1.0
    assert trained.config.metrics["recall"] >= 0.9 and trained.config.metrics["false_positive_rate"] == 0.0
    scorer = FrameScorer(load_classifier(trained.path))
    unseen = square_trajectory(np.random.default_rng(99), successes=20, frames=40)
    predicted = scorer.probabilities(unseen.images) > scorer.config.threshold
    assert (predicted == unseen.labels).mean() >= 0.9


def test_equal_seeds_alone_make_equal_weights(tmp_path):
    write_squares(tmp_path)
    torch.manual_seed(1)
    train_classifier(settings(tmp_path, output_checkpoint=tmp_path / "a"))
    after = torch.rand(())
    torch.manual_seed(1)
    assert torch.rand(()) == after  # the program's own random numbers are where they were
    train_classifier(settings(tmp_path, output_checkpoint=tmp_path / "b"))
    train_classifier(settings(tmp_path, output_checkpoint=tmp_path / "c", seed=1))
    a, b, c = (weights(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["classifier.0.weight"], c["classifier.0.weight"])


def test_the_checkpoint_says_what_it_is(tmp_path):
    write_squares(tmp_path, keys=("front", "wrist"))
    path = tmp_path / "checkpoints" / "reward_model.pt"
    keys = ("wrist", "front")
    train_classifier(settings(tmp_path, output_checkpoint=path, image_key=keys, pooling="mean"))
    with safe_open(path, framework="pt") as file:
        config = json.loads(file.metadata()["config"])
    assert config["architecture"] == "resnet10" and config["image_keys"] == ["wrist", "front"]
    assert config["image_size"] == [3, SIDE, SIDE] and (config["hidden_dim"], config["num_spatial_blocks"]) == (16, 2)
    assert (config["pooling"], config["normalisation"]) == ("mean", "unit")
    assert (config["use_pretrain"], config["freeze_encoder"]) == (False, False)
    assert config["environment"] == "Squares" and config["version"] == 1
    assert (
        config["data_fingerprint"]
        == FrameIndex([*open_folder(tmp_path / "positive"), *open_folder(tmp_path / "negative")], ()).fingerprint
    )
    assert 0 < config["threshold"] < 1
    assert {"auc", "loss", "precision", "recall", "false_positive_rate"} <= set(config["metrics"])
    assert (config["metrics"]["validation_frames"], config["metrics"]["validation_successes"]) == (30, 10)


def test_figures_are_measured_on_held_out_trajectories(tmp_path):
    write_squares(tmp_path)
    trained = train_classifier(settings(tmp_path, epochs=2))
    index, _ = index_frames(tmp_path / "positive", tmp_path / "negative", ("base_camera",), (3, SIDE, SIDE))
    _, validation = split(index, 0.2, seed=0)
    images = {key: frames.numpy() for key, frames in index.images(validation).items()}
    probability = FrameScorer(load_classifier(trained.path)).probabilities(images)
    labels = index.labels[validation]
    loss = -np.mean(np.where(labels == 1, np.log(probability), np.log1p(-probability)))
    assert loss == pytest.approx(trained.config.metrics["loss"], rel=1e-4)
    above = probability > trained.config.threshold
    assert above[labels == 1].mean() == pytest.approx(trained.config.metrics["recall"])
    assert above[labels == 0].mean() <= trained.config.metrics["false_positive_rate"]  # above a lower one


@pytest.mark.parametrize("balance", ["weights", "none"])
def test_probabilities_follow_the_collected_share_of_successes(tmp_path, balance):
    generator = np.random.default_rng(0)
    for name in ("positive", "negative"):
        for _ in range(10):  # noise, of which one frame in ten is called a success: there is nothing to see
            noise = square_trajectory(generator, 0)
            labels = (np.arange(10) == 3).astype(np.float32)
            write_trajectory(tmp_path / name, Trajectory(noise.images, labels))
    trained = train_classifier(settings(tmp_path, balance=balance, epochs=3))
    index, _ = index_frames(tmp_path / "positive", tmp_path / "negative", ("base_camera",), (3, SIDE, SIDE))
    probability = FrameScorer(load_classifier(trained.path)).probabilities(index.images(range(len(index))))
    assert probability.mean() == pytest.approx(0.1, abs=0.05)


# What is kept --------------------------------------------------------------------------------------------------------


def scripted_losses(monkeypatch, *losses):
    """Losses of the epochs on the held-out frames, instead of true ones."""
    coming = iter(losses)
    monkeypatch.setattr(training, "loss_of", lambda logits, labels: next(coming))
    return coming


def test_the_best_epoch_is_kept_and_patience_stops(tmp_path, monkeypatch):
    write_squares(tmp_path, positive=2, negative=1)
    coming = scripted_losses(monkeypatch, 0.9, 0.8, 0.7, 0.9, 0.9, 0.1)

    trained = train_classifier(settings(tmp_path, epochs=50, patience=2))

    assert trained.config.metrics["epoch"] == 3
    assert [*coming] == [0.1]


def test_an_interrupted_run_keeps_its_best_and_resumes(tmp_path, monkeypatch):
    write_squares(tmp_path, positive=4, negative=2)
    options = settings(tmp_path, epochs=4)
    whole = train_classifier(options.model_copy(update={"output_checkpoint": tmp_path / "whole"}))
    with monkeypatch.context() as patched:
        scripted_losses(patched, 9.0, 8.0)  # the third epoch has none
        with pytest.raises(StopIteration):
            train_classifier(options)
    assert load_classifier(options.output_checkpoint).config.metrics["epoch"] <= 2
    with pytest.raises(ConfigError, match=r"holds an unfinished training with lr 0\.001, not 0\.1"):
        train_classifier(options.model_copy(update={"lr": 0.1}))
    resumed = train_classifier(options)
    assert all(torch.equal(weights(resumed.path)[name], value) for name, value in weights(whole.path).items())
    assert not (tmp_path / "model.safetensors.training").exists()


# Encoders ------------------------------------------------------------------------------------------------------------


def test_a_pretrained_encoder_is_frozen_unless_told_otherwise(tmp_path):
    write_squares(tmp_path)
    pretrained = torch.load(encoder_file(tmp_path), weights_only=True)
    for freeze in (None, True, False):
        options = settings(tmp_path, pretrained_encoder_path=tmp_path / "encoder.pt", freeze_encoder=freeze)
        trained = train_classifier(options)
        assert trained.config.use_pretrain and trained.config.freeze_encoder is (freeze is not False)
        begun = {name: value for name, value in weights(trained.path).items() if ".resnet_backbone." in name}
        same = [torch.equal(value, pretrained[name.split("resnet_backbone.")[1]]) for name, value in begun.items()]
        assert all(same) if freeze is not False else not any(same)


def test_a_torchvision_resnet_is_trained_too(tmp_path):
    write_squares(tmp_path, positive=2, negative=1)
    trained = train_classifier(settings(tmp_path, backbone="resnet18"))
    assert (trained.config.architecture, trained.config.normalisation) == ("resnet18", "imagenet")
    mean = trained.model.mean.flatten()
    torch.testing.assert_close(mean, torch.tensor([0.485, 0.456, 0.406]))


# Settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"batch_size": 0}, r"batch_size: .*\(it is 0\)"), ({"freeze_encoder": True}, "keeps random weights")],
)
def test_settings_that_cannot_be_are_refused(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        settings(tmp_path, **changes)


def test_an_unwritable_checkpoint_is_named_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "initial_classifier", lambda settings: pytest.fail("it began to train"))
    write_squares(tmp_path, positive=2, negative=1)
    (tmp_path / "file").touch()
    for taken in (tmp_path, tmp_path / "file" / "model"):
        with pytest.raises(ConfigError, match=r"cannot be written|is a folder: name a file"):
            train_classifier(settings(tmp_path, output_checkpoint=taken))


def train_words(root: Path, *words: object) -> list[str]:
    folders = ["--positive-dir", root / "positive", "--negative-dir", root / "negative"]
    small = ["--image-size", 3, SIDE, SIDE, "--hidden-dim", 16, "--num-spatial-blocks", 2, "--ignore-around", 0]
    return [*map(str, ["train", *folders, "--output-checkpoint", root / "model.safetensors", *words, *small])]


def test_the_command_reports_its_data_and_classifier_worth(tmp_path, capsys):
    write_squares(tmp_path, positive=20, negative=20, spread=4)
    words = ["--epochs", 8, "--lr", 1e-3, "--batch-size", 16, "--val-fraction", 0.4]
    app(train_words(tmp_path, *words), result_action="return_value")
    text, stderr = capsys.readouterr()
    assert f"{tmp_path / 'positive'}: 20 trajectories, 200 frames, 93 of them successes" in stderr
    assert "training: 24 trajectories, 240 frames, " in stderr and "; validation: 16 trajectories" in stderr
    assert "on 160 held-out frames, " in text and "AUC 1.0000, at the same step in the same scenery 1.0000" in text
    assert re.search(r"it fires in [01] of 8 episodes that fail, at most (31|47)% of all such", text)
    assert f"the classifier is {tmp_path / 'model.safetensors'}" in text
    config = read_config(tmp_path / "model.safetensors")
    assert config.qualified is True and config.unqualified_because is None
    assert config.metrics["same_step_auc"] == 1.0 and config.metrics["recall"] > 0.9


# Classifiers that know nothing ---------------------------------------------------------------------------------------


@pytest.fixture
def useless(tmp_path, capsys) -> Path:
    """A classifier trained on noise, of which half is called a success."""
    generator = np.random.default_rng(0)
    for name in ("positive", "negative"):
        for _ in range(30 if name == "positive" else 2):
            noise = square_trajectory(generator, 0)
            labels = (generator.random(10) < (0.5 if name == "positive" else 0)).astype(np.float32)
            write_trajectory(tmp_path / name, Trajectory(noise.images, labels, {"environment": "FrozenLake-v1"}))
    with pytest.raises(BelowThreshold) as refused:
        app(train_words(tmp_path, "--epochs", 1), result_action="return_value")
    assert "model.safetensors does not qualify as a reward: of pairs of a success" in str(refused.value)
    assert refused.value.exit_code == 6 and "\n" not in str(refused.value)
    return tmp_path / "model.safetensors"


def test_an_unqualified_classifier_rewards_nothing_unless_accepted(useless, tmp_path, capsys):
    options = RewardModelSettings(checkpoint_path=useless)
    refusal = r"model\.safetensors does not qualify as a reward: of pairs .*accept_unqualified: true"
    with pytest.raises(CheckpointError, match=refusal):
        FrameScorer.open(options)
    with pytest.raises(CheckpointError, match=refusal):
        FrameReward(counting(2), options)
    with pytest.raises(CheckpointError, match=refusal):  # a scorer that somebody else has opened
        FrameReward(counting(2), options, FrameScorer(load_classifier(useless)))
    with pytest.raises(CheckpointError, match=refusal):
        RewardSet([{"name": "done", "reward_model": "frame_success", "checkpoint_path": str(useless)}])
    model = {"checkpoint_path": str(useless)}
    accepted = options.model_copy(update={"accept_unqualified": True})
    assert FrameReward(counting(2), accepted).scorer.config.qualified is False
    assert "does not qualify as a reward: of pairs" in capsys.readouterr().err
    RewardSet([{"name": "done", "reward_model": "frame_success", **model, "accept_unqualified": True}])


@pytest.mark.parametrize("opened", [True, False])
def test_an_unmeasured_classifier_is_warned_of(tmp_path, caplog, opened):
    model = small_classifier()
    save_classifier(tmp_path / "model", model, model.spec)
    if opened:
        FrameScorer(load_classifier(tmp_path / "model"))
    else:
        FrameScorer.open(RewardModelSettings(checkpoint_path=tmp_path / "model"))
    assert sum("does not say whether it qualifies as a reward" in line for line in caplog.messages) == 1
