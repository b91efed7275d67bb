"""cosmos-rl: its reward dispatcher against a service; the pictures that a policy drew are given."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from checks import Case, drawn, line, main, raised
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.serving.protocols import cosmos_trainer

PATIENCE_S = 30
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
    values = rewards([tensor(file) for file in case.pictures], case.url)
    return [drawn(picture, value, DRAW) for picture, value in zip(case.pictures, values, strict=True)]


def outcome(pictures: list[torch.Tensor], url: str) -> str:
    """What becomes of pictures that have no reward: its client may ask for ever."""
    ended: list[str] = []
    asking = Thread(target=lambda: ended.append(raised(lambda: rewards(pictures, url))), daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    assert ended, f"its client asks on: no error in {PATIENCE_S} s"
    return ended[0]


def broken(case: Case) -> str:
    return outcome([tensor(line(case.folder))], case.url) + ", once its client has logged the failure at level INFO"


def away(case: Case) -> str:
    return outcome([tensor(case.pictures[0])], case.away)


if __name__ == "__main__":
    main({"equal": equal, "broken": broken, "away": away})
    os._exit(0)  # its threads go on
