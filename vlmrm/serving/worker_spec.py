"""Specify a worker: the class that it runs, its options and its environment."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from vlmrm.serving.settings import RewardSettings

SCORER = "vlmrm.serving.engines.ScorerEngine"
REWARD = "vlmrm.serving.engines.RewardEngine"


@dataclass
class RayPlacement:
    """What a worker needs of the node of a Ray cluster that its process is to run on."""

    address: str
    num_cpus: float
    num_gpus: float
    runtime_env: dict[str, Any] = field(default_factory=dict, repr=False)  # may hold keys


@dataclass
class WorkerSpec:
    """The specification of a worker: the class `path`, made with `options` by `python`.

    Args:
        weights: folder, file or repository of the model, whose content is a part of the revision.
        budget: estimated tokens of one batch.
        batch_timeout: seconds that a batch may take before the worker counts as hung.
        load_timeout: seconds that loading may take.
        silence: seconds without a heartbeat after which the worker counts as dead.
        ray: where Ray is to place it; None for this machine.
    """

    path: str
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    python: str = sys.executable
    import_from: list[str] = field(default_factory=list)
    weights: str = ""
    budget: int = 65536
    batch_timeout: float = 600.0
    load_timeout: float = 3600.0
    silence: float = 30.0
    ray: RayPlacement | None = None


def worker_specs(reward: RewardSettings, silence: float) -> list[WorkerSpec]:
    """Return what each of a reward's replicas runs; they have its devices in turn."""
    devices = reward.devices or [reward.device]
    return [worker_spec(reward, devices[number % len(devices)], silence) for number in range(reward.replicas)]


def worker_spec(reward: RewardSettings, device: str, silence: float) -> WorkerSpec:
    """Return what a worker of this reward runs on a device."""
    if is_trained(reward):
        path = SCORER
        options = {"model": reward.model_path, "dtype": reward.dtype, "device": device or None}
    else:
        path = reward.engine
        options = {
            "model_path": reward.model_path,
            "download_path": reward.download_path,
            "endpoint_url": reward.endpoint_url,
            "endpoint_api_key": reward.endpoint_api_key.get_secret_value(),
            "dtype": "" if reward.dtype == "auto" else reward.dtype,
            "device": device,
        }
        options = {name: value for name, value in options.items() if value}
        if not reward.engine:
            path = REWARD
            options.pop("download_path", None)
            names = {"model_path": "model_name_or_path", "endpoint_url": "api_base_url", "endpoint_api_key": "api_key"}
            options = {names.get(name, name): value for name, value in options.items()}
            options |= {"name": reward.name, "reward_model": reward.reward_type}
    place = RayPlacement(reward.ray_address, reward.num_cpus, reward.num_gpus, reward.runtime_env)
    return WorkerSpec(
        path,
        {**options, **reward.options},
        python=reward.venv_python,
        import_from=reward.import_from,
        weights="" if path == SCORER else reward.model_path,
        budget=reward.batch_tokens,
        batch_timeout=reward.batch_timeout,
        load_timeout=reward.load_timeout,
        silence=silence,
        ray=place if reward.ray_address else None,
    )


def is_trained(reward: RewardSettings) -> bool:
    """Return whether the reward is a model trained here: its scorer decodes equal media of a request once."""
    return reward.reward_type == "vlm_reward" and not reward.engine
