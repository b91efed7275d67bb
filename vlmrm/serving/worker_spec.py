"""Specify a worker: its class, options, environment, and the revision that they give."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vlmrm
from vlmrm.errors import ConfigError
from vlmrm.files import content_digests, make_folder, write_file
from vlmrm.serving.settings import RewardSettings, load_settings

SCORER = "vlmrm.serving.engines.ScorerEngine"
REWARD = "vlmrm.serving.engines.RewardEngine"
DIGITS = 16
FILES = re.compile(r"(_path|_file|^rubric)$")  # options that name a file, a folder or a repository
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
DOWNLOADS = "download_path"  # a folder that a reward writes to: its content is not a setting
IRRELEVANT = ("device", "api_key", "endpoint_api_key")  # options that change no score, or could be guessed by a digest


@dataclass
class WorkerSpec:
    """The specification of a worker: the class `path`, made with `options` by `python`."""

    path: str
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    python: str = sys.executable
    import_from: list[str] = field(default_factory=list)
    weights: str = ""  # folder, file or repository of the model, whose content is a part of the revision
    budget: int = 65536  # estimated tokens of one batch
    batch_timeout: float = 600.0
    load_timeout: float = 3600.0
    silence: float = 30.0  # seconds without a heartbeat after which the worker counts as dead


def worker_specs(reward: RewardSettings, silence: float) -> list[WorkerSpec]:
    """Return what each of a reward's replicas runs; they have its devices in turn."""
    devices = reward.devices or [reward.device]
    return [worker_spec(reward, devices[number % len(devices)], silence) for number in range(reward.replicas)]


def worker_spec(reward: RewardSettings, device: str, silence: float) -> WorkerSpec:
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
    made = (path, {**options, **reward.options}, reward.venv_python, reward.import_from)
    bounds = (reward.batch_tokens, reward.batch_timeout, reward.load_timeout, silence)
    weights = "" if path == SCORER else reward.model_path
    return WorkerSpec(*made, weights, *bounds)


def is_trained(reward: RewardSettings) -> bool:
    """Return whether the reward is a model trained here: its scorer decodes equal media of a request once."""
    return reward.reward_type == "vlm_reward" and not reward.engine


def revision_of(engine: str, options: Mapping[str, Any], weights: str, info: Mapping[str, Any]) -> str:
    """Return the revision of a reward as a worker has loaded it: equal revisions give equal scores.

    Options and `weights` that name files count by their content, a repository of the hub by the commit in the cache.
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


# Environments --------------------------------------------------------------------------------------------------------


def prepare(config: Path, say: Callable[[str], None]) -> None:
    """Prepare the enabled rewards; one that was prepared by the same script and folders is left as it is."""
    # Preparing serves nothing, so it needs no token.
    rewards = load_settings(config, {"VLMRM_TOKEN": "none"}).reward_args
    for reward in rewards:
        say(f"{reward.name}: preparing")
        say(f"{reward.name}: {prepare_reward(reward)}")


def prepare_reward(reward: RewardSettings) -> str:
    script = Path(reward.setup_script)
    if not reward.setup_script:
        return "nothing to prepare"
    if not script.is_file():
        raise ConfigError(f"reward {reward.name}: there is no setup_script {script}: check the path.")
    python = Path(reward.venv_python)
    # FOLDER/bin/python is an environment of its own; the service's own, or a plain `python`, is none.
    own = reward.venv_python != sys.executable and python.parent.name == "bin"
    environment = str(python.parent.parent) if own else sys.prefix
    content = [script.read_bytes().hex(), reward.download_path, environment, reward.venv_python, reward.model_path]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    folder = environment if own else reward.download_path  # of the stamp
    stamp = Path(folder, f".vlmrm-prepared-{hashlib.sha256(reward.name.encode()).hexdigest()[:12]}")
    with suppress(OSError):  # there is none
        if folder and stamp.read_text() == digest and (not own or python.is_file()):
            return "is prepared already"
    status = subprocess.run(["bash", script, reward.download_path, environment], stdin=subprocess.DEVNULL).returncode
    if status:
        raise ConfigError(f"reward {reward.name}: {script} ended with status {status}: see its output above.")
    if own and not python.is_file():
        raise ConfigError(f"reward {reward.name}: {script} made no {python}: correct one of them.")
    if folder:
        make_folder(stamp.parent)
        write_file(stamp, digest)
    return "prepared"
