"""Specify a worker: its class, options, environment, and the revision that they give."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vlmrm
from vlmrm.files import content_digests
from vlmrm.serving.settings import RewardSettings

SCORER = "vlmrm.serving.engines.ScorerEngine"
REWARD = "vlmrm.serving.engines.RewardEngine"
DIGITS = 16
FILES = re.compile(r"(_path|_file|^rubric)$")  # options that name a file, a folder or a repository
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
DOWNLOADS = "download_path"  # a folder that a reward writes to: its content is not a setting
IRRELEVANT = ("device", "api_key", "endpoint_api_key")  # options that change no score, or could be guessed by a digest


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


# Revisions -----------------------------------------------------------------------------------------------------------


def revision_of(engine: str, options: Mapping[str, Any], weights: str, info: Mapping[str, Any]) -> str:
    """Return the revision of a reward as a worker has loaded it: equal revisions give equal scores.

    Args:
        options: those that name a file or folder count by its content, and a repository of the Hugging Face hub by the
            commit that is in the cache.
        weights: such a folder, file or repository; "" for a reward without, or whose worker names them in `info`.
        info: what the worker says about its reward.
    """
    settings = {name: value for name, value in options.items() if name not in IRRELEVANT}
    paths = {name: value for name, value in settings.items() if FILES.search(name) and isinstance(value, str)}
    files = {name: _content(value) for name, value in paths.items() if name != DOWNLOADS}
    return digest(vlmrm.__version__, engine, settings, dict(info), _content(weights), files)


def weights_on_disk(options: Mapping[str, Any], weights: str) -> dict[Path, tuple[int, ...]]:
    """Return the files of weights that a reward may load, as they are: one that is written again is another."""
    named = [value for name, value in options.items() if FILES.search(name) or name == "model"]
    roots = [Path(value) for value in (weights, *named) if isinstance(value, str) and value]
    found = (file for root in roots for file in ([root] if root.is_file() else root.rglob("*")))
    states = {file: file.stat() for file in found if file.suffix in WEIGHTS and file.is_file()}
    return {file: (state.st_ino, state.st_size, state.st_mtime_ns) for file, state in states.items()}


def digest(*parts: Any) -> str:
    """Return a short digest of a JSON tree."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:DIGITS]


def _content(weights: str) -> str:
    path = Path(weights)
    if not weights or not path.exists():
        return _commit(weights)
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return digest({file.relative_to(path).as_posix(): value for file, value in content_digests(files).items()})


def _commit(repository: str) -> str:
    """Return the commit of a repository in Hugging Face's cache; "" where it is not cached."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE

        return (Path(HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "refs/main").read_text().strip()
    except (ImportError, OSError):
        return ""
