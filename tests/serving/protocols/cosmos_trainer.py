"""Runs cosmos-rl's own clients, unmodified, in an environment that has them.

    .cache/neighbours/cosmos/bin/python cosmos_trainer.py DESCRIPTOR

answers each line of its input, a JSON object, with one at DESCRIPTOR, since the package prints what it likes:
`{"rewards", "advantages"}` or `{"error"}`. Its keys are `url`, `token`, `client`, `pictures` (the brightness of each,
by prompt), and what its client reads.
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from cosmos_rl.dispatcher.data.schema import RLPayload
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.wfm import RemoteRewardConfig
from cosmos_rl.policy.model.wfm.rewards.reward_models import RemoteReward
from cosmos_rl.reward.dispatcher import RewardDispatcher
from cosmos_rl.reward.remote_calculator import RemoteRewardCalculator
from diffusers import AutoencoderKLWan

Answer = dict[str, Any]


def trainer(asked: dict[str, Any]) -> Answer:
    """What reinforcement learning of diffusion models does: pictures of prompts in, rewards and advantages out.

    `reward_fns` and `batch_size` are its configuration's, with nothing cut off; with `vae` each picture is a video of
    `frames`.
    """
    os.environ["REMOTE_REWARD_ENQUEUE_URL"] = asked["url"] + "/api/reward/enqueue"
    os.environ["REMOTE_REWARD_FETCH_URL"] = asked["url"] + "/api/reward/pull"
    os.environ["REMOTE_REWARD_TOKEN"] = asked["token"]
    wide = {"clip_min": -1000, "clip_max": 1000}
    remote = {
        "reward_fns": [{**wide, **one} for one in asked["reward_fns"]],
        "batch_size": asked.get("batch_size", 1),
        "reward_clip_min": -1000,
        "reward_clip_max": 1000,
    }
    policy = {"type": "grpo", "use_remote_reward": True, "remote_reward": remote}
    return dispatched(asked, {"train": {"train_policy": policy}})


def dispatched(asked: dict[str, Any], config: dict[str, Any]) -> Answer:
    """What its dispatcher makes of pictures by a configuration; the environment says where it asks."""
    config["train"]["output_dir"] = ""
    RemoteRewardCalculator._instance = RemoteRewardCalculator()  # it is set up once in a process otherwise
    dispatcher = RewardDispatcher()
    dispatcher.setup(Config.from_dict(config), num_workers=0)
    video = "vae" in asked
    if video:
        dispatcher.reward_calculator.tokenizer = SimpleNamespace(encode=lambda videos: encoded(asked["vae"], videos))
    payloads = [
        RLPayload(
            prompt={"prompt": prompt},
            prompt_idx=number,
            completions=pictures(brightness, asked.get("frames")),
            extra_info={"modality": "video", "video_fps": 8.0} if video else {"modality": "image"},
        )
        for number, (prompt, brightness) in enumerate(asked["pictures"].items())
    ]
    dispatcher.enqueue_rewards_cal(payloads, False, 7)
    done: list[RLPayload] = []
    while not dispatcher.is_empty():
        some, validation, step, _ = dispatcher.dequeue_rewards_cal()
        assert (validation, step) == (False, 7)
        done += some
    return {
        "rewards": {one.prompt["prompt"]: one.rewards for one in done},
        "advantages": {one.prompt["prompt"]: one.advantages for one in done},
    }


def older(asked: dict[str, Any]) -> Answer:
    """What training of world models does: latents of a video for each prompt, and one reward."""
    config = RemoteRewardConfig(
        token=asked["token"],
        enqueue_url=asked["url"] + "/api/reward/enqueue",
        fetch_url=asked["url"] + "/api/reward/pull",
        **asked["reward"],
    )
    videos = torch.cat([pictures(brightness, asked["frames"]) for brightness in asked["pictures"].values()])
    batch = {"ai_caption": list(asked["pictures"])}
    rewards, _, _ = RemoteReward(config).compute_reward(batch, videos, latents=encoded(asked["vae"], videos))
    return {"rewards": rewards.tolist()}


def pictures(brightness: list[float], frames: int | None) -> torch.Tensor:
    """[B, 3, 16, 24] between 0 and 1, or as videos [B, frames, 3, 16, 24]."""
    images = torch.tensor(brightness).view(-1, 1, 1, 1).expand(-1, 3, 16, 24)
    return images if frames is None else images[:, None].expand(-1, frames, -1, -1, -1)


@cache
def autoencoder(folder: str) -> Any:
    return AutoencoderKLWan.from_pretrained(folder).eval()


@torch.no_grad()
def encoded(folder: str, videos: torch.Tensor) -> torch.Tensor:
    """Latents as Wan's tokenizer of cosmos-rl has them, (z - mean) / std by channel."""
    vae = autoencoder(folder)
    mean, std = (torch.tensor(one).view(1, -1, 1, 1, 1) for one in (vae.config.latents_mean, vae.config.latents_std))
    channels_first = videos if videos.shape[1] == 3 else videos.permute(0, 2, 1, 3, 4)
    return (vae.encode(channels_first).latent_dist.mode() - mean) / std


def main() -> None:
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"trainer": trainer, "older": older}[asked["client"]](asked)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
