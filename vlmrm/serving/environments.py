"""Make the virtual environments and files of rewards once, for `vlmrm serve prepare`; a stamp file records it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from vlmrm.errors import ConfigError
from vlmrm.files import make_folder, write_json
from vlmrm.serving.settings import RewardSettings, load_settings


def prepare(config: Path, say: Callable[[str], None]) -> None:
    """Prepare the enabled rewards one after the other, with the output of their scripts on the terminal.

    A reward that was prepared by the same script, requirements and folders is left as it is.
    """
    # Preparing serves nothing, so it needs no token.
    rewards = load_settings(config, {"VLMRM_TOKEN": "none"}).reward_args
    for reward in rewards:
        say(f"{reward.name}: preparing")
        say(f"{reward.name}: {prepare_reward(reward)}")


def prepare_reward(reward: RewardSettings) -> str:
    """Prepare one reward and return a phrase that says what was done."""
    if not reward.setup_script and not reward.requirements:
        return "nothing to prepare"
    if reward.setup_script and reward.requirements:
        raise ConfigError(
            f"reward {reward.name}: setup_script and requirements both say what to do: give one of them."
        )
    folder = environment_of(reward.venv_python)
    stamp, checksum = _stamp(reward, folder), _checksum(reward, folder)
    if stamp is not None and _read_stamp(stamp) == checksum and _exists(reward.venv_python):
        return "is prepared already"
    if reward.setup_script:
        _run_script(reward, folder)
    else:
        _install(reward, folder)
    if folder is not None and not _exists(reward.venv_python):
        raise ConfigError(
            f"reward {reward.name}: {reward.setup_script} made no {reward.venv_python}: correct one of them."
        )
    if stamp is not None:
        make_folder(stamp.parent)
        write_json(stamp, {"sha256": checksum})
    return "prepared"


def environment_of(python: str) -> Path | None:
    """Return the virtual environment of `FOLDER/bin/python`; None for the service's own and for plain `python`."""
    path = Path(python)
    if python == sys.executable or path.parent.name != "bin":
        return None
    return path.parent.parent


def _run_script(reward: RewardSettings, folder: Path | None) -> None:
    if not Path(reward.setup_script).is_file():
        raise ConfigError(f"reward {reward.name}: there is no setup_script {reward.setup_script}: check the path.")
    environment = sys.prefix if folder is None else str(folder)
    _run(reward, ["bash", reward.setup_script, reward.download_path, environment])


def _install(reward: RewardSettings, folder: Path | None) -> None:
    if folder is None:
        raise ConfigError(
            f"reward {reward.name}: requirements are installed into an environment of their own: set venv_python to "
            "FOLDER/bin/python, which is made."
        )
    if not _exists(reward.venv_python):
        _run(reward, [sys.executable, "-m", "venv", str(folder)])
    # After --, pip takes no requirement for an option.
    _run(reward, [reward.venv_python, "-m", "pip", "install", "--", *reward.requirements])


def _run(reward: RewardSettings, command: Sequence[str]) -> None:
    try:
        status = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
    except OSError as error:
        raise ConfigError(f"reward {reward.name}: {command[0]} cannot be run ({error.strerror}).") from error
    if status:
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        raise ConfigError(f"reward {reward.name}: {' '.join(command[:4])} {how}: see its output above.")


def _stamp(reward: RewardSettings, folder: Path | None) -> Path | None:
    """Return the file with the checksum of the last preparation; None where there is no folder for it."""
    if folder is None and not reward.download_path:
        return None
    name = f".vlmrm-prepared-{hashlib.sha256(reward.name.encode()).hexdigest()[:12]}"
    return (folder or Path(reward.download_path)) / name


def _checksum(reward: RewardSettings, folder: Path | None) -> str:
    script = Path(reward.setup_script).read_bytes().hex() if Path(reward.setup_script).is_file() else None
    content = [script, reward.requirements, reward.download_path, str(folder), reward.venv_python, reward.model_path]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _read_stamp(stamp: Path) -> str | None:
    try:
        return json.loads(stamp.read_text())["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # missing or cut off: prepare again


def _exists(python: str) -> bool:
    return "/" not in python or Path(python).is_file()  # a name without a folder is found on PATH
