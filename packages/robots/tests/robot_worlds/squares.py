"""Trajectories of noise in which success is a bright square, and tiny classifiers with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlmrm_robots.frames.classifier import FrameClassifier, classifier_config
from vlmrm_robots.frames.settings import TrainSettings
from vlmrm_robots.trajectories.trajectory import Trajectory, write_trajectory

SIDE = 32


def square_trajectory(generator: np.random.Generator, successes: int, frames: int = 10, keys=("base_camera",)):
    """Frames of dark noise; the last `successes` of them have a bright square, seen by the last camera."""
    images = {key: generator.integers(0, 100, (frames, 3, SIDE, SIDE), dtype=np.uint8) for key in keys}
    for frame in images[keys[-1]][frames - successes :]:
        row, column = generator.integers(0, SIDE - 12, 2)
        frame[:, row : row + 12, column : column + 12] = 255
    labels = (np.arange(frames) >= frames - successes).astype(np.float32)
    return Trajectory(images, labels, {"environment": "Squares"})


def write_squares(
    root: Path, positive: int = 8, negative: int = 4, keys=("base_camera",), spread: int = 0, seed: int = 0
) -> Path:
    """Write episodes of which the positive have five successes, or up to `spread` less or more."""
    generator = np.random.default_rng(seed)
    for number in range(positive):
        successes = 5 + number % (2 * spread + 1) - spread
        write_trajectory(root / "positive", square_trajectory(generator, successes, keys=keys))
    for _ in range(negative):
        write_trajectory(root / "negative", square_trajectory(generator, 0, keys=keys))
    return root


def settings(root: Path, **changes) -> TrainSettings:
    """Settings for the squares below `root` that learn in seconds."""
    values: dict[str, Any] = {
        "positive_dir": root / "positive",
        "negative_dir": root / "negative",
        "output_checkpoint": root / "model.safetensors",
        "image_size": (3, SIDE, SIDE),
        "epochs": 1,
        "lr": 1e-3,
        "hidden_dim": 16,
        "num_spatial_blocks": 2,
        "ignore_around": 0,
    }
    return TrainSettings(**{**values, **changes})


def small_config(**changes):
    values = {"image_keys": ("base_camera",), "image_size": (3, SIDE, SIDE), "hidden_dim": 16, "num_spatial_blocks": 2}
    return classifier_config(**{**values, **changes})


def small_classifier(seed: int = 0, **changes):
    torch.manual_seed(seed)
    return FrameClassifier(small_config(**changes)).eval()
