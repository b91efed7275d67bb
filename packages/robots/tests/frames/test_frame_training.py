"""Training a classifier of frames: that it learns, what it keeps, and what its checkpoint says."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import preloaded
import pytest
import torch
from counting import counting
from safetensors import safe_open
from scipy.special import logit
from squares import SIDE, settings, small_classifier, square_trajectory, write_squares

from vlmrm.data.comparisons import data_fingerprint
from vlmrm.errors import BelowThreshold, CheckpointError, ConfigError, DataError
from vlmrm.rewards import RewardSet
from vlmrm_robots.commands import app
from vlmrm_robots.frames.checkpoint import load_classifier, read_config, save_classifier
from vlmrm_robots.frames.dataset import index_frames, split
from vlmrm_robots.frames.frame_reward import FrameReward, FrameScorer
from vlmrm_robots.frames.qualification import HeldOut, figures
from vlmrm_robots.frames.settings import RewardModelSettings, TrainSettings
from vlmrm_robots.frames.training import initial_classifier, train_classifier
from vlmrm_robots.trajectories.trajectory import Trajectory, write_trajectory


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
    assert trained.config.metrics["recall"] == 1.0 and trained.config.metrics["false_positive_rate"] == 0.0
    scorer = FrameScorer(load_classifier(trained.path))
    unseen = square_trajectory(np.random.default_rng(99), successes=20, frames=40)
    predicted = scorer.probabilities(unseen.images) > scorer.config.threshold
    assert (predicted == unseen.labels).mean() >= 0.9


def test_equal_seeds_make_equal_weights_and_others_do_not(tmp_path):
    write_squares(tmp_path)
    torch.manual_seed(1)
    train_classifier(settings(tmp_path, output_checkpoint=tmp_path / "a", augment=True, balance="sampling"))
    after = torch.rand(())
    torch.manual_seed(1)
    assert torch.rand(()) == after  # the program's own random numbers are where they were
    train_classifier(settings(tmp_path, output_checkpoint=tmp_path / "b", augment=True, balance="sampling"))
    train_classifier(settings(tmp_path, output_checkpoint=tmp_path / "c", augment=True, balance="sampling", seed=1))
    a, b, c = (weights(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["classifier.0.weight"], c["classifier.0.weight"])


def test_the_checkpoint_says_what_it_is(tmp_path):
    write_squares(tmp_path, keys=("front", "wrist"))
    path = tmp_path / "checkpoints" / "reward_model.pt"
    keys = ("wrist", "front")
    trained = train_classifier(settings(tmp_path, output_checkpoint=path, image_key=keys, pooling="mean"))
    with safe_open(path, framework="pt") as file:
        config = json.loads(file.metadata()["config"])
    assert config["architecture"] == "resnet10" and config["image_keys"] == ["wrist", "front"]
    assert config["image_size"] == [3, SIDE, SIDE] and (config["hidden_dim"], config["num_spatial_blocks"]) == (16, 2)
    assert (config["pooling"], config["normalisation"]) == ("mean", "unit")
    assert (config["use_pretrain"], config["freeze_encoder"]) == (False, False)
    assert config["environment"] == "Squares" and config["version"] == 1
    assert config["data_fingerprint"] == data_fingerprint([str(tmp_path / "positive"), str(tmp_path / "negative")])
    assert 0 < config["threshold"] < 1
    assert {"auc", "loss", "precision", "recall", "false_positive_rate", "calibration_error", "brier"} <= set(
        config["metrics"]
    )
    assert (config["metrics"]["validation_frames"], config["metrics"]["validation_successes"]) == (30, 10)
    assert trained.epochs[0] == (config["metrics"]["auc"], config["metrics"]["loss"])


def test_figures_are_of_the_checkpoint_on_the_trajectories_held_out(tmp_path):
    write_squares(tmp_path)
    trained = train_classifier(settings(tmp_path, epochs=2))
    index, _ = index_frames(tmp_path / "positive", tmp_path / "negative", ("base_camera",), (3, SIDE, SIDE))
    _, validation = split(index, 0.2, seed=0)
    images = {key: frames.numpy() for key, frames in index.images(validation).items()}
    probability = FrameScorer(load_classifier(trained.path)).probabilities(images)
    labels = index.labels[validation]
    loss = -np.mean(np.where(labels == 1, np.log(probability), np.log1p(-probability)))
    assert loss == pytest.approx(trained.config.metrics["loss"], rel=1e-4)
    rate = (probability[labels == 0] > trained.config.threshold).mean()
    assert rate == pytest.approx(trained.config.metrics["false_positive_rate"]) and rate <= 0.01


@pytest.mark.parametrize("balance", ["weights", "sampling", "none"])
def test_probabilities_are_those_of_the_frames_as_they_were_collected(tmp_path, balance):
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


def scripted_scores(monkeypatch, *scores):
    """Validation scores (AUC, loss) of the epochs, instead of true ones."""
    from vlmrm_robots.frames import training

    coming = iter(scores)
    monkeypatch.setattr(training, "auc_and_loss", lambda logits, labels: next(coming))


@pytest.mark.parametrize(("select_by", "best"), [("auc", 2), ("loss", 3)])
def test_the_best_epoch_is_kept_and_patience_ends_the_training(tmp_path, monkeypatch, select_by, best):
    write_squares(tmp_path, positive=2, negative=1)
    scripted_scores(monkeypatch, (0.6, 0.9), (0.9, 0.8), (0.8, 0.7), (0.7, 0.9), (0.7, 0.9), (0.7, 0.9), (1.0, 0.1))
    trained = train_classifier(settings(tmp_path, epochs=50, select_by=select_by, patience=2))
    assert trained.config.metrics["epoch"] == best
    assert len(trained.epochs) == best + 2


@pytest.mark.parametrize("balance", ["weights", "sampling"])
def test_a_run_that_breaks_off_has_left_its_best_epoch_and_goes_on(tmp_path, monkeypatch, balance):
    write_squares(tmp_path, positive=4, negative=2)
    options = settings(tmp_path, epochs=4, balance=balance, augment=True)
    whole = train_classifier(options.model_copy(update={"output_checkpoint": tmp_path / "whole"}))
    with monkeypatch.context() as patched:
        scripted_scores(patched, *whole.epochs[:2])  # the third epoch has none
        with pytest.raises(StopIteration):
            train_classifier(options)
    assert load_classifier(options.output_checkpoint).config.metrics["epoch"] <= 2
    with pytest.raises(ConfigError, match=r"holds an unfinished training with lr 0\.001, which is now 0\.1"):
        train_classifier(options.model_copy(update={"lr": 0.1}))
    resumed = train_classifier(options)
    assert resumed.epochs == whole.epochs
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


def test_features_of_a_frozen_encoder_are_made_once(tmp_path, monkeypatch):
    write_squares(tmp_path)
    options = settings(tmp_path, pretrained_encoder_path=encoder_file(tmp_path), epochs=4)
    index, _ = index_frames(tmp_path / "positive", tmp_path / "negative", ("base_camera",), (3, SIDE, SIDE))
    batches = []
    model = initial_classifier(options)
    forward = type(model).encode
    monkeypatch.setattr(
        type(model), "encode", lambda self, x: batches.append(len(x["base_camera"])) or forward(self, x)
    )
    train_classifier(options)
    assert sum(batches) == len(index)


def test_a_torchvision_resnet_is_trained_too(tmp_path):
    write_squares(tmp_path, positive=2, negative=1)
    trained = train_classifier(settings(tmp_path, backbone="resnet18"))
    assert (trained.config.architecture, trained.config.normalisation) == ("resnet18", "imagenet")
    mean = trained.model.mean.flatten()
    torch.testing.assert_close(mean, torch.tensor([0.485, 0.456, 0.406]))


# Settings ------------------------------------------------------------------------------------------------------------


def test_documented_arguments_have_their_documented_defaults():
    defaults = {name: field.default for name, field in TrainSettings.model_fields.items()}
    required = {name for name, field in TrainSettings.model_fields.items() if field.is_required()}
    assert required == {"positive_dir", "negative_dir", "output_checkpoint"}
    documented = {
        "pretrained_encoder_path": None,
        "backbone": "resnet10",
        "image_key": ("base_camera",),
        "image_size": (3, 64, 64),
        "batch_size": 32,
        "epochs": 100,
        "lr": 1e-4,
        "hidden_dim": 256,
        "num_spatial_blocks": 8,
        "visualize_positive": False,
    }
    assert {name: defaults[name] for name in documented} == documented
    assert str(defaults["vis_output_dir"]) == "positive_samples_vis"


def test_successes_are_written_as_pictures_before_training(tmp_path):
    write_squares(tmp_path, positive=2, negative=1, successes=3)
    train_classifier(settings(tmp_path, visualize_positive=True, vis_output_dir=tmp_path / "seen"))
    names = sorted(path.name for path in (tmp_path / "seen").iterdir())
    assert len(names) == 6
    assert names[0].startswith("positive_000000") and names[0].endswith("_frame007.png")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backbone": "resnet11"}, r"backbone: .*\(it is 'resnet11'\)"),
        ({"balance": "both"}, r"balance: .*\(it is 'both'\)"),
        ({"batch_size": 0}, r"batch_size: .*equal to 1 \(it is 0\)"),
        ({"epochs": 0}, r"epochs: .*\(it is 0\)"),
        ({"lr": 0.0}, r"lr: .*greater than 0 \(it is 0.0\)"),
        ({"target_fpr": 1.0}, r"target_fpr: .*less than 1 \(it is 1.0\)"),
        ({"num_workers": -1}, r"num_workers: .*\(it is -1\)"),
        ({"freeze_encoder": True}, "keeps random weights"),
        ({"backbone": "reward_model"}, "go together"),
        ({"reward_model": "x"}, "go together"),
        ({"backbone": "reward_model", "reward_model": "x", "freeze_encoder": False}, "used as it is"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        settings(tmp_path, **changes)


def test_nothing_is_written_when_the_frames_do_not_do(tmp_path):
    write_squares(tmp_path, positive=0)
    generator = np.random.default_rng(0)
    for _ in range(2):
        write_trajectory(tmp_path / "positive", square_trajectory(generator, 0))
    with pytest.raises(DataError, match="positive: 2 trajectories, 20 frames, 0 of them successes"):
        train_classifier(settings(tmp_path))
    shutil.rmtree(tmp_path / "positive")
    shutil.rmtree(tmp_path / "negative")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_cannot_be_written_is_named_before_training(tmp_path, monkeypatch):
    from vlmrm_robots.frames import training

    monkeypatch.setattr(training, "initial_classifier", lambda settings: pytest.fail("it began to train"))
    write_squares(tmp_path, positive=2, negative=1)
    (tmp_path / "file").touch()
    for taken in (tmp_path, tmp_path / "file" / "model"):
        with pytest.raises(ConfigError, match=r"cannot be written|is a folder: name a file"):
            train_classifier(settings(tmp_path, output_checkpoint=taken))


def test_every_documented_argument_reaches_the_training(monkeypatch, capsys, tmp_path):
    from vlmrm_robots.frames import training

    options = []
    trained = SimpleNamespace(config=SimpleNamespace(qualified=True))
    monkeypatch.setattr(training, "train_classifier", lambda settings: options.append(settings) or trained)
    monkeypatch.setattr(training, "summarise", lambda trained: "done")
    command = """train --positive-dir ./reward_data/positive --negative-dir ./reward_data/negative
        --output-checkpoint ./checkpoints/reward_model.pt --pretrained-encoder-path ./resnet10_pretrained.pt
        --backbone resnet10 --image-key front wrist --image-size 3 96 128 --batch-size 128 --epochs 30 --lr 3e-4
        --hidden-dim 128 --num-spatial-blocks 4 --visualize-positive --vis-output-dir ./show --no-freeze-encoder"""
    app(command.split(), result_action="return_value")
    assert options == [
        TrainSettings(
            positive_dir=Path("reward_data/positive"),
            negative_dir=Path("reward_data/negative"),
            output_checkpoint=Path("checkpoints/reward_model.pt"),
            pretrained_encoder_path=Path("resnet10_pretrained.pt"),
            image_key=("front", "wrist"),
            image_size=(3, 96, 128),
            batch_size=128,
            epochs=30,
            lr=3e-4,
            hidden_dim=128,
            num_spatial_blocks=4,
            visualize_positive=True,
            vis_output_dir=Path("show"),
            freeze_encoder=False,
        )
    ]
    assert capsys.readouterr().out == "done\n"


def train_words(root: Path, *words: object) -> list[str]:
    folders = ["--positive-dir", root / "positive", "--negative-dir", root / "negative"]
    words = (*words, "--image-size", 3, SIDE, SIDE, "--hidden-dim", 16, "--num-spatial-blocks", 2)
    return [*map(str, ["train", *folders, "--output-checkpoint", root / "model.safetensors", *words])]


def test_the_command_says_what_it_trains_on_and_what_the_classifier_is_worth(tmp_path, capsys):
    write_squares(tmp_path, positive=20, negative=20)
    words = ["--epochs", 8, "--lr", 1e-3, "--batch-size", 16, "--val-fraction", 0.25]
    app(train_words(tmp_path, *words), result_action="return_value")
    text, stderr = capsys.readouterr()
    assert f"{tmp_path / 'positive'}: 20 trajectories, 200 frames, 100 of them successes" in stderr
    assert "training: 30 trajectories, 300 frames, 75 of them successes; validation: 10 trajectories" in stderr
    assert "of 8 epochs is" in text and "on 100 held-out frames, 25 of them successes" in text
    assert "AUC 1.0000 (1.0000 to 1.0000)" in text and "recall 1.0000 (1.0000 to 1.0000)" in text
    assert "it fires in 0 of 5 episodes that fail, and with 95 % confidence in at most 45% of all such" in text
    assert f"the classifier is {tmp_path / 'model.safetensors'}" in text
    config = read_config(tmp_path / "model.safetensors")
    assert config.qualified is True and config.unqualified_because is None
    assert config.metrics["auc_low"] == config.metrics["recall_low"] == 1.0


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
    assert "model.safetensors does not qualify as a reward: its AUC is 0." in str(refused.value)
    assert refused.value.exit_code == 6 and "\n" not in str(refused.value)
    return tmp_path / "model.safetensors"


def test_a_classifier_that_learned_nothing_is_kept_and_says_so(useless):
    config = read_config(useless)
    assert config.qualified is False and config.unqualified_because is not None
    assert config.unqualified_because.startswith("its AUC is 0.")


def test_a_classifier_that_does_not_qualify_rewards_nothing_unless_it_is_accepted(useless, tmp_path, capsys):
    options = RewardModelSettings(checkpoint_path=useless)
    refusal = r"model\.safetensors does not qualify as a reward: its AUC is .*accept_unqualified: true"
    with pytest.raises(CheckpointError, match=refusal):
        FrameScorer.open(options)
    with pytest.raises(CheckpointError, match=refusal):
        FrameReward(counting(2), options)
    with pytest.raises(CheckpointError, match=refusal):  # a scorer that somebody else has opened
        FrameReward(counting(2), options, FrameScorer(load_classifier(useless)))
    with pytest.raises(CheckpointError, match=refusal):
        RewardSet([{"name": "done", "reward_model": "frame_success", "checkpoint_path": str(useless)}])
    model = {"checkpoint_path": str(useless)}
    rl = {"env": "FrozenLake-v1", "output_dir": str(tmp_path / "rl"), "reward": {"use_reward_model": True}}
    (tmp_path / "rl.yaml").write_text(json.dumps({**rl, "reward": {"use_reward_model": True, "reward_model": model}}))
    with pytest.raises(CheckpointError, match=refusal):
        app(["rl", str(tmp_path / "rl.yaml")], result_action="return_value")
    assert not (tmp_path / "rl").exists()

    accepted = options.model_copy(update={"accept_unqualified": True})
    assert FrameReward(counting(2), accepted).scorer.config.qualified is False
    assert "does not qualify as a reward: its AUC is" in capsys.readouterr().err
    RewardSet([{"name": "done", "reward_model": "frame_success", **model, "accept_unqualified": True}])


def test_a_scorer_of_an_opened_classifier_warns_of_one_that_does_not_qualify(useless, caplog):
    FrameScorer(load_classifier(useless))
    [warning] = [line for line in caplog.messages if "does not qualify as a reward: its AUC is" in line]
    assert warning.startswith(str(useless))


@pytest.mark.parametrize("opened", [True, False])
def test_a_classifier_that_was_never_measured_is_warned_of(tmp_path, caplog, opened):
    model = small_classifier()
    save_classifier(tmp_path / "model", model, model.spec)
    if opened:
        FrameScorer(load_classifier(tmp_path / "model"))
    else:
        FrameScorer.open(RewardModelSettings(checkpoint_path=tmp_path / "model"))
    assert sum("does not say whether it qualifies as a reward" in line for line in caplog.messages) == 1


@pytest.mark.slow
def test_two_ranks_train_one_classifier_and_measure_every_held_out_frame_once(tmp_path):
    write_squares(tmp_path, positive=15, negative=15)
    options = settings(tmp_path, epochs=6, batch_size=8, use_cpu=True, val_fraction=0.4)
    words = ["--positive-dir", options.positive_dir, "--negative-dir", options.negative_dir]
    words += ["--output-checkpoint", options.output_checkpoint, "--image-size", 3, SIDE, SIDE, "--epochs", 6]
    words += ["--batch-size", 8, "--lr", 1e-3, "--hidden-dim", 16, "--num-spatial-blocks", 2, "--use-cpu"]
    words += ["--val-fraction", 0.4]
    command = ["-m", "vlmrm", "frames", "train", *map(str, words)]
    launcher = [preloaded.python(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    ran = subprocess.run([*launcher, *command], capture_output=True, text=True, timeout=300)
    config = read_config(options.output_checkpoint)
    assert ran.returncode == 0 and config.qualified, ran.stderr
    index, _ = index_frames(options.positive_dir, options.negative_dir, options.image_key, options.image_size)
    _, held_out = split(index, 0.4, seed=0)
    scorer = FrameScorer(load_classifier(options.output_checkpoint, device="cpu"))
    probabilities = scorer.probabilities(index.images(held_out))
    measured = figures(
        HeldOut(logit(probabilities), index.labels[held_out], index.owners[held_out]), logit(config.threshold)
    )
    assert config.metrics["validation_frames"] == len(held_out)
    assert {name: config.metrics[name] for name in measured} == pytest.approx(measured, rel=1e-4, abs=1e-4)
    assert ran.stdout.count("held-out frames") == 1  # the first rank's
