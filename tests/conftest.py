"""Fixtures of every test: one thread, no network, and one tiny checkpoint made once for all of them."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from filelock import FileLock

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory) -> Path:
    """A folder that all workers of this test run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base


@pytest.fixture(scope="session")
def tiny_checkpoint(shared_folder) -> Path:
    """A tiny Qwen2.5-VL with random weights, as one downloads it; read it only."""
    from vlmrm.modeling.tiny import make_tiny

    folder = shared_folder / "tiny-qwen2.5-vl"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            make_tiny(folder)
    return folder
