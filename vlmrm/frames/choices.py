"""What a classifier can be, and what collection and training agree on; importing this imports nothing else."""

from __future__ import annotations

from typing import Literal

Architecture = Literal["resnet10", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "reward_model"]
Pooling = Literal["spatial", "mean"]
QUESTION = "Is the task done?"  # what a reward model is asked
IMAGE_KEY = "base_camera"  # of the only camera, unless it is called something else
IMAGE_SIZE = (3, 64, 64)  # [C,H,W]
