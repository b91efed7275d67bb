"""The tests that compare scores, once more under the smallest instruction set.

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
    "modeling/test_adapters.py",
    "modeling/test_reward_model.py",
    "scoring/test_scorer.py",
    "training/test_training.py",
]


def smallest_set() -> list[str]:
    """Return PyTorch's smallest instruction set, if it uses a larger one here; other kinds of CPU have none."""
    return BY_SIZE[:1] if torch.backends.cpu.get_cpu_capability() in BY_SIZE[1:] else []


@pytest.mark.parametrize("instructions", smallest_set())
def test_scores_compare_as_well_under(instructions, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-qp", "no:cacheprovider", "--cheap", f"--basetemp={tmp_path}/t", *COMPARING],
        cwd=ROOT / "tests",
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        | {"ATEN_CPU_CAPABILITY": instructions.lower()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
