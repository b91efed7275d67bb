"""cosmos-rl: its reward dispatcher by the guide's configuration; the pictures that a policy drew are given."""

from __future__ import annotations

import os
import shlex
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from checks import Case, drawn, guide, line, main, raised, ran
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.serving.protocols import cosmos_trainer

PATIENCE_S = 30
DRAW = "Draw a colour."


def rewards(pictures: list[torch.Tensor], case: Case) -> list[float]:
    """The rewards of the pictures, as the dispatcher of cosmos-rl hands them to its trainer, by the guide's lines."""
    cosmos_trainer.pictures = lambda given, frames: torch.stack(given)
    exported = guide(case, "REMOTE_REWARD").replace("export ", "")
    os.environ |= dict(one.split("=", 1) for one in shlex.split(exported))
    config = tomllib.loads(guide(case, "use_remote_reward"))
    return cosmos_trainer.dispatched({"pictures": {DRAW: pictures}}, config)["rewards"][DRAW]


def tensor(file: str) -> torch.Tensor:
    """[3, H, W] between 0 and 1."""
    return torch.from_numpy(np.array(Image.open(file).convert("RGB"))).permute(2, 0, 1) / 255


def of_guide(case: Case) -> dict[str, Any]:
    values = rewards([tensor(file) for file in case.pictures], case)
    rows = [drawn(picture, value, DRAW) for picture, value in zip(case.pictures, values, strict=True)]
    return ran("its configuration and reward dispatcher (its trainer needs CUDA)", rows)


def outcome(pictures: list[torch.Tensor], case: Case) -> str:
    """What becomes of pictures that have no reward: its client may ask for ever."""
    ended: list[str] = []
    asking = Thread(target=lambda: ended.append(raised(lambda: rewards(pictures, case))), daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    assert ended, f"its client asks on: no error in {PATIENCE_S} s"
    return ended[0]


def broken(case: Case) -> str:
    return outcome([tensor(line(case.folder))], case) + ", once its client has logged the failure at level INFO"


def away(case: Case) -> str:
    return outcome([tensor(case.pictures[0])], replace(case, url=case.away))


if __name__ == "__main__":
    main({"guide": of_guide, "equal": lambda case: of_guide(case)["rows"], "broken": broken, "away": away})
    os._exit(0)  # its threads go on
