"""Flow-Factory: its RewardProcessor computes rewards in process and by its remote client, and of groups over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from accelerate import Accelerator
from checks import MANY, QUESTION, Case, drawn, gdpo, guide, line, main, on_ranks, raised, ran
from flow_factory.advantage import AdvantageProcessor
from flow_factory.hparams import MultiRewardArguments, RewardArguments
from flow_factory.rewards import RewardProcessor, load_reward_model
from flow_factory.samples import T2ISample
from PIL import Image

OURS = "vlmrm.adapters.flow_factory_reward"
THEIRS = "flow_factory.rewards.my_reward_remote.RemotePointwiseRewardModel"


def processor(path: str, **settings: Any) -> RewardProcessor:
    """Flow-Factory's processor of one reward, as its trainers make it."""
    return processor_of(people=(path, settings))


def processor_of(**rewards: tuple[str, dict[str, Any]]) -> RewardProcessor:
    return configured(
        {
            name: RewardArguments(
                name=name, reward_model=path, dtype="float32", device="cpu", batch_size=2, extra_kwargs=settings
            )
            for name, (path, settings) in rewards.items()
        }
    )


def configured(configs: dict[str, RewardArguments]) -> RewardProcessor:
    accelerator = Accelerator(cpu=True)
    models = {name: load_reward_model(config, accelerator) for name, config in configs.items()}
    return RewardProcessor(accelerator, models, configs, verbose=False)


def samples(pictures: list[str]) -> list[T2ISample]:
    return [T2ISample(prompt=QUESTION, image=Image.open(picture).convert("RGB")) for picture in pictures]


def of_guide(case: Case) -> dict[str, Any]:
    configs = MultiRewardArguments.from_dict(yaml.safe_load(guide(case, "flow_factory_reward"))["rewards"])
    rewards = configured({one.name: one for one in configs}).compute_rewards(samples(case.pictures))["people"]
    rows = [drawn(picture, reward) for picture, reward in zip(case.pictures, rewards, strict=True)]
    return ran("its configuration, loader and reward processor", rows)


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


def broken(case: Case) -> str:
    pictures = [case.pictures[0], line(case.folder)]
    for settings in ({"model_path": case.model}, {"reward": "remote_pointwise", "server_url": case.url}):
        ours = processor(f"{OURS}.PointwiseReward", **settings)
        said = raised(lambda ours=ours: ours.compute_rewards(samples(pictures)), "reward people", "sample 1")
    return said


def away(case: Case) -> str:
    def compute() -> Any:
        settings = {"reward": "remote_pointwise", "server_url": case.away, "wait_seconds": 1.0}
        return processor(f"{OURS}.PointwiseReward", **settings).compute_rewards(samples(case.pictures))

    return raised(compute, "reward people", "cannot be reached")


def rank(number: int, case: Case) -> float:
    """The reward of one of a group's two pictures, of which each rank has one."""
    group = processor(f"{OURS}.GroupwiseReward", model_path=case.model)
    [reward] = group.compute_rewards(samples([case.pictures[number]]))["people"].tolist()
    return reward


def ranks(case: Case) -> str:
    got = on_ranks(rank, case)
    raw = processor(f"{OURS}.PointwiseReward", model_path=case.model).compute_rewards(samples(case.pictures))["people"]
    expected = torch.sigmoid(raw - raw.flip(0))  # the share that each wins of the group's other
    assert abs(float(raw[0] - raw[1])) > 1e-4 and torch.allclose(torch.tensor(got), expected, atol=1e-5), (got, raw)
    return "each picture's win rate against that of the other rank"


def of_many(case: Case) -> list[dict[str, Any]]:
    """Two rewards, and its own advantages."""
    pictures = list(case.pictures)
    for number, picture in enumerate(case.pictures):
        pictures.append(str(Path(case.folder, f"turned_{number}.png")))
        Image.open(picture).transpose(Image.Transpose.ROTATE_180).resize((48, 64)).save(pictures[-1])
    path = f"{OURS}.PointwiseReward"
    both = processor_of(people=(path, {"model_path": case.model}), brief=(path, {"reward": "jpeg_compressibility"}))
    drawings = samples(pictures)
    rewards = both.compute_rewards(drawings)
    found = AdvantageProcessor(both.accelerator, MANY, len(pictures)).compute_advantages(drawings, rewards)
    columns = {name: values.tolist() for name, values in rewards.items()}
    expected = gdpo(columns, [0] * len(pictures), epsilon=0.0, ddof=0)
    assert np.allclose(found, expected, atol=1e-4), (found, expected)
    return [drawn(picture, reward) for picture, reward in zip(pictures, columns["people"], strict=True)]


if __name__ == "__main__":
    main({"guide": of_guide, "equal": equal, "broken": broken, "away": away, "ranks": ranks, "gdpo": of_many})
