"""UniRL: its reward service asks ours, by its remote backend, for the rewards of pictures that a policy drew.

So does the client of its own service, outside a trainer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from checks import QUESTION, Case, drawn, main, raised
from PIL import Image
from reward_service.client import RewardClient, RewardRequest
from unirl.reward.remote import RemoteRewardBackend, RemoteRewardSpec
from unirl.reward.service import RewardService
from unirl.types.primitives import Images, Texts
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutTrack


def rewards(url: str, pixels: torch.Tensor, question: str = QUESTION) -> list[float]:
    """The rewards that it attaches to its rollout of pictures [N, 3, H, W]."""
    spec = RemoteRewardSpec(
        base_url=f"{url}/unirl",
        required_rewards=("vlm_reward",),
        image_format="PNG",
        max_retries=2,
        retry_delay=0.1,
        timeout=60,
    )
    service = RewardService(RemoteRewardBackend(config=spec, base_device="cpu"))
    names = [f"sample {number}" for number in range(len(pixels))]
    request = RolloutReq(sample_ids=names, group_ids=names, primitives={"text": Texts([question] * len(names))})
    track = RolloutTrack(sample_ids=names, decoded=Images(pixels))
    return service.score_and_attach(req=request, track=track).rewards.tolist()


def drawings(case: Case) -> torch.Tensor:
    pixels = [torch.from_numpy(np.array(Image.open(one))).permute(2, 0, 1) for one in case.pictures]
    return torch.stack(pixels).float() / 255


def equal(case: Case) -> list[dict[str, Any]]:
    values = rewards(case.url, drawings(case)) + asked(case)
    return [drawn(picture, value) for picture, value in zip(2 * case.pictures, values, strict=True)]


def asked(case: Case) -> list[float]:
    client = RewardClient(f"{case.url}/unirl", image_format="PNG")
    names = client.rewards()
    assert names == ["vlm_reward"] == list(client.health()["rewards"]), names
    pictures = [Image.open(one).convert("RGB") for one in case.pictures]
    requests = [RewardRequest([(QUESTION, one)], names, metadata={"split": "test"}) for one in pictures]
    return [found["vlm_reward"]["vlm_reward"] for found in client.score(requests)]


def broken(case: Case) -> str:
    """A picture is always whole that was drawn: one that is a line has no score."""
    return raised(lambda: rewards(case.url, torch.rand(1, 3, 1, 400)), "flagged 1 of 1", "vlm_reward")


def away(case: Case) -> str:
    return raised(lambda: rewards(case.away, drawings(case)), "failed after 2 retries", "Connection refused")


if __name__ == "__main__":
    main({"equal": equal, "broken": broken, "away": away})
