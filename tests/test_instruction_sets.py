"""The tests that compare scores, once more under each smaller instruction set that this machine has.

PyTorch picks its kernels by the CPU, and sums of one kernel round otherwise than those of another: an equality that
holds to the bit here by chance is red on somebody else's machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
BY_SIZE = ["DEFAULT", "AVX2", "AVX512"]
COMPARING = [
    "batching/test_shared.py",
    "evaluation/test_evaluate.py",
    "modeling/test_adapters.py",
    "modeling/test_architectures.py",
    "modeling/test_checkpoint.py",
    "modeling/test_reward_model.py",
    "modeling/test_vision_cache.py",
    "scoring/test_offline.py",
    "scoring/test_scorer.py",
    "serving/protocols/test_parity.py",
    "training/test_training.py",
]


def smaller_sets() -> list[str]:
    """Return the instruction sets below the one that PyTorch uses here; none on other kinds of CPU."""
    capability = torch.backends.cpu.get_cpu_capability()
    return [name.lower() for name in BY_SIZE[: BY_SIZE.index(capability)]] if capability in BY_SIZE else []


@pytest.mark.parametrize("instructions", smaller_sets())
def test_scores_compare_as_well_under(instructions, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-qp", "no:cacheprovider", "--cheap", f"--basetemp={tmp_path}/t", *COMPARING],
        cwd=ROOT / "tests",
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        | {"ATEN_CPU_CAPABILITY": instructions},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
