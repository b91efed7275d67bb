"""UniRL: its remote backend asks the service for the rewards of pictures that a policy drew."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from checks import QUESTION, Case, drawn, main, raised
from PIL import Image
from unirl.reward.remote import RemoteRewardBackend, RemoteRewardSpec
from unirl.types.primitives import Images, Texts
from unirl.types.reward import RewardRequest


def compute(url: str, pictures: list[str], reward: str = "vlm_reward") -> Any:
    spec = RemoteRewardSpec(
        base_url=f"{url}/unirl", required_rewards=(reward,), image_format="PNG", max_retries=1, timeout=30
    )
    backend = RemoteRewardBackend(config=spec, base_device="cpu")
    if url and not backend.is_available():
        raise ConnectionError(f"{url} is not available")
    pixels = torch.stack([torch.from_numpy(np.array(Image.open(one))).permute(2, 0, 1) for one in pictures])
    request = RewardRequest({"text": Texts([QUESTION] * len(pictures))}, {"image": Images(pixels.float() / 255)})
    return backend.compute_rewards(request)


def equal(case: Case) -> list[dict[str, Any]]:
    response = compute(case.url, case.pictures)
    assert response.successes == [True] * len(case.pictures), response
    return [drawn(picture, reward) for picture, reward in zip(case.pictures, response.rewards, strict=True)]


def away(case: Case) -> str:
    return raised(lambda: compute(case.away, case.pictures), "is not available")


if __name__ == "__main__":
    main({"equal": equal, "away": away})
