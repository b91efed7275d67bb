"""A machine without torch and accelerate can ask judges and servers for rewards, and compute advantages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rewards.reward_server import RewardServer

WITHOUT = "import sys; sys.modules.update(dict.fromkeys(['torch', 'torchvision', 'accelerate', 'transformers']))\n"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def server():
    server = RewardServer()
    yield server
    server.close()


def run(program: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", WITHOUT + program], env=environment, check=True, timeout=120)


def test_a_server_is_asked_without_torch(server):
    config = [{"name": "width", "reward_model": "remote_pointwise", "server_url": server.url, "async_reward": True}]
    config += [{"reward_model": "format", "pattern": "a.*"}, {"name": "size", "reward_model": "jpeg_compressibility"}]
    run(f"""
import numpy as np
from PIL import Image
from vlmrm.rewards import RewardSet

images = [Image.new("RGB", (50, 40)), np.full((3, 4, 7), 0.5, dtype=np.float32), np.zeros((3, 4, 9), dtype=np.uint8)]
served = {{"name": "served", "reward_model": "vlm_reward", "model_path": {server.url!r}}}
assert RewardSet(served).rewards[0].model.loaded.reward is None
scored = RewardSet({config!r})(
    prompt=["a", "b", "c"], image=images, groups=[1, 1, 2], response=["a", "b", "a"]
)
assert scored.rewards["width"].tolist() == [50.0, 7.0, 9.0]
assert scored.rewards["default"].tolist() == [1.0, 0.0, 1.0]
assert np.isfinite(scored.advantages("sum")).all()
""")


@pytest.mark.parametrize("module", ["trl_reward", "swift_orm", "verl_reward", "flow_factory_reward", "plain"])
def test_adapters_are_imported_without_torch(module):
    run(f"import vlmrm.adapters.{module}")
    run("from vlmrm.rewards import RewardArguments; assert RewardArguments().dtype == 'bfloat16'")
