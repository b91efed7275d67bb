"""Ranks with and without images train together."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests import preloaded

# A tower with its merger; states that fork; experts; experts for images alone; a merger that the backbone runs.
FAMILIES = ("qwen2_5_vl", "qwen3_5", "qwen3_vl_moe", "ernie4_5_vl_moe", "llama4")


def test_a_text_batch_never_hangs_the_other_rank():
    program = Path(__file__).with_name("two_ranks.py")
    launch = [preloaded.python(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*launch, program, *FAMILIES], capture_output=True, text=True, timeout=300)
    assert all(f"{family} equal" in done.stdout for family in FAMILIES), done.stderr
