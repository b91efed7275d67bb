"""Ranks with and without images train together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_batch_of_texts_on_one_rank_does_not_hang_the_other(tiny_checkpoint):
    program = Path(__file__).with_name("two_ranks.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*launch, program, tiny_checkpoint], capture_output=True, text=True, timeout=300)
    assert "equal" in done.stdout, done.stderr
