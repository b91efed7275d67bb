"""LeRobot: it opens the episodes that vlmrm wrote and its actor takes the classifier; and what it wrote is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checks import Case, main
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.processor import TransitionKey
from lerobot.processor.hil_processor import RewardClassifierProcessorStep
from transformers import ResNetConfig, ResNetModel

from vlmrm_robots.frames.checkpoint import load_classifier, save_classifier
from vlmrm_robots.frames.classifier import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    FrameClassifier,
    classifier_config,
    model_input,
)
from vlmrm_robots.frames.foreign_classifiers import write_lerobot
from vlmrm_robots.trajectories.importing import import_episodes
from vlmrm_robots.trajectories.lerobot import episodes_of, write_dataset
from vlmrm_robots.trajectories.trajectory import Trajectory, TrajectoryFile, open_folder, write_trajectory

SIZES = {"front": (64, 96), "wrist": (48, 48)}
LENGTHS = (5, 6, 7)
FPS = 20


def episode(number: int) -> Trajectory:
    """Frames of noise; success from the fourth on, but for the second episode."""
    noise = np.random.default_rng(number)
    length = LENGTHS[number]
    images = {key: noise.integers(0, 256, (length, 3, *size), dtype=np.uint8) for key, size in SIZES.items()}
    labels = ((np.arange(length) >= 3) & (number != 1)).astype(np.float32)
    return Trajectory(images, labels, {"environment": "Toy", "task": f"task {number}"})


def imported(source: Path, folder: Path) -> list[TrajectoryFile]:
    """The trajectories that a set becomes, by task."""
    import_episodes(episodes_of(str(source)), folder / "positive", folder / "negative", "Toy")
    files = open_folder(folder / "positive") + open_folder(folder / "negative")
    return sorted(files, key=lambda file: file.metadata["task"])


def worst(files: Sequence[TrajectoryFile]) -> int:
    """The greatest difference of pictures from the episodes', once all else is equal."""
    assert [len(file) for file in files] == list(LENGTHS)
    off = 0
    for number, file in enumerate(files):
        original = episode(number)
        assert file.labels.tolist() == original.labels.tolist(), file.labels
        assert file.metadata["task"] == f"task {number}"
        assert set(file.keys) == set(SIZES)
        for key, frames in original.images.items():
            off = max(off, int(np.abs(file.frames(key).astype(int) - frames).max()))
    return off


def written(case: Case) -> str:
    folder = Path(case.folder)
    for number in range(len(LENGTHS)):
        write_trajectory(folder / "ours", episode(number))
    write_dataset(open_folder(folder / "ours"), folder / "set", fps=10)
    opened = LeRobotDataset("local", root=folder / "set")
    assert (opened.num_episodes, opened.num_frames, opened.fps) == (len(LENGTHS), sum(LENGTHS), 10)
    rows = iter(opened)
    for number, length in enumerate(LENGTHS):
        original = episode(number)
        for i, row in zip(range(length), rows, strict=False):
            for key, frames in original.images.items():
                pixels = np.rint(255 * row[f"observation.images.{key}"].numpy())
                assert (pixels == frames[i]).all(), (number, i, key)
            assert float(row["next.reward"]) == original.labels[i] == float(row["next.success"])
            assert row["task"] == f"task {number}"
    back = imported(folder / "set", folder / "back")
    assert worst(back) == 0
    return f"{sum(LENGTHS)} of our frames of 2 cameras: 0 pixels differ in LeRobot, nor read back"


