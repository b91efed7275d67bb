"""Flow-Factory: its RewardProcessor computes rewards in process and by its remote client, and of groups over ranks."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from checks import QUESTION, Case, drawn, main, raised
from flow_factory.hparams import RewardArguments
from flow_factory.rewards import RewardProcessor, load_reward_model
from flow_factory.samples import T2ISample
from PIL import Image

OURS = "vlmrm.adapters.flow_factory_reward"
THEIRS = "flow_factory.rewards.my_reward_remote.RemotePointwiseRewardModel"
RANKS = 2


def processor(path: str, **settings: Any) -> RewardProcessor:
    """Flow-Factory's processor of one reward, as its trainers make it."""
    config = RewardArguments(
        name="people", reward_model=path, dtype="float32", device="cpu", batch_size=2, extra_kwargs=settings
    )
    accelerator = Accelerator(cpu=True)
    model = load_reward_model(config, accelerator)
    return RewardProcessor(accelerator, {"people": model}, {"people": config}, verbose=False)


def samples(pictures: list[str]) -> list[T2ISample]:
    return [T2ISample(prompt=QUESTION, image=Image.open(picture).convert("RGB")) for picture in pictures]


def equal(case: Case) -> list[dict[str, Any]]:
    ways = (
        (f"{OURS}.PointwiseReward", {"model_path": case.model}),
        (f"{OURS}.PointwiseReward", {"reward": "remote_pointwise", "server_url": case.url}),
        (THEIRS, {"server_url": case.url}),
    )
    rows = []
    for path, settings in ways:
        rewards = processor(path, **settings).compute_rewards(samples(case.pictures))["people"]
        rows += [drawn(picture, reward) for picture, reward in zip(case.pictures, rewards, strict=True)]
    return rows


def away(case: Case) -> str:
    def compute() -> Any:
        settings = {"reward": "remote_pointwise", "server_url": case.away, "wait_seconds": 1.0}
        return processor(f"{OURS}.PointwiseReward", **settings).compute_rewards(samples(case.pictures))

    return raised(compute, "reward people", "cannot be reached")


def rank(number: int, port: int, case: Case, file: str) -> None:
    """Be one of the ranks, each with one of a group's two pictures."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    group = processor(f"{OURS}.GroupwiseReward", model_path=case.model)
    assert group.accelerator.num_processes == RANKS
    [reward] = group.compute_rewards(samples([case.pictures[number]]))["people"].tolist()
    Path(f"{file}{number}").write_text(json.dumps(reward), encoding="utf-8")
    torch.distributed.destroy_process_group()


def ranks(case: Case) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = str(Path(case.folder, "reward"))
    torch.multiprocessing.spawn(rank, (port, case, file), nprocs=RANKS)
    got = [json.loads(Path(f"{file}{number}").read_text(encoding="utf-8")) for number in range(RANKS)]
    raw = processor(f"{OURS}.PointwiseReward", model_path=case.model).compute_rewards(samples(case.pictures))["people"]
    expected = torch.sigmoid(raw - raw.flip(0))  # the share that each wins of the group's other
    assert abs(float(raw[0] - raw[1])) > 1e-4 and torch.allclose(torch.tensor(got), expected, atol=1e-5), (got, raw)
    return "each picture's win rate against that of the other rank"


if __name__ == "__main__":
    main({"equal": equal, "away": away, "ranks": ranks})
