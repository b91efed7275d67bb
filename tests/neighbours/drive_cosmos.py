"""cosmos-rl: its reward dispatcher against a service; the pictures that a policy drew are given."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from checks import Case, main, raised
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "serving" / "protocols"))
import cosmos_trainer

PATIENCE_S = 60
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
    ended: list[str] = []
    asking = Thread(
        target=lambda: ended.append(raised(lambda: rewards([tensor(case.pictures[0])], case.away))), daemon=True
    )
    asking.start()
    asking.join(PATIENCE_S)
    assert ended, f"its client asks on: no error in {PATIENCE_S} s"
    return ended[0]


if __name__ == "__main__":
    main({"equal": equal, "away": away})
    os._exit(0)  # its threads go on
