"""Make the virtual environments and files of rewards once, for `vlmrm serve prepare`; a stamp file records it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from vlmrm.errors import ConfigError
from vlmrm.files import make_folder, write_file
from vlmrm.serving.settings import RewardSettings, load_settings


def prepare(config: Path, say: Callable[[str], None]) -> None:
    """Prepare the enabled rewards one after the other, with the output of their scripts on the terminal.

    A reward that was prepared by the same script and folders is left as it is.
    """
    # Preparing serves nothing, so it needs no token.
    rewards = load_settings(config, {"VLMRM_TOKEN": "none"}).reward_args
    for reward in rewards:
        say(f"{reward.name}: preparing")
        say(f"{reward.name}: {prepare_reward(reward)}")


def prepare_reward(reward: RewardSettings) -> str:
    """Prepare one reward and return a phrase that says what was done."""
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