def made_by_lerobot(folder: Path, kind: str) -> Path:
    """A set that LeRobot's own library wrote."""
    features: dict[str, Any] = {
        f"observation.images.{key}": {"dtype": kind, "shape": (*size, 3), "names": ["height", "width", "channels"]}
        for key, size in SIZES.items()
    }
    features["action"] = {"dtype": "float32", "shape": (2,), "names": None}
    features["next.success"] = {"dtype": "bool", "shape": (1,), "names": None}
    made = LeRobotDataset.create("local", fps=FPS, features=features, root=folder, use_videos=kind == "video")
    for number, length in enumerate(LENGTHS):
        original = episode(number)
        if kind == "video":  # noise is the worst of pictures to compress
            original.images = {key: frames // 8 + 100 for key, frames in original.images.items()}
        for i in range(length):
            row = {
                f"observation.images.{key}": frames[i].transpose(1, 2, 0) for key, frames in original.images.items()
            }
            row |= {"action": np.zeros(2, np.float32), "next.success": original.labels[i : i + 1] > 0}
            made.add_frame(row | {"task": f"task {number}"})
        made.save_episode()
    made.finalize()
    return folder


def read(case: Case) -> str:
    files = imported(made_by_lerobot(Path(case.folder, "theirs"), "image"), Path(case.folder, "read"))
    assert worst(files) == 0
    write_dataset(files, Path(case.folder, "again"))
    assert LeRobotDataset("local", root=Path(case.folder, "again")).fps == FPS
    return f"{sum(LENGTHS)} of its frames: 0 pixels differ"


def video(case: Case) -> str:
    source = made_by_lerobot(Path(case.folder, "video"), "video")
    files = imported(source, Path(case.folder, "from_video"))
    decoded = LeRobotDataset("local", root=source)
    pixels = [np.rint(255 * row["observation.images.front"].numpy()).astype(np.uint8) for row in iter(decoded)]
    assert (np.concatenate([file.frames("front") for file in files]) == np.stack(pixels)).all()
    assert [file.labels.tolist() for file in files] == [episode(number).labels.tolist() for number in range(3)]
    return "of its video the pixels that it decodes itself"


def progress(case: Case) -> str:
    from lerobot.rewards.sarm.rabc import RABCWeights

    weights = RABCWeights(Path(case.folder, "set", "sarm_progress.parquet"), chunk_size=1)
    third = np.float32(1 / 3)
    expected = [0, third, 2 * third, *[1] * (LENGTHS[0] - 3), *[0] * LENGTHS[1], 0, third, 2 * third, 1, 1, 1, 1]
    assert np.allclose([weights.progress_lookup[i] for i in range(sum(LENGTHS))], expected)
    assert weights.episode_boundaries[1] == {"start": LENGTHS[0], "end": LENGTHS[0] + LENGTHS[1]}
    return "its weights by progress read ours"


def resnet18(checkpoint: Path, normalisation: str) -> Path:
    """A classifier with random weights, whose cameras share the encoder as LeRobot's do."""
    torch.manual_seed(0)
    model = FrameClassifier(
        classifier_config(
            architecture="resnet18",
            image_keys=tuple(SIZES),
            image_size=(3, 128, 128),
            hidden_dim=32,
            use_pretrain=True,
            freeze_encoder=True,
            normalisation=normalisation,
        )
    )
    encoders = [part for name, part in model.named_modules() if name.endswith("resnet_backbone")]
    for encoder in encoders[1:]:
        encoder.load_state_dict(encoders[0].state_dict())
    save_classifier(checkpoint, model, model.spec)
    return checkpoint


def exported(model: FrameClassifier, source: Path, folder: Path) -> Path:
    """Write it for LeRobot, which loads a ResNet from the hub before our weights: here one from a folder."""
    write_lerobot(model, source, folder / "classifier")
    shape = ResNetConfig(layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512])
    ResNetModel(shape).save_pretrained(folder / "resnet-18")
    file = folder / "classifier" / "config.json"
    described = {**json.loads(file.read_text(encoding="utf-8")), "model_name": str(folder / "resnet-18")}
    file.write_text(json.dumps(described), encoding="utf-8")
    return folder / "classifier"


def actor(case: Case) -> str:
    """The step by which its HIL-SERL actor is rewarded, with pixels in [0, 1], or standardised if ours does so."""
    noise = np.random.default_rng(0)
    brightness = np.linspace(0.1, 1, 16)[:, None, None, None]
    pixels = {key: (noise.integers(0, 256, (16, 3, 128, 128)) * brightness).astype(np.uint8) for key in SIZES}
    worst = 0.0
    for normalisation, mean, std in (("unit", 0.0, 1.0), ("imagenet", IMAGENET_MEAN, IMAGENET_STD)):
        folder = Path(case.folder, normalisation)
        model = load_classifier(resnet18(folder / "ours.safetensors", normalisation), device="cpu").model
        shift, scale = (torch.tensor(values).reshape(-1, 1, 1) for values in (mean, std))
        shown = {
            f"observation.images.{key}": (torch.from_numpy(one) / 255 - shift) / scale for key, one in pixels.items()
        }
        with torch.inference_mode():
            inputs = {key: model_input(torch.from_numpy(one), model.device) for key, one in pixels.items()}
            expected = model(inputs).sigmoid()
            threshold = float(expected.sort().values[7:9].mean())  # half of them are successes
            step = RewardClassifierProcessorStep(str(exported(model, folder, folder)), success_threshold=threshold)
            theirs = step.reward_classifier.predict(list(shown.values())).probabilities
        assert expected.std() > 1e-3, expected
        worst = max(worst, float((theirs - expected).abs().max()))
        for i, success in enumerate((expected > threshold).tolist()):
            observation = {key: one[i : i + 1] for key, one in shown.items()}
            row = {TransitionKey.OBSERVATION: observation, TransitionKey.REWARD: 0.0, TransitionKey.INFO: {}}
            rewarded = step({**row, TransitionKey.DONE: False})
            assert (rewarded[TransitionKey.REWARD], rewarded[TransitionKey.DONE]) == (float(success), success)
    assert worst < 1e-6, worst
    return f"its actor's rewards by our classifier, p at most {worst:.0e} off"


CHECKS: dict[str, Callable[[Case], Any]] = {
    "written": written,
    "read": read,
    "video": video,
    "progress": progress,
    "actor": actor,
}

if __name__ == "__main__":
    main(CHECKS)
