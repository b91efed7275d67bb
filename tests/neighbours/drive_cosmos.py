"""cosmos-rl: its reward dispatcher against a service; the pictures that a policy drew are given."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checks import Case, main, raised
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "serving" / "protocols"))
import cosmos_trainer

DRAW = "Draw a colour."


def rewards(pictures: list[torch.Tensor], url: str) -> list[float]:
    """The rewards of the pictures, as the dispatcher of cosmos-rl hands them to its trainer."""
    cosmos_trainer.pictures = lambda given, frames: torch.stack(given)
    asked = {
        "url": url,
        "token": "",
        "reward_fns": [{"name": "vlm_reward", "weight": 1.0}],
        "pictures": {DRAW: pictures},
    }
    return cosmos_trainer.trainer(asked)["rewards"][DRAW]


def tensor(file: str) -> torch.Tensor:
    """[3, H, W] between 0 and 1."""
    return torch.from_numpy(np.array(Image.open(file).convert("RGB"))).permute(2, 0, 1) / 255


def equal(case: Case) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": DRAW},
                {"role": "assistant", "content": [{"type": "image", "image": file}]},
            ],
            "reward": value,
        }
        for file, value in zip(case.pictures, rewards([tensor(file) for file in case.pictures], case.url), strict=True)
    ]


def away(case: Case) -> str:
    return raised(lambda: rewards([tensor(case.pictures[0])], case.away))


if __name__ == "__main__":
    main({"equal": equal, "away": away})
