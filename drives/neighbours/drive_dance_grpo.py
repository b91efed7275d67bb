"""DanceGRPO: its sampling of Qwen-Image asks the reward of examples for each picture; what it draws is given.

The models, the loader and the parallel parts of the script need CUDA, and are stand-ins: its own file is run as it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from checks import QUESTION, Case, drawn, line, main, raised, recipe
from PIL import Image

UNUSED = (
    "communications",
    "checkpoint",
    "dataset_utils",
    "fsdp_util",
    "fsdp_util_qwenimage",
    "load",
    "logging_",
    "parallel_states",
    "validation",
)
OTHERS = ("cv2", "hpsv3", "wandb", "fastvideo.dataset", "fastvideo.dataset.latent_qwenimage_rl_datasets")
for name in (*(f"fastvideo.utils.{name}" for name in UNUSED), *OTHERS):
    sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None))

from fastvideo import train_grpo_qwenimage  # noqa: E402

REWARDS = """
rewards:
  - {{name: people, reward_model: remote_pointwise, server_url: "{url}", retry_attempts: 1}}
"""
SIDE = 64  # of its latents' picture, which is not the one that is shown


class Still(torch.nn.Module):
    """A transformer that moves nothing."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> list[torch.Tensor]:
        return [torch.zeros_like(hidden_states)]


class Given:
    """A decoder that shows pictures one after another."""

    dtype = torch.float32
    config = SimpleNamespace(latents_mean=[0.0] * 16, latents_std=[1.0] * 16, z_dim=16)

    def __init__(self, pictures: Sequence[str]):
        self.pictures = iter(pictures)

    def enable_tiling(self) -> None:
        pass

    def decode(self, latents: torch.Tensor, **_: Any) -> list[torch.Tensor]:
        pixels = torch.from_numpy(np.array(Image.open(next(self.pictures)).convert("RGB"))).permute(2, 0, 1)
        return [pixels[None, :, None] / 127.5 - 1]  # [1, 3, 1, H, W]


def rewards(case: Case, url: str, pictures: Sequence[str]) -> list[float]:
    """What its sampling returns as the rewards of the pictures."""
    Path("rewards.yaml").write_text(REWARDS.format(url=url), encoding="utf-8")
    Path("images").mkdir(exist_ok=True)
    os.environ["RANK"] = "0"
    ours = recipe("dance_grpo_reward", url, case.folder).People(device="cpu")
    args = {"w": SIDE, "h": SIDE, "t": 1, "sampling_steps": 1, "shift": 1.0, "eta": 0.3, "init_same_noise": False}
    args |= {"use_hpsv2": False, "use_hpsv3": True, "use_pickscore": False}
    count = len(pictures)
    return train_grpo_qwenimage.sample_reference_model(
        SimpleNamespace(**args),
        "cpu",
        Still(),
        Given(pictures),
        torch.zeros(count, 3, 8),
        torch.ones(count, 3, dtype=torch.long),
        torch.full((count,), 3),
        ours,
        None,
        [QUESTION] * count,
        None,
    )[0].tolist()


def equal(case: Case) -> list[dict[str, Any]]:
    values = rewards(case, case.url, case.pictures)
    return [drawn(picture, value) for picture, value in zip(case.pictures, values, strict=True)]


def broken(case: Case) -> str:
    return raised(lambda: rewards(case, case.url, [line(case.folder)]), "RewardError", "reward people", "sample 0")


def away(case: Case) -> str:
    return raised(lambda: rewards(case, case.away, case.pictures), "RewardError", "cannot be reached")


if __name__ == "__main__":
    main({"equal": equal, "broken": broken, "away": away})
