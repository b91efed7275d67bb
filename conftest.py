"""Fixtures of every test: one thread, no network, no clock, and one tiny checkpoint made once for all of them."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.two_speeds"]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("WANDB__SERVICE_WAIT", "300")  # seconds that its process may take to start


torch.set_num_threads(1)
# The same examples in every run, however slow the machine is.
settings.register_profile(
    "tests", deadline=None, derandomize=True, print_blob=False, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def _messages_reach_caplog(monkeypatch) -> Generator[None]:
    """Let caplog see our messages even after a command has redirected them to a file, which ends with its test."""
    logger = logging.getLogger("vlmrm")
    monkeypatch.setattr(logger, "propagate", True)
    before = list(logger.handlers)
    yield
    for handler in set(logger.handlers) - set(before):
        logger.removeHandler(handler)
        handler.close()


@pytest.fixture(autouse=True)
def _the_environment_ends_with_its_test() -> Generator[None]:
    """HF's trainer and its engines leave their choices, and a launcher's variables, in the environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    asyncio.events._event_loop_policy = None  # an older uvicorn leaves uvloop's


@pytest.fixture(autouse=True)
def _no_server_is_known_from_another_test() -> Generator[None]:
    """A port may be another server's in another test."""
    yield
    if (servers := sys.modules.get("vlmrm.rewards.servers")) is not None:
        servers._origins.clear()
    if (http := sys.modules.get("vlmrm.http")) is not None:
        http._said_at.clear()


class _Deprecations(logging.Handler):
    """Keeps what the libraries say of old calls; `warning_once` says it once a process."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "deprecat" in (message := record.getMessage()).lower():
            self.messages.append(f"{record.name}: {message}")


@pytest.fixture(autouse=True)
def _no_library_logs_a_deprecation() -> Generator[None]:
    """transformers and its neighbours log most deprecations instead of warning of them."""
    handler = _Deprecations()
    libraries = [logging.getLogger(name) for name in ("transformers", "trl", "accelerate", "peft", "datasets")]
    for library in libraries:
        library.addHandler(handler)
    yield
    for library in libraries:
        library.removeHandler(handler)
    assert not handler.messages


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory) -> Path:
    """Return a folder that all workers of this test run share."""
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="session")
def tiny_checkpoint(shared_folder) -> Path:
    """Return a generative tiny Qwen2.5-VL with random weights; do not write to it."""
    from vlmrm.modeling.tiny import make_tiny

    folder = shared_folder / "tiny-qwen2.5-vl"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            make_tiny(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_reward_model(shared_folder, tiny_checkpoint) -> Path:
    """Return the tiny checkpoint with an untrained linear head, as training saves it; do not write to it."""
    from vlmrm.modeling import load_for_training, load_processor, save_reward_files, write_complete

    folder = shared_folder / "tiny-reward-model"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            load_for_training(tiny_checkpoint).save_pretrained(folder)
            save_reward_files(
                folder,
                processor=load_processor(tiny_checkpoint),
                head="linear",
                provenance={},
            )
            write_complete(folder, world_size=1, step=0)
    return folder


@pytest.fixture
def train_here(tmp_path, tiny_checkpoint, monkeypatch):
    """`train_here(data, name="out", **keys)` trains shortly in this process; `tmp_path / name` is its folder."""
    from tests.runs import short_training
    from vlmrm.training import train

    monkeypatch.chdir(tmp_path)

    def run(data, name: str = "out", model: Path = tiny_checkpoint, **keys):
        return train(short_training(model, data, tmp_path / name, **keys))

    return run
