"""Flow-GRPO: its multi_score weighs pictures' rewards, one of them as examples/frameworks writes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checks import QUESTION, Case, drawn, line, main, raised, recipe
from flow_grpo.rewards import multi_score
from PIL import Image

REWARDS = """
rewards:
  - {{name: people, reward_model: remote_pointwise, server_url: "{url}", retry_attempts: 1}}
"""


def scores(case: Case, url: str, pictures: Sequence[str]) -> dict[str, Any]:
    Path("rewards.yaml").write_text(REWARDS.format(url=url), encoding="utf-8")
    recipe("flow_grpo_reward", url, case.folder)
    pixels = [torch.from_numpy(np.array(Image.open(one).convert("RGB"))).permute(2, 0, 1) for one in pictures]
    score = multi_score("cpu", {"qwenvl": 1.0, "jpeg_compressibility": 0.5})
    return score(torch.stack(pixels).float() / 255, (QUESTION,) * len(pictures), [{}] * len(pictures))[0]


def equal(case: Case) -> list[dict[str, Any]]:
    found = scores(case, case.url, case.pictures)
    weighed = np.array(found["qwenvl"]) + 0.5 * np.array(found["jpeg_compressibility"])
    assert np.allclose(found["avg"], weighed), found
    return [drawn(picture, reward) for picture, reward in zip(case.pictures, found["qwenvl"], strict=True)]


def broken(case: Case) -> str:
    """Pictures are one tensor there: all are lines."""
    pictures = 2 * [line(case.folder)]
    return raised(lambda: scores(case, case.url, pictures), "reward people", "sample 0")


def away(case: Case) -> str:
    return raised(lambda: scores(case, case.away, case.pictures), "reward people", "cannot be reached")


if __name__ == "__main__":
    main({"equal": equal, "broken": broken, "away": away})
